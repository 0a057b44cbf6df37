"""Ledger files: moving, reading, and what damage does to an entry and to its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import (
    CorruptData,
    CorruptEntry,
    DiskFailed,
    DiskFull,
    LedgerMissing,
    StorageFenced,
)
from magnetar.ledger.api import LedgerState
from magnetar.ledger.file_format import (
    ENTRIES_START,
    ENTRY_OVERHEAD,
    LedgerHeader,
    encode_entry,
)
from magnetar.ledger.file_home import LedgerHomes, Move
from tests.unit.journal.support import ScriptedDisk

PAYLOADS = [b"%d" % n * (n % 7 + 1) for n in range(10)]
LEDGER = 7
LARGE = 10**6


class Home:
    """One ledger in files of its own."""

    def __init__(self, folder: Path, payloads: list[bytes] = PAYLOADS) -> None:
        self.disk = ScriptedDisk()
        self.homes = LedgerHomes(folder / "ledgers", self.disk, 8)
        self.disk.make_folder(folder / "ledgers")
        self.data = folder / "ledgers" / "07" / "7.ledger"
        self.index = folder / "ledgers" / "07" / "7.index"
        records = [encode_entry(LEDGER, n, payload) for n, payload in enumerate(payloads)]
        self.offsets = [ENTRIES_START + sum(map(len, records[:n])) for n in range(len(records) + 1)]
        size = sum(map(len, payloads))
        header = LedgerHeader(LEDGER, LedgerState.CLOSED, 0, len(payloads) - 1, size)
        self.homes.move([Move(header, LEDGER, 0, ENTRIES_START, records)], [])

    def flip(self, path: Path, place: int, bit: int = 0) -> None:
        self.homes.forget([LEDGER])
        data = bytearray(path.read_bytes())
        data[place] ^= 1 << bit
        path.write_bytes(data)

    def read_one(self, entry_id: int) -> bytes:
        (payload,) = self.homes.read(LEDGER, entry_id, entry_id, LARGE)
        return payload


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    home.homes.close()


def test_what_was_moved_is_read(home: Home) -> None:
    assert home.homes.read(LEDGER, 0, 9, LARGE) == PAYLOADS
    assert home.homes.read(LEDGER, 3, 5, LARGE) == PAYLOADS[3:6]
    assert [home.read_one(n) for n in range(10)] == PAYLOADS
    loaded = home.homes.load(LEDGER)
    assert (loaded.count, loaded.end) == (10, home.offsets[-1])
    assert loaded.header.state is LedgerState.CLOSED
    cut = home.homes.load(LEDGER, 4)
    assert (cut.count, cut.end) == (4, home.offsets[4])
    assert home.homes.load(LEDGER, 0).end == ENTRIES_START
    assert home.homes.ids() == [LEDGER]


def test_a_small_limit_still_gives_the_first_entry(home: Home) -> None:
    assert home.homes.read(LEDGER, 6, 9, 1)[:1] == PAYLOADS[6:7]


def test_moves_append_and_may_be_repeated(home: Home) -> None:
    more = [encode_entry(LEDGER, n, b"more") for n in (10, 11)]
    move = Move(None, LEDGER, 10, home.offsets[-1], more)
    home.homes.move([move], [])
    home.homes.move([move], [])
    assert home.homes.read(LEDGER, 9, 11, LARGE) == [PAYLOADS[9], b"more", b"more"]
    assert home.homes.load(LEDGER).header.state is LedgerState.CLOSED


def test_a_move_is_synced_names_included(home: Home) -> None:
    for pattern in ("7.ledger", "7.index"):
        assert home.disk.count("sync", pattern) == 1


def test_a_failed_sync_of_a_move_is_final(home: Home) -> None:
    record = encode_entry(LEDGER, 10, b"late")
    home.disk.fail("sync", "7.index", DiskFailed("EIO"))
    with pytest.raises(StorageFenced):
        home.homes.move([Move(None, LEDGER, 10, home.offsets[-1], [record])], [])


def test_a_move_without_space_can_be_repeated(home: Home) -> None:
    record = encode_entry(LEDGER, 10, b"late")
    move = Move(None, LEDGER, 10, home.offsets[-1], [record])
    home.disk.fail("write", "7.index", DiskFull("no space"))
    with pytest.raises(DiskFull):
        home.homes.move([move], [])
    assert home.homes.load(LEDGER).count == 10, "what the index does not list is not there"
    home.disk.heal()
    home.homes.move([move], [])
    assert home.read_one(10) == b"late"


def test_deleted_files_are_gone(home: Home) -> None:
    home.read_one(0)
    home.homes.forget([LEDGER])
    home.homes.move([], [LEDGER, 99])
    assert not home.data.exists()
    assert not home.index.exists()
    assert home.homes.ids() == []
    with pytest.raises(LedgerMissing):
        home.homes.load(LEDGER)


def test_open_files_keep_to_their_limit(tmp_path: Path) -> None:
    homes = LedgerHomes(tmp_path, ScriptedDisk(), 4)
    for ledger_id in range(10):
        header = LedgerHeader(ledger_id, LedgerState.OPEN, 0)
        record = encode_entry(ledger_id, 0, b"%d" % ledger_id)
        homes.move([Move(header, ledger_id, 0, ENTRIES_START, [record])], [])
    for _ in range(2):
        for ledger_id in range(10):
            assert homes.read(ledger_id, 0, 0, LARGE) == [b"%d" % ledger_id]
            assert len(homes._handles) <= 2
    homes.close()


# --- damage


def test_a_damaged_index_slot_is_worked_around(home: Home) -> None:
    for entry_id in (1, 5, 9):
        for bit in (0, 3, 7):
            for place in (0, 1, 7):
                home.flip(home.index, 8 * entry_id + place, bit)
                assert [home.read_one(n) for n in range(10)] == PAYLOADS
                assert home.homes.load(LEDGER).count == 10
                home.flip(home.index, 8 * entry_id + place, bit)


def test_a_damaged_header_copy_is_worked_around(home: Home) -> None:
    for copy in (0, 512):
        home.flip(home.data, copy + 10)
        assert home.homes.load(LEDGER).header.last_entry == 9
        home.flip(home.data, copy + 10)
    home.flip(home.data, 10)
    home.flip(home.data, 522)
    with pytest.raises(CorruptData, match=r"7\.ledger"):
        home.homes.load(LEDGER)
    assert home.read_one(3) == PAYLOADS[3]


@given(st.integers(0, 9), st.data())
def test_a_flipped_bit_costs_its_entry_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, entry_id: int, data: st.DataObject
) -> None:
    home = Home(tmp_path_factory.mktemp("home"))
    try:
        place = data.draw(st.integers(home.offsets[entry_id], home.offsets[entry_id + 1] - 1))
        home.flip(home.data, place, data.draw(st.integers(0, 7)))
        with pytest.raises(CorruptEntry, match=f"entry 7:{entry_id} is damaged"):
            home.read_one(entry_id)
        for n in range(10):
            if n != entry_id:
                assert home.read_one(n) == PAYLOADS[n]
        if entry_id:
            assert home.homes.read(LEDGER, 0, 9, LARGE) == PAYLOADS[:entry_id]
        loaded = home.homes.load(LEDGER)
        assert (loaded.count, loaded.end) == (10, home.offsets[-1])
        assert home.homes.load(LEDGER, entry_id + 1).count == entry_id + 1
    finally:
        home.homes.close()


def test_a_file_that_lost_its_end_is_noticed(home: Home) -> None:
    home.homes.forget([LEDGER])
    with home.data.open("r+b") as file:
        file.truncate(home.offsets[8] + ENTRY_OVERHEAD // 2)
    assert [home.read_one(n) for n in range(8)] == PAYLOADS[:8]
    for entry_id in (8, 9):
        with pytest.raises(CorruptEntry):
            home.read_one(entry_id)
    with pytest.raises(CorruptData, match="holds 10 entries, 12 were stored"):
        home.homes.load(LEDGER, 12)


@pytest.mark.parametrize("slots", [0, 4, 9])
def test_an_index_that_lost_its_end_is_noticed(home: Home, slots: int) -> None:
    """A closed ledger says how many entries it has: fewer slots are no shorter ledger."""
    home.homes.forget([LEDGER])
    with home.index.open("r+b") as file:
        file.truncate(8 * slots)
    with pytest.raises(CorruptData, match=f"holds {slots} entries, 10 were stored"):
        home.homes.load(LEDGER)
    assert home.homes.load(LEDGER, slots).count == slots


def test_a_missing_index_is_noticed(home: Home) -> None:
    home.homes.forget([LEDGER])
    home.index.unlink()
    with pytest.raises(CorruptData, match="holds 0 entries, 10 were stored"):
        home.homes.load(LEDGER)


def test_deleted_files_make_room_for_what_is_moved(home: Home) -> None:
    """On a full disk a move finds no space unless what was deleted goes first."""
    home.homes.forget([LEDGER])
    home.disk.fail("open", "8.ledger", DiskFull("no space"))
    header = LedgerHeader(8, LedgerState.OPEN, 0)
    with pytest.raises(DiskFull):
        home.homes.move([Move(header, 8, 0, ENTRIES_START, [])], [LEDGER])
    assert not home.data.exists()
