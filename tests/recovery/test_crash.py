"""The crash harness: a sample of it passes, and a store that breaks a rule is caught by it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.crash.storage.check import Fault
from harness.crash.storage.kills import kill_loop
from harness.crash.storage.points import CRASH_POINTS, CrashCount
from harness.crash.storage.run import run_cuts, run_kills
from magnetar.journal.files import JournalFile
from magnetar.server.embedded import Storage

SEED = 20
CUTS_MAX = 240


@pytest.mark.slow
def test_crash_sample(tmp_path: Path) -> None:
    kills = run_kills(tmp_path / "kills", 6, SEED)
    assert kills.texts == []
    assert kills.points, "no child died where it was to die"
    cuts = run_cuts(tmp_path / "cuts", 40, SEED)
    assert cuts.texts == []
    assert cuts.done == 40
    assert kills.checked > 1000
    assert cuts.checked > 1000


def test_every_point_has_its_own_name() -> None:
    assert len({point.name for point in CRASH_POINTS}) == len(CRASH_POINTS)
    with pytest.raises(ValueError, match="no crash point 'before:lunch'"):
        CrashCount("before:lunch", 1)


@pytest.mark.slow
def test_a_child_dies_at_its_point(tmp_path: Path) -> None:
    (kill,) = kill_loop(tmp_path, 1, SEED)
    assert kill.planned != "random"
    assert kill.reached
    assert kill.verdict is not None
    assert kill.verdict.violations == []


# --- broken on purpose: the rule is patched out here, no switch for it exists in the store


@pytest.mark.slow
def test_broken_build_is_caught_without_its_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_without_sync(self: JournalFile) -> None:
        """Say that it was synced."""

    monkeypatch.setattr(JournalFile, "_sync", write_without_sync)
    _catch_loss(tmp_path)


@pytest.mark.slow
def test_broken_build_is_caught_acknowledging_before_the_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync_then_write(self: JournalFile, buffers: Sequence[bytes]) -> None:
        self._sync()
        self._file.write(self.end, buffers)

    def begin_written(self: JournalFile, first_sequence: int, settled: int) -> None:
        begin(self, first_sequence, settled)
        self.note_settled(settled)

    begin = JournalFile.begin
    monkeypatch.setattr(JournalFile, "begin", begin_written)
    monkeypatch.setattr(JournalFile, "write_synced", sync_then_write)
    _catch_loss(tmp_path)


@pytest.mark.slow
def test_broken_build_is_caught_releasing_the_journal_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = Storage.settle

    async def release_then_settle(self: Storage) -> None:
        journal = self._journal
        journal.release(journal.synced)
        # The journal writes on over what is nowhere else, as long as the load has something to say.
        enough = journal.synced + 300
        for _ in range(100):
            submitted = journal.next_sequence
            await asyncio.sleep(0.02)
            idle = journal.synced + 1 == submitted == journal.next_sequence
            if idle or journal.synced >= enough:
                break
        await settle(self)

    monkeypatch.setattr(Storage, "settle", release_then_settle)
    _catch_loss(tmp_path)


def _catch_loss(folder: Path) -> None:
    """Cut until something is lost: not every load comes to the moment that shows it."""
    outcome = run_cuts(folder, CUTS_MAX, SEED, looks_for=Fault.LOST)
    assert outcome.faults[Fault.LOST] > 0, f"{outcome.done} cuts found nothing: {outcome.faults}"
