"""Power cuts: a load on recorded files, cut anywhere, reopened, compared.

Owns: `record_load` (a load on a `RecordingDisk`, in this process), `after_cut` (the files that a
power loss at one place of the recording may leave) and `check_cut` (those files, opened).

A cut differs from a kill in what is lost: everything that was not synced may be, sector by sector
and name by name. So this finds a sync that is missing or comes too late.

A load may begin with what an earlier cut left: then its recording holds the recovery, and a cut
in that is a second power loss before the first is overcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from harness.crash.storage.check import Verdict, check_store
from harness.crash.storage.history import READY, Event, History, Told
from harness.crash.storage.load import CRASH_LIMITS, CrashLoad
from harness.crash.storage.recording_disk import RecordingDisk, Replay, Step
from magnetar.server.embedded import open_storage

LOAD_OPERATIONS: Final = 1500
_OPENINGS: Final = 2


@dataclass(frozen=True, slots=True)
class Cut:
    """What a power loss left, and what had been reported until then."""

    place: int
    files: Mapping[str, bytes]
    events: Sequence[Event]


NOTHING: Final = Cut(0, {}, ())
"""Before the first load: an empty folder."""


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """What was done to the disk and reported, in order, beginning with what a cut had left."""

    seed: int
    before: Cut
    steps: Sequence[Step]


async def record_load(
    folder: Path, seed: int, before: Cut = NOTHING, operations: int = LOAD_OPERATIONS
) -> RecordedLoad:
    """Run a load in `folder`, closing and reopening the store on the way."""
    write_files(folder, before.files)
    disk = RecordingDisk(folder)
    history = _history(seed, before.events)

    def report(event: Event) -> None:
        history.add(event)
        disk.recording.note(event)

    try:
        for _ in range(_OPENINGS):
            storage = await open_storage(folder, limits=CRASH_LIMITS, disk=disk)
            try:
                report(Told(READY))
                load = CrashLoad(storage, seed, history.next_token, report)
                await load.run(operations // _OPENINGS)
            finally:
                await storage.close()
    finally:
        disk.close()
    return RecordedLoad(seed, before, disk.recording.steps)


def cuts_of(load: RecordedLoad, cuts: int, seed: int) -> Iterator[Cut]:
    """What power losses at random places leave, in the order of the places."""
    chance = Random(f"{load.seed} {seed}")
    places = sorted(chance.randrange(1, len(load.steps) + 1) for _ in range(cuts))
    replay = Replay(load.before.files, load.steps)
    events = list(load.before.events)
    done = 0
    for place in places:
        replay.forward(place)
        events.extend(step for step in load.steps[done:place] if isinstance(step, Event))
        done = place
        yield Cut(place, replay.model.survive(chance), tuple(events))


async def check_cut(folder: Path, seed: int, cut: Cut) -> Verdict:
    """Open what a cut left, as after any start, and compare. `folder` must not exist yet."""
    write_files(folder, cut.files)
    return await check_store(folder, _history(seed, cut.events), CRASH_LIMITS)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _history(seed: int, events: Sequence[Event]) -> History:
    history = History(seed)
    for event in events:
        history.add(event)
    return history
