"""The embedded storage put together: its folder, replay, settling and faults."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from magnetar.errors import (
    CorruptData,
    CorruptEntry,
    DiskFailed,
    DiskFull,
    FolderInUse,
    FormatTooNew,
    LedgerMissing,
    MagnetarError,
    OutcomeUnknown,
    StorageError,
    StorageFenced,
    Unavailable,
)
from magnetar.ledger.api import LedgerState
from magnetar.ledger.file_format import ENTRIES_START
from magnetar.metadata.api import ABSENT, Index
from magnetar.server.embedded import open_storage
from magnetar.testing.virtual import virtual_time
from tests.unit.journal.test_format import newer_header
from tests.unit.server.storage_bench import LIMITS, opened, run

# --- the folder


def test_a_new_folder_gets_its_format(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "new" / "data")
        found = json.loads((bench.folder / "FORMAT").read_bytes())
        assert found["format"] == 1
        assert len(bytes.fromhex(found["store"])) == 16
        names = sorted(path.name for path in bench.folder.iterdir())
        assert names == ["FORMAT", "LOCK", "RESERVE", "journal", "ledgers", "metadata"]
        await bench.close()

    run(main())


def test_a_start_that_was_cut_short_is_no_obstacle(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "FORMAT.new").write_bytes(b"{half")
        (tmp_path / "LOCK").touch()
        await (await opened(tmp_path)).close()
        assert not (tmp_path / "FORMAT.new").exists()

    run(main())


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        (b"", CorruptData, "FORMAT cannot be read"),
        (b'{"format": 1, "store": "not hex"}', CorruptData, "FORMAT cannot be read"),
        (b'{"format": "one", "store": ""}', CorruptData, "FORMAT cannot be read"),
        (b'{"format": 2, "store": "00112233445566778899aabbccddeeff"}', FormatTooNew, "format 2"),
        (None, CorruptData, "no FORMAT file but holds"),
    ],
)
def test_a_folder_that_is_not_fit_is_refused_and_untouched(
    tmp_path: Path, content: bytes | None, kind: type[StorageError], text: str
) -> None:
    async def main() -> None:
        await (await opened(tmp_path)).close()
        if content is None:
            (tmp_path / "FORMAT").unlink()
        else:
            (tmp_path / "FORMAT").write_bytes(content)
        before = _bytes_of(tmp_path)
        with pytest.raises(kind, match=text):
            await opened(tmp_path)
        assert _bytes_of(tmp_path) == before

    run(main())


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "photo.jpeg").write_bytes(b"not ours")
        with pytest.raises(CorruptData, match=r"holds photo\.jpeg"):
            await opened(tmp_path)
        assert sorted(_bytes_of(tmp_path)) == ["LOCK", "photo.jpeg"]

    run(main())


def test_a_second_opener_is_refused_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await opened(tmp_path)
        store = bench.storage.connect()
        await store.put("/exclusive", b"")
        with pytest.raises(FolderInUse, match="open in another process"):
            await opened(tmp_path)
        assert await store.get("/exclusive") is not None
        await store.close()
        await bench.close()
        await (await opened(tmp_path)).close()

    run(main())


def test_newer_parts_are_refused_and_untouched(tmp_path: Path) -> None:
    async def main() -> None:
        await (await opened(tmp_path)).close()
        journal = tmp_path / "journal" / "0000.journal"
        whole = journal.read_bytes()
        journal.write_bytes(newer_header() + whole[512:])
        before = _bytes_of(tmp_path)
        with pytest.raises(FormatTooNew, match="journal format 2"):
            await opened(tmp_path)
        assert _bytes_of(tmp_path) == before
        journal.write_bytes(whole)
        connection = sqlite3.connect(tmp_path / "metadata" / "records.db")
        connection.execute("PRAGMA user_version = 9")
        connection.close()
        database = (tmp_path / "metadata" / "records.db").read_bytes()
        with pytest.raises(FormatTooNew, match="schema 9"):
            await opened(tmp_path)
        assert (tmp_path / "metadata" / "records.db").read_bytes() == database

    run(main())


def test_parts_of_another_store_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        for name in ("one", "two"):
            bench = await opened(tmp_path / name)
            store = bench.storage.connect()
            for n in range(20 if name == "one" else 1):
                await store.put(f"/{n}", b"")
            await store.close()
            await bench.close()
        one, two = tmp_path / "one", tmp_path / "two"
        shutil.copytree(one, tmp_path / "ahead")
        shutil.rmtree(tmp_path / "ahead" / "journal")
        with pytest.raises(CorruptData, match="is ahead of"):
            await opened(tmp_path / "ahead")
        shutil.rmtree(two / "journal")
        shutil.copytree(one / "journal", two / "journal")
        with pytest.raises(StorageError, match="belongs to another store"):
            await opened(two)

    run(main())


def test_a_refused_folder_can_be_opened_once_it_is_repaired(tmp_path: Path) -> None:
    """Real threads and descriptors: whatever a refused start had begun is given back."""

    async def main() -> None:
        storage = await open_storage(tmp_path, limits=LIMITS)
        writer = await storage.ledgers.create()
        await writer.append(b"kept")
        await storage.close()
        for path in (tmp_path / "metadata" / "records.db", tmp_path / "journal" / "0000.journal"):
            whole = path.read_bytes()
            path.write_bytes(b"damaged, surely" + whole[15:])
            for _ in range(3):
                with pytest.raises(CorruptData, match=path.name):
                    await open_storage(tmp_path, limits=LIMITS)
            path.write_bytes(whole)
        storage = await open_storage(tmp_path, limits=LIMITS)
        assert (await storage.ledgers.read(writer.ledger_id, 0, 0))[0].payload == b"kept"
        await storage.close()

    asyncio.run(main())


# --- replay and settling


def test_an_unclean_end_is_replayed_and_a_clean_one_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "data")
        store = bench.storage.connect()
        await store.put("/kept", b"1")
        await store.put("/gone", b"2", ephemeral=True)
        finished = [await store.put(f"/done/{n}", b"", indexes=[Index("x", "y")]) for n in range(3)]
        await store.delete_seen((each.key, each.version) for each in finished)
        writer = await bench.storage.ledgers.create()
        await writer.append(b"entry")
        killed = bench.killed()
        await store.close()
        await bench.close()
        for folder, replayed in ((killed, 8), (killed, 0), (bench.folder, 0)):
            again = await opened(folder)
            assert again.storage.recovered_records == replayed
            store = again.storage.connect()
            assert await store.scan_keys("") == ["/kept"]
            assert await store.scan_keys("/done") == []
            assert [each async for each in store.scan_index("x")] == []
            (entry,) = await again.storage.ledgers.read(writer.ledger_id, 0, 9)
            assert entry.payload == b"entry"
            assert (await again.storage.ledgers.info(writer.ledger_id)).last_entry == 0
            await store.close()
            await again.close()

    run(main())


def test_settling_makes_the_journal_forget(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "data")
        store = bench.storage.connect()
        for n in range(10):
            await store.put(f"/{n}", b"")
        await bench.storage.settle()
        await store.put("/after", b"")
        again = await opened(bench.killed())
        assert again.storage.recovered_records == 1
        assert len(await again.storage.connect().scan_keys("")) == 11
        await again.close()
        await store.close()
        await bench.close()

    run(main())


def test_what_gathers_is_settled_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "data")
        store = bench.storage.connect()
        await store.put("/a", b"")
        assert bench.storage._journal.unsettled
        await asyncio.sleep(2 * LIMITS.storage_settle_seconds)
        assert not bench.storage._journal.unsettled
        await store.close()
        await bench.close()

    run(main())


# --- faults


def test_a_full_disk_refuses_and_all_goes_on_once_there_is_room(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "data")
        store = bench.storage.connect()
        writer, other = [await bench.storage.ledgers.create() for _ in range(2)]
        before = await store.put("/before", b"")
        await writer.append(b"before")
        bench.disk.fail("write", "journal/*", DiskFull("no space"))
        with pytest.raises(Unavailable, match="full"):
            await store.put("/refused", b"")
        with pytest.raises(Unavailable, match="full"):
            await store.delete_seen([(before.key, before.version)])
        with pytest.raises(DiskFull):
            await writer.append(b"refused")
        assert await store.get("/refused") is None
        assert await store.get("/before") is not None
        bench.disk.heal()
        await store.put("/after", b"", expected=ABSENT)
        await other.append(b"after")
        with pytest.raises(MagnetarError):
            writer.append(b"a ledger has no gaps")
        again = await opened(bench.killed())
        assert await again.storage.connect().scan_keys("") == ["/after", "/before"]
        assert (await again.storage.ledgers.fence(writer.ledger_id)).last_entry == 0
        assert (await again.storage.ledgers.fence(other.ledger_id)).last_entry == 0
        await again.close()
        await store.close()
        await bench.close()

    run(main())


def test_a_delete_without_space_leaves_a_ledger_that_can_be_fenced(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "data")
        ledgers = bench.storage.ledgers
        writer = await ledgers.create()
        await writer.append(b"kept")
        bench.disk.fail("write", "journal/*", DiskFull("no space"))
        for _ in range(2):
            results = await asyncio.gather(
                ledgers.delete(writer.ledger_id),
                ledgers.delete(writer.ledger_id),
                return_exceptions=True,
            )
            assert [type(result) for result in results] == [DiskFull, DiskFull]
        bench.disk.heal()
        info = await ledgers.fence(writer.ledger_id)
        assert (info.state, info.last_entry) == (LedgerState.FENCED, 0)
        await ledgers.delete(writer.ledger_id)
        with pytest.raises(LedgerMissing):
            await ledgers.info(writer.ledger_id)
        await bench.close()

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ledger", "index"])
def test_one_flipped_bit_costs_at_most_one_entry(tmp_path: Path, name: str) -> None:
    """Of a closed ledger, wherever the bit is; nothing is deleted, nothing is wrong."""
    payloads = [b"%d" % n * (n % 5) for n in range(12)]

    async def write() -> int:
        bench = await opened(tmp_path)
        writer = await bench.storage.ledgers.create()
        for payload in payloads:
            await writer.append(payload)
        await writer.close()
        await bench.close()
        return writer.ledger_id

    async def damaged_entries(ledger_id: int) -> list[int]:
        bench = await opened(tmp_path)
        damaged = []
        for entry_id, payload in enumerate(payloads):
            try:
                (entry, *_) = await bench.storage.ledgers.read(ledger_id, entry_id, entry_id)
                assert entry.payload == payload
            except CorruptEntry:
                damaged.append(entry_id)
        info = await bench.storage.ledgers.info(ledger_id)
        assert (info.state, info.last_entry) == (LedgerState.CLOSED, len(payloads) - 1)
        assert info.size_bytes == sum(map(len, payloads))
        await bench.close()
        return damaged

    ledger_id = virtual_time.run(write())
    path = tmp_path / "ledgers" / f"{ledger_id:02x}" / f"{ledger_id}.{name}"
    whole = path.read_bytes()
    for place in range(0, len(whole), 1 if name == "index" else 7):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        damaged = virtual_time.run(damaged_entries(ledger_id))
        in_entries = name == "ledger" and place >= ENTRIES_START
        assert len(damaged) == in_entries, f"byte {place}: {damaged}"


@pytest.mark.parametrize(("operation", "pattern"), [("sql", "*.db"), ("write", "*.ledger")])
def test_homes_without_space_take_everything_later(
    tmp_path: Path, operation: str, pattern: str
) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "data")
        store = bench.storage.connect()
        writer = await bench.storage.ledgers.create()
        await store.put("/a", b"1")
        await writer.append(b"1")
        bench.disk.fail(operation, pattern, DiskFull("no space"))
        with pytest.raises(DiskFull):
            await bench.storage.settle()
        await store.put("/a", b"2")
        await writer.append(b"2")
        assert bench.storage.failure is None
        bench.disk.heal()
        await bench.storage.settle()
        record = await store.get("/a")
        assert record is not None
        assert record.value == b"2"
        assert len(await bench.storage.ledgers.read(writer.ledger_id, 0, 9)) == 2
        await store.close()
        await bench.close()

    run(main())


def test_a_failed_sync_of_the_journal_stops_the_store(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "data")
        store = bench.storage.connect()
        await store.put("/a", b"")
        bench.disk.fail("sync", "journal/*", DiskFailed("EIO"))
        with pytest.raises(OutcomeUnknown):
            await store.put("/b", b"")
        bench.disk.heal()
        assert isinstance(bench.storage.failure, StorageFenced)
        with pytest.raises(Unavailable):
            await store.put("/c", b"")
        assert await store.get("/a") is not None
        await bench.close()
        again = await opened(bench.folder)
        assert await again.storage.connect().get("/a") is not None
        await again.close()

    run(main())


def test_a_failed_sync_of_a_home_stops_the_store_and_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "data")
        writer = await bench.storage.ledgers.create()
        await writer.append(b"kept")
        bench.disk.fail("sync", "*.ledger", DiskFailed("EIO"))
        with pytest.raises(StorageFenced):
            await bench.storage.settle()
        assert isinstance(bench.storage.failure, StorageFenced)
        with pytest.raises(StorageFenced):
            writer.append(b"late")
        await bench.close()
        again = await opened(bench.folder)
        assert len(await again.storage.ledgers.read(writer.ledger_id, 0, 0)) == 1
        await again.close()

    run(main())


def test_a_failed_sync_counts_even_if_the_other_home_only_lacks_space(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "data")
        store = bench.storage.connect()
        await store.put("/a", b"")
        await (await bench.storage.ledgers.create()).append(b"")

        def both(operation: str, path: Path) -> StorageError | None:
            if operation == "sql":
                return DiskFull("no space for SQLite")
            return DiskFailed("EIO") if operation == "sync" and path.match("*.ledger") else None

        bench.disk.fault = both
        with pytest.raises(StorageError):
            await bench.storage.settle()
        assert isinstance(bench.storage.failure, StorageFenced), "a failed sync is never repeated"
        bench.disk.heal()
        await store.close()
        await bench.close()

    run(main())


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
