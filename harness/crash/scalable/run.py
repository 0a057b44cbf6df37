"""Kills at every durable step of a layout change: `python -m harness.crash.scalable.run`.

Owns: the enumeration (change, step, what becomes of it), the two lives of each case, the table and
the verdict. A case is: a copy of a folder in which a topic stands before its change; a process that
is asked for the change and killed at the n-th batch of its journal; a process that recovers. Steps
are counted up until the change is answered before the kill comes: then it is killed after. A sample
leaves steps out, but goes on between its own until it has met what it was made to meet (`reaches`):
how a change falls into batches, and what else is in them, differs from run to run.

The batch at which a process is killed is not written (`lost`), half written (`torn`), or synced
and nobody was told (`synced`). One that is written and not synced survives a kill like the last.
All that is quiet: only the change writes. `busy` is a synced batch while a producer and a consumer
use the topic; they go on when the server is back at its address, and their messages are steps too.

The change `undo` is a split whose children cannot be made by the process that dies.

What must hold (`scalable_crash_check` has the rest):
1. Within `WITHIN_SECONDS` of its own time after the server serves, no change is under way and no
   topic waits to be deleted; no record is left of a segment that is not in the layout.
2. The change is finished or undone as a whole, and as it was answered, if it was. One that was
   undone succeeds when it is asked for again.
3. Every segment has every subscription.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harness.crash.scalable.check import (
    ChangeHistory,
    check_clients,
    check_layout,
    fill,
    layout_seen,
)
from harness.crash.scalable.child import (
    CHANGES,
    LOST,
    PARTITIONS,
    SUBSCRIPTIONS,
    SYNCED,
    TORN,
    UNDO,
    Child,
    Settled,
    nothing,
    regular_of,
    start_fork_server,
    topic_of,
)
from harness.crash.scalable.traffic import Traffic
from harness.crash.server.process import died_by_kill
from harness.limits import reported
from magnetar.errors import MagnetarError
from magnetar.model.segments import SegmentLayout
from magnetar.scalable.layout.changes import synthetic_layout
from magnetar.scalable.records import LayoutRecord

WITHIN_SECONDS: Final = 1.0
STEPS_MAX: Final = 200
"""A change that takes more is taken for one that never ends."""

_KEYS: Final = 9
_VIOLATIONS_SHOWN: Final = 20
_POINTS: Final = {"lost": LOST, "torn": TORN, "synced": SYNCED, "busy": SYNCED}
_SERVED_MEANWHILE: Final = ("split", "merge", "migrate")
"""Changes of topics that clients use before, meanwhile and after."""


class Case(NamedTuple):
    """One kill."""

    kind: str
    how: str
    step: int

    def __str__(self) -> str:
        return f"{self.kind}, step {self.step} {self.how}"


@dataclass(slots=True)
class ChangeOutcome:
    """The sum of all kills of one change."""

    steps: int = 0
    """Batches of the journal that an undisturbed change writes."""
    kills: int = 0
    finished: int = 0
    undone: int = 0
    doubled: int = 0
    """Messages without a receipt that a migration let be stored twice."""
    slowest: float = 0.0
    """Seconds from readiness until nothing was under way, in the server's own time."""
    violations: list[str] = field(default_factory=list)

    @property
    def has_both_ends(self) -> bool:
        """Whether there were kills after which the change was finished, and others."""
        return self.finished > 0 and self.undone > 0


class _Prepared(NamedTuple):
    """A folder in which a topic stands before its change."""

    kind: str
    folder: Path
    history: ChangeHistory
    before: SegmentLayout | None


class ScalableKills:
    """Enumerates the kills of some changes, on folders below `folder`."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        changes: Sequence[str] = CHANGES,
        every: int = 1,
        plant: Callable[[], None] = nothing,
        reaches: Callable[[ChangeOutcome], bool] = lambda outcome: outcome.has_both_ends,
    ) -> None:
        self.outcomes = {kind: ChangeOutcome() for kind in changes}
        self._folder = folder
        self._chance = Random(f"scalable kills {seed}")
        self._every = every
        """Kill at each n-th step only, and at more of them until what is to be met was met."""
        self._reaches = reaches
        self._plant = plant
        """What every process calls first: a test may break a rule with it."""

    async def run(
        self, progress: Callable[[int], None] = lambda expected: None
    ) -> dict[str, ChangeOutcome]:
        """`progress` is called after each kill, with how many are expected in all."""
        all_prepared = [await self._prepare(kind) for kind in self.outcomes]
        for prepared in all_prepared:
            self.outcomes[prepared.kind].steps = await self._count_steps(prepared)
        for prepared in all_prepared:
            kind = prepared.kind
            points = [each for each in _POINTS if each != "busy" or kind in _SERVED_MEANWHILE]
            for how in points:
                await self._enumerate(prepared, how, lambda: progress(self.expected))
            await self._go_on(prepared, points)
        return self.outcomes

    @property
    def expected(self) -> int:
        """About how many kills there are in all."""
        kills = 0
        for kind, each in self.outcomes.items():
            steps = each.steps // self._every + 2
            kills += steps * (5 if kind in _SERVED_MEANWHILE else 3)  # busy: messages are steps too
        return kills

    async def _enumerate(self, prepared: _Prepared, how: str, progress: Callable[[], None]) -> None:
        step, answered = 1, False
        while not answered and step <= STEPS_MAX:
            answered = await self._kill(Case(prepared.kind, how, step), prepared)
            progress()
            step += self._every
        if not answered:
            text = f"{prepared.kind}, {how}: no answer after {STEPS_MAX} steps"
            self.outcomes[prepared.kind].violations.append(text)

    async def _go_on(self, prepared: _Prepared, points: Sequence[str]) -> None:
        """Kill at the steps that were left out, until what is to be met was met."""
        outcome = self.outcomes[prepared.kind]
        for step in range(1, STEPS_MAX + 1):
            if self._reaches(outcome):
                return
            if step % self._every == 1 % self._every:
                continue  # it was killed there
            # All points of a step, since they differ: only what is synced outlives the process.
            answered = [
                await self._kill(Case(prepared.kind, how, step), prepared) for how in points
            ]
            if all(answered):
                break
        if not self._reaches(outcome):
            text = (
                f"{prepared.kind}: {outcome.kills} kills did not meet what they were made to meet"
            )
            outcome.violations.append(text)

    # --- before

    async def _prepare(self, kind: str) -> _Prepared:
        folder = self._folder / f"{kind}-before"
        folder.mkdir(parents=True)
        history = ChangeHistory(topic_of(kind))
        history.key_names = [f"key-{self._chance.randrange(10**6)}" for _ in range(_KEYS)]
        child = Child(folder, plant=self._plant)
        try:
            await child.until_ready()
            await child.prepare(kind)
            before = _usable(kind, (await child.settled(kind)).layout)
            if before is not None:
                await fill(child.port, history, before)
            await child.stop()
        finally:
            await child.kill()
        return _Prepared(kind, folder, history, before)

    async def _count_steps(self, prepared: _Prepared) -> int:
        """Of a change that nobody disturbs."""
        folder = self._copied(prepared, "counted")
        child = Child(folder, refuses=prepared.kind == UNDO, plant=self._plant)
        try:
            await child.until_ready()
            return await child.change(prepared.kind) or 0
        finally:
            await child.kill()

    def _copied(self, prepared: _Prepared, name: str) -> Path:
        folder = self._folder / f"{prepared.kind}-{name}"
        shutil.copytree(prepared.folder, folder)
        return folder

    # --- one kill

    async def _kill(self, case: Case, prepared: _Prepared) -> bool:
        """Whether the change was answered before."""
        outcome = self.outcomes[case.kind]
        folder = self._copied(prepared, f"{case.how}-{case.step}")
        outcome.kills += 1
        life = _Life(case, prepared, folder, outcome, self._plant)
        try:
            wrong = await life.run()
        except (MagnetarError, OSError, EOFError) as error:
            wrong = [repr(error)[:500]]
        outcome.violations += [f"{case}: {text}" for text in wrong]
        if not wrong:
            shutil.rmtree(folder)
        return life.answered


class _Life:
    """A change that is killed, and what comes after it."""

    def __init__(
        self,
        case: Case,
        prepared: _Prepared,
        folder: Path,
        outcome: ChangeOutcome,
        plant: Callable[[], None],
    ) -> None:
        self.answered = False
        """Whether the change was answered before the kill."""
        self._case = case
        self._kind = case.kind
        self._prepared = prepared
        self._history = prepared.history.copy()
        self._folder = folder
        self._outcome = outcome
        self._plant = plant

    async def run(self) -> list[str]:
        """What is wrong."""
        child = Child(
            self._folder,
            point=_POINTS[self._case.how],
            nth=self._case.step,
            refuses=self._kind == UNDO,
            plant=self._plant,
        )
        traffic: Traffic | None = None
        try:
            await child.until_ready()
            if self._case.how == "busy":
                traffic = Traffic(child.port, _client_topic(self._kind), self._history)
                await traffic.start()
            self.answered = await child.change(self._kind) is not None
            if traffic is not None and self._kind == "migrate":
                self._history.may_double = traffic.in_doubt()
            code = await child.kill()
            if not died_by_kill(code):
                return [f"the process ended with code {code}"]
            return await self._recover(child.port, traffic)
        finally:
            await child.kill()
            if traffic is not None:
                await traffic.stop()

    async def _recover(self, port: int, traffic: Traffic | None) -> list[str]:
        """At the same address, if somebody waits there."""
        child = Child(self._folder, port=0 if traffic is None else port, plant=self._plant)
        try:
            await child.until_ready()
            found = await child.settled(self._kind)
            finished = self._count(found)
            wrong = _judge(self._kind, found)
            if found.unfinished:
                return wrong
            if self.answered and finished == (self._kind == UNDO):
                wrong.append(f"it was answered otherwise; finished is {finished}")
            if traffic is not None:
                wrong += await traffic.finish()
                await traffic.stop()
            wrong += await self._use(child, found)
            if not finished:
                wrong += await self._repeat(child)
            await child.stop()
        finally:
            await child.kill()
        return wrong

    def _count(self, found: Settled) -> bool:
        """Whether the change is finished."""
        finished = _is_finished(self._prepared, found)
        self._outcome.slowest = max(self._outcome.slowest, found.seconds)
        self._outcome.finished += finished
        self._outcome.undone += not finished
        return finished

    async def _use(self, child: Child, found: Settled) -> list[str]:
        """What clients find; and whether they can go on."""
        asked = _client_topic(self._kind) if found.layout is None else str(topic_of(self._kind))
        seen = await layout_seen(child.port, asked)
        layout = _usable(self._kind, found.layout)
        if layout is None:
            return [] if seen is None else [f"there is no topic, yet clients are told {seen}"]
        wrong = check_layout(layout, seen)
        wrong += await check_clients(child.port, self._history, layout)
        self._outcome.doubled += len(self._history.doubled)
        return wrong

    async def _repeat(self, child: Child) -> list[str]:
        """Ask again for what was undone."""
        await child.change(self._kind)
        found = await child.settled(self._kind)
        wrong = _judge(self._kind, found, timed=False)
        if not _is_finished(self._prepared, found):
            wrong.append("it was not done")
        return [f"asked for again: {text}" for text in wrong]


def _client_topic(kind: str) -> str:
    """The name that clients use from before the change on."""
    return str(regular_of(kind) if kind == "migrate" else topic_of(kind))


def _usable(kind: str, layout: LayoutRecord | None) -> SegmentLayout | None:
    """What clients use: the topic, or the regular one that it is not yet; None: neither."""
    if layout is not None:
        return layout.layout()
    if kind != "migrate":
        return None
    return synthetic_layout([regular_of(kind).with_partition(each) for each in range(PARTITIONS)])


def _is_finished(prepared: _Prepared, found: Settled) -> bool:
    if prepared.kind == "delete":
        return found.layout is None
    if found.layout is None:
        return False
    present = found.layout.layout().segments
    return prepared.before is None or dict(present) != dict(prepared.before.segments)


def _judge(kind: str, found: Settled, *, timed: bool = True) -> list[str]:
    """What is wrong with a topic once its server had time to finish or undo the change."""
    wrong = []
    if found.unfinished:
        wrong.append(f"after {found.seconds:.1f} s: {found.unfinished}")
    elif timed and found.seconds > WITHIN_SECONDS:
        wrong.append(f"it took {found.seconds:.2f} s")
    wrong += [f"{key} is left" for key in found.leftovers]
    expected = set() if kind == "create" else set(SUBSCRIPTIONS)
    for topic, names in found.subscriptions.items():
        missing = expected - set(names)
        wrong += [f"{topic} has no subscription {name!r}" for name in sorted(missing)]
    return wrong


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    seed = options.seed if options.seed is not None else secrets.randbelow(10**6)
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="magnetar-scalable-crash-"))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    started = time.monotonic()
    start_fork_server("harness.crash.scalable.traffic", "rich.progress", "rich.table")
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("kills in layout changes", total=None)
        kills = ScalableKills(folder, seed, changes=options.changes, every=options.every)

        def advance(expected: int) -> None:
            progress.update(task, advance=1, total=expected)

        outcomes = asyncio.run(kills.run(advance))
    _print_table(console, outcomes)
    violations = [text for each in outcomes.values() for text in each.violations]
    if violations:
        for text in violations[:_VIOLATIONS_SHOWN]:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print(f"seed {seed} failed; its data folders are in {folder}")
        chosen = f"--every {options.every} --seed {seed} --changes {' '.join(options.changes)}"
        console.print(f"again: python -m harness.crash.scalable.run {chosen}", soft_wrap=True)
        return 1
    shutil.rmtree(folder)
    console.print(f"seed {seed}: {time.monotonic() - started:.1f} seconds")
    return 0


def _print_table(console: Console, outcomes: Mapping[str, ChangeOutcome]) -> None:
    table = Table(title="Servers killed at the steps of layout changes")
    table.add_column("change")
    for name in ("steps", "kills", "finished", "undone", "doubled", "seconds", "wrong"):
        table.add_column(name, justify="right")
    for kind, each in outcomes.items():
        counts = (each.steps, each.kills, each.finished, each.undone, each.doubled)
        slowest, violations = f"{each.slowest:.3f}", str(len(each.violations))
        table.add_row(kind, *map(str, counts), slowest, violations)
    console.print(table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.crash.scalable.run")
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=CHANGES, help="else all")
    parser.add_argument("--every", type=int, default=1, help="kill at each n-th step only")
    parser.add_argument("--seed", type=int, help="of the keys that messages have; else random")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(reported(main))
