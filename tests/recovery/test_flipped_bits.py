"""One flipped bit anywhere: what it hits is reported, all else is read, nothing is changed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from magnetar.errors import CorruptData, CorruptEntry
from magnetar.ledger.api import LedgerState
from magnetar.server.embedded import Storage, open_storage
from tests.recovery.stores import SMALL, content, expected_content, hashes, write_stores

PAYLOADS = [bytes([48 + number]) * size for number, size in enumerate((15, 0, 130, 40, 3, 700))]
HEADERS = 1024
OVERHEAD = 25


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store with one closed ledger."""
    folder = tmp_path_factory.mktemp("flips") / "store"

    async def write() -> None:
        storage = await open_storage(folder, limits=SMALL)
        writer = await storage.ledgers.create()
        await asyncio.gather(*map(writer.append, PAYLOADS))
        await writer.close()
        await storage.close()

    asyncio.run(write())
    return folder


def _header_bits() -> list[int]:
    return [copy * 512 * 8 + bit for copy in (0, 1) for bit in range(0, 44 * 8, 5)] + [60 * 8]


def _entry_bits() -> list[int]:
    """Every bit of crc, size, kind and ids, each in one record at least, and some of payloads."""
    bits = []
    start = HEADERS
    for number, payload in enumerate(PAYLOADS):
        bits += [start * 8 + bit for bit in range(number % 5, OVERHEAD * 8, 5)]
        bits += [(start + OVERHEAD) * 8 + bit for bit in range(0, len(payload) * 8, 131)]
        start += OVERHEAD + len(payload)
    return bits


def test_flipped_bit_in_a_ledger_header_is_worked_around(store: Path) -> None:
    _check_flips(store, "ledger", _header_bits(), damaged_at_most=0)


@pytest.mark.slow
def test_flipped_bit_in_an_entry_damages_that_entry_only(store: Path) -> None:
    _check_flips(store, "ledger", _entry_bits(), damaged_at_most=1)


@pytest.mark.slow
def test_flipped_bit_in_an_index_is_worked_around(store: Path) -> None:
    _check_flips(store, "index", list(range(0, len(PAYLOADS) * 64, 5)), damaged_at_most=0)


def _check_flips(store: Path, suffix: str, bits: list[int], *, damaged_at_most: int) -> None:
    (path,) = (store / "ledgers").rglob(f"*.{suffix}")
    original = path.read_bytes()
    try:
        for bit in bits:
            flipped = bytearray(original)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            before = hashes(store / "ledgers")
            damaged = asyncio.run(_damaged_entries(store, int(path.stem)))
            assert len(damaged) <= damaged_at_most, f"bit {bit}"
            if damaged_at_most:
                assert damaged == {_entry_at(bit // 8)}, f"bit {bit}"
            assert hashes(store / "ledgers") == before, f"bit {bit}"
    finally:
        path.write_bytes(original)


def _entry_at(offset: int) -> int:
    start = HEADERS
    for entry_id, payload in enumerate(PAYLOADS):
        start += OVERHEAD + len(payload)
        if offset < start:
            return entry_id
    raise AssertionError(f"no entry at byte {offset}")


async def _damaged_entries(store: Path, ledger_id: int) -> set[int]:
    """Which entries are refused, read one by one and all at once; the others must be right."""
    storage = await open_storage(store, limits=SMALL)
    try:
        info = await storage.ledgers.info(ledger_id)
        assert (info.state, info.last_entry) == (LedgerState.CLOSED, len(PAYLOADS) - 1)
        damaged = set()
        messages: list[tuple[str, str]] = []
        for entry_id, payload in enumerate(PAYLOADS):
            try:
                (entry,) = await storage.ledgers.read(ledger_id, entry_id, entry_id)
            except CorruptEntry as error:
                damaged.add(entry_id)
                messages.append((f"entry {ledger_id}:{entry_id} is damaged", str(error)))
            else:
                assert entry.payload == payload
        assert all(text in message for text, message in messages), messages
        await _check_ranges(storage, ledger_id, damaged)
        return damaged
    finally:
        await storage.close()


async def _check_ranges(storage: Storage, ledger_id: int, damaged: set[int]) -> None:
    """A range read stops before what is damaged."""
    for first in range(len(PAYLOADS)):
        if first not in damaged:
            stop = min((each for each in damaged if each > first), default=len(PAYLOADS))
            entries = await storage.ledgers.read(ledger_id, first, len(PAYLOADS))
            payloads = [entry.payload for entry in entries]
            assert payloads, f"entry {first} cannot be read"
            assert payloads == PAYLOADS[first:stop][: len(payloads)]


# --- the journal


@pytest.fixture
def unreplayed(tmp_path: Path) -> Path:
    """A store whose records are in its journal only."""
    asyncio.run(write_stores(tmp_path))
    return tmp_path / "unreplayed"


def _batches(journal: Path) -> list[int]:
    return [match.start() for match in re.finditer(b"MBAT", journal.read_bytes())]


def test_flipped_bit_in_the_middle_of_the_journal_is_refused(unreplayed: Path) -> None:
    journal = _used_journal(unreplayed)
    original = journal.read_bytes()
    batches = _batches(journal)
    for start in batches[:-1:4]:
        for offset in (0, 4, 9, 17, 25, 30, 33, 40, 45):
            flipped = bytearray(original)
            flipped[start + offset] ^= 4
            journal.write_bytes(flipped)
            before = hashes(unreplayed)
            with pytest.raises(CorruptData, match=re.escape(str(journal))):
                asyncio.run(open_storage(unreplayed, limits=SMALL))
            assert hashes(unreplayed) == before
    journal.write_bytes(original)
    assert asyncio.run(_content(unreplayed)) == expected_content()


def test_torn_tail_of_the_journal_is_cut(unreplayed: Path) -> None:
    """A last batch that is not whole was never acknowledged: it goes without a word."""
    journal = _used_journal(unreplayed)
    data = bytearray(journal.read_bytes())
    last = _batches(journal)[-1]
    data[last + 40 :] = bytes(len(data) - last - 40)
    journal.write_bytes(data)
    found = asyncio.run(_content(unreplayed))
    key = "/golden/queue-00000000000000000001-00000000000000000005"
    assert found == {each: value for each, value in expected_content().items() if each != key}


def test_flipped_bit_in_the_header_of_the_journal_is_refused(unreplayed: Path) -> None:
    journal = _used_journal(unreplayed)
    data = bytearray(journal.read_bytes())
    data[20] ^= 1
    journal.write_bytes(data)
    before = hashes(unreplayed)
    with pytest.raises(CorruptData, match=re.escape(f"the header of {journal}")):
        asyncio.run(open_storage(unreplayed, limits=SMALL))
    assert hashes(unreplayed) == before


def _used_journal(store: Path) -> Path:
    (journal,) = [path for path in (store / "journal").iterdir() if _batches(path)]
    return journal


async def _content(store: Path) -> dict[str, object]:
    storage = await open_storage(store, limits=SMALL)
    try:
        return await content(storage)
    finally:
        await storage.close()
