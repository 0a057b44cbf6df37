"""The simulation finds what it is for: each test takes one rule away and sees it caught.

A rule is taken away by patching it from here; the storage has no switch for it. That the same
seeds find nothing with the rule in place is shown by `test_seeds.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from harness.simulation.storage.run import simulate
from magnetar.errors import DiskFull
from magnetar.journal import format as journal_format
from magnetar.journal.files import JournalFile
from magnetar.journal.format import (
    FILE_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    JournalRecord,
    encode_file_header,
)
from magnetar.journal.journal import Journal
from magnetar.ledger.file import FileLedgers
from magnetar.ledger.file_home import LedgerHomes
from magnetar.metadata import sqlite_home
from magnetar.metadata.sqlite_engine import SqliteMetadata
from magnetar.metadata.sqlite_home import SqliteHome
from magnetar.metadata.watches import Watchers
from magnetar.runtime.disk import File
from magnetar.testing.virtual.disk import SimulatedDisk
from tests.simulation.search import first_violation

SEEDS = 30


def _first_violation(first: int = 0) -> str:
    return first_violation(simulate, SEEDS, first)


def _write(file: JournalFile, buffers: Sequence[bytes]) -> None:
    if file.end == FILE_HEADER_BYTES:
        file._file.write(0, [encode_file_header(file.header)])
    file._file.write(file.end, buffers)


def test_a_journal_that_does_not_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JournalFile, "write_synced", _write)
    assert _first_violation(first=1)


def test_an_acknowledgement_before_the_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync_one_late(file: JournalFile, buffers: Sequence[bytes]) -> None:
        file._file.sync()
        _write(file, buffers)

    monkeypatch.setattr(JournalFile, "write_synced", sync_one_late)
    assert _first_violation()


@pytest.mark.slow  # a batch must be torn behind its header, which is rare
def test_a_torn_batch_taken_for_whole_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    record = struct.Struct("<IIB")

    def unchecked(data: bytes, start: int, end: int, sequence: int) -> Iterator[JournalRecord]:
        while end - start >= RECORD_HEADER_BYTES:
            _, size, kind = record.unpack_from(data, start)
            stop = start + RECORD_HEADER_BYTES + size
            yield JournalRecord(sequence, kind, data[start:stop])
            sequence, start = sequence + 1, stop

    monkeypatch.setattr(journal_format, "_records", unchecked)
    assert _first_violation(first=5)


def test_a_full_disk_taken_for_success_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def go_on(journal: Journal, first: int, error: DiskFull) -> None:
        journal.synced = journal._next - 1 - len(journal._queue)
        journal.progress.advance()

    monkeypatch.setattr(Journal, "_refuse", go_on)
    assert _first_violation(first=2)


def test_entries_kept_after_a_refusal_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileLedgers, "_forget_refused", lambda _: None)
    assert _first_violation(first=2)


def test_ledger_files_that_are_not_synced_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    write = LedgerHomes._write

    def unsynced(homes: LedgerHomes, *arguments: Any) -> list[File]:
        write(homes, *arguments)
        return []

    monkeypatch.setattr(LedgerHomes, "_write", unsynced)
    assert _first_violation()


def test_a_database_that_is_not_synced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteHome, "sync", lambda _: None)
    assert _first_violation()


@pytest.mark.parametrize("home", [FileLedgers, SqliteMetadata])
def test_a_journal_recycled_too_early_is_caught(
    monkeypatch: pytest.MonkeyPatch, home: type[FileLedgers] | type[SqliteMetadata]
) -> None:
    settle = home.settle

    async def only_at_the_start(self: Any, sequence: int) -> None:
        if self._journal._committer is None:
            await settle(self, sequence)

    monkeypatch.setattr(home, "settle", only_at_the_start)
    assert _first_violation()


def test_names_that_are_not_synced_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedDisk, "sync_folder", lambda *_: None)
    assert _first_violation()


def test_stale_index_entries_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_home, "_DROP_OLD_INDEX_ENTRIES", "SELECT ?1")
    assert "index" in _first_violation()


def test_an_event_that_is_not_told_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Watchers.publish
    counts: dict[Watchers, int] = {}

    def forgetful(watchers: Watchers, event: object) -> None:
        counts[watchers] = counts.get(watchers, 0) + 1
        if counts[watchers] % 20:
            publish(watchers, event)  # type: ignore[arg-type]  # handed on

    monkeypatch.setattr(Watchers, "publish", forgetful)
    assert "watch" in _first_violation()
