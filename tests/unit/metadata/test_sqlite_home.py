"""The SQLite home of metadata: applied batches, indexes, snapshots, versions and syncs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magnetar.errors import CorruptData, DiskFull, FormatTooNew
from magnetar.metadata.api import Index
from magnetar.metadata.judge import NO_SESSION, StoredRecord, split_key
from magnetar.metadata.layers import Layer
from magnetar.metadata.sqlite_home import (
    _SCAN_INDEX,
    _SCAN_INDEX_TO_END,
    SCHEMA_VERSION,
    ReadConnection,
    SqliteHome,
)
from magnetar.metadata.sqlite_rows import encode_row
from magnetar.runtime.disk import LocalDisk
from tests.examples import examples
from tests.unit.journal.support import ScriptedDisk


def record(
    value: bytes = b"", *indexes: Index, version: int = 1, session: int = NO_SESSION
) -> StoredRecord:
    return StoredRecord(value, version, 1_000, 2_000, 3, session, indexes)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[SqliteHome]:
    home = SqliteHome(tmp_path / "records.db", LocalDisk())
    yield home
    home.close()


def apply(home: SqliteHome, changes: Mapping[str, StoredRecord | None], applied: int) -> None:
    layer = Layer()
    for key, state in changes.items():
        layer.set(key, state, encode_row(*split_key(key), state))
    home.apply(layer, applied)


def get(home: SqliteHome, key: str) -> StoredRecord | None:
    return home.reader.get(*split_key(key))


def names(
    reader: ReadConnection, parent: str, start: str = "", end: str | None = None
) -> list[str]:
    return [name for page in reader.scan(parent, start, end) for name, _ in page]


def indexed(
    reader: ReadConnection, index: str, low: str = "", high: str | None = None
) -> list[str]:
    return [key for page in reader.scan_index(index, low, high) for _, key, _ in page]


VALUES = [b"", b"\0", b"\xff\xfe not text", b"x" * 512 * 1024, "é".encode()]
NAMES = ["a", "é", "\U00010000", "with space", "'quote\"", "per%cent", "-0", "[1]", "\\u0041"]


def test_values_and_names_come_back_byte_for_byte(home: SqliteHome) -> None:
    changes = {
        f"/dir/{name}": record(VALUES[n % len(VALUES)], version=n + 1)
        for n, name in enumerate(NAMES)
    }
    apply(home, changes, 20)
    assert {key: get(home, key) for key in changes} == changes
    assert names(home.reader, "/dir") == sorted(NAMES, key=str.encode)
    assert names(home.reader, "/dir", "a", "b") == ["a"]
    assert names(home.reader, "") == []
    assert get(home, "/dir/absent") is None


def test_replacing_and_deleting_move_index_entries_along(home: SqliteHome) -> None:
    by_time = Index("time", "01")
    apply(home, {"/t/a": record(b"1", by_time, Index("owner", "é x")), "/t/b": record(b"2")}, 1)
    assert indexed(home.reader, "time") == ["/t/a"]
    assert indexed(home.reader, "owner", "é x", "é x") == ["/t/a"]
    apply(home, {"/t/a": record(b"3", Index("time", "02")), "/t/b": record(b"2", by_time)}, 2)
    assert indexed(home.reader, "time") == ["/t/b", "/t/a"]
    assert indexed(home.reader, "time", "02") == ["/t/a"]
    assert indexed(home.reader, "owner") == []
    apply(home, {"/t/a": record(b"4"), "/t/b": None, "/t/never": None}, 3)
    assert indexed(home.reader, "time") == []
    assert names(home.reader, "/t") == ["a"]
    assert _index_rows(home) == 0


def _index_rows(home: SqliteHome) -> int:
    ((rows,),) = home._writer.execute("SELECT count(*) FROM index_entries")
    return int(rows)


_INDEXES = st.lists(
    st.builds(Index, st.sampled_from("ij"), st.sampled_from(["", "k", "k0"])), max_size=3
)
_STATES = st.one_of(
    st.none(), st.builds(lambda value, entries: record(value, *entries), st.binary(), _INDEXES)
)
_BATCHES = st.lists(
    st.dictionaries(st.sampled_from(["/a", "/d/a", "/d/b"]), _STATES), min_size=1, max_size=6
)


@given(_BATCHES)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_records_and_index_entries_agree_both_ways(
    tmp_path_factory: pytest.TempPathFactory, batches: list[dict[str, StoredRecord | None]]
) -> None:
    home = SqliteHome(tmp_path_factory.mktemp("home") / "records.db", LocalDisk())
    model: dict[str, StoredRecord] = {}
    try:
        for applied, changes in enumerate(batches, start=1):
            apply(home, changes, applied)
            for key, state in changes.items():
                model.pop(key, None)
                if state is not None:
                    model[key] = state
            assert home.applied == applied
        for key in ("/a", "/d/a", "/d/b"):
            assert get(home, key) == model.get(key)
        entries = {(key, entry) for key, state in model.items() for entry in state.indexes}
        assert _index_rows(home) == len(entries)
        for index in "ij":
            found = [
                (key, Index(index, index_key))
                for page in home.reader.scan_index(index, "", None)
                for index_key, key, _ in page
            ]
            assert sorted(found) == sorted(each for each in entries if each[1].name == index)
    finally:
        home.close()


def test_long_scans_go_by_pages(home: SqliteHome) -> None:
    numbers = [f"{n:04d}" for n in range(1000)]
    apply(home, {f"/p/{n}": record(b"", Index("i", n[:2])) for n in numbers}, 1)
    assert names(home.reader, "/p") == numbers
    assert names(home.reader, "/p", "0100", "0900") == numbers[100:900]
    assert max(map(len, home.reader.scan("/p", "", None))) < 1000
    assert indexed(home.reader, "i") == [f"/p/{n}" for n in numbers]
    assert indexed(home.reader, "i", "01", "02") == [f"/p/{n}" for n in numbers[100:300]]


@pytest.mark.parametrize(
    ("statement", "is_bounded"), [(_SCAN_INDEX, True), (_SCAN_INDEX_TO_END, False)]
)
def test_a_search_in_an_index_ends_with_its_range(
    tmp_path: Path, home: SqliteHome, statement: str, is_bounded: bool
) -> None:
    """A million finished transactions stand behind the few that are looked for."""
    with closing(sqlite3.connect(tmp_path / "records.db")) as database:
        values = ("i", "", "", "", "z")[: 5 if is_bounded else 4]
        plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
    assert plan[0].startswith("SEARCH entry USING PRIMARY KEY")
    assert ("index_key<?" in plan[0]) == is_bounded


def test_names_of_a_sequence_come_from_the_top(home: SqliteHome) -> None:
    kept = [f"s-{n:020d}" for n in range(600)]
    apply(home, {f"/q/{name}": record() for name in [*kept, "s", "s-x", "s.9", "t-1"]}, 1)
    assert list(home.reader.names_downwards("/q", "s")) == kept[::-1]
    assert next(home.reader.names_downwards("/q", "s")) == kept[-1]


def test_ephemeral_records_are_found(home: SqliteHome) -> None:
    apply(home, {"/e/a": record(session=4), "/e/b": record(), "/c": record(session=5)}, 1)
    assert sorted(home.reader.ephemeral_keys()) == ["/c", "/e/a"]


def test_a_snapshot_sees_one_moment(home: SqliteHome) -> None:
    apply(home, {"/s/a": record(b"old")}, 1)
    with home.snapshot() as early:
        apply(home, {"/s/a": record(b"new"), "/s/b": record()}, 2)
        home.sync()  # a scan that is open must not hold up a sync
        with home.snapshot() as late:
            assert names(late, "/s") == ["a", "b"]
        assert names(early, "/s") == ["a"]
        assert early.get("/s", "a") == record(b"old")
    with home.snapshot() as again:
        assert names(again, "/s") == ["a", "b"]
    assert len(home._idle) == 2, "readers are used again"


def test_a_snapshot_that_failed_is_not_used_again(home: SqliteHome) -> None:
    with pytest.raises(RuntimeError, match="in the block"), home.snapshot():
        raise RuntimeError("in the block")
    assert home._idle == []
    with home.snapshot() as reader:
        assert names(reader, "") == []


def test_a_batch_that_fails_leaves_nothing_of_itself(tmp_path: Path) -> None:
    disk = ScriptedDisk()
    home = SqliteHome(tmp_path / "records.db", disk)
    apply(home, {"/a": record(b"1")}, 1)
    disk.fail("sql", "*.db", DiskFull("no space"))
    with pytest.raises(DiskFull):
        apply(home, {"/a": record(b"2")}, 2)
    disk.heal()
    # A statement in the middle fails: all is rolled back.
    bad = record(b"3", version=None)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="NOT NULL"):
        apply(home, {"/b": record(b"3"), "/a": bad}, 2)
    assert not home._writer.in_transaction
    assert (get(home, "/a"), get(home, "/b"), home.applied) == (record(b"1"), None, 1)
    apply(home, {"/a": None}, 3)
    assert (get(home, "/a"), home.applied) == (None, 3)
    home.close()


def test_a_reopened_home_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    first = SqliteHome(path, LocalDisk())
    apply(first, {"/a": record(b"1", Index("i", "k"))}, 7)
    first.sync()
    first.close()
    second = SqliteHome(path, LocalDisk())
    assert second.applied == 7
    assert indexed(second.reader, "i") == ["/a"]
    second.close()


def test_a_newer_schema_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    SqliteHome(path, LocalDisk()).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(FormatTooNew, match=f"schema {SCHEMA_VERSION + 1}"):
        SqliteHome(path, LocalDisk())
    assert path.read_bytes() == before


def test_what_is_no_database_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    path.write_bytes(b"surely no database " * 100)
    before = path.read_bytes()
    with pytest.raises(CorruptData, match=r"records\.db"):
        SqliteHome(path, LocalDisk())
    assert path.read_bytes() == before


def test_sync_syncs_the_log_and_once_the_folder(tmp_path: Path) -> None:
    disk = ScriptedDisk()
    home = SqliteHome(tmp_path / "records.db", disk)
    apply(home, {"/a": record()}, 1)
    before = disk.count("sync", "records.db-wal")
    home.sync()
    assert disk.count("sync", "records.db-wal") == before + 1
    home.close()
