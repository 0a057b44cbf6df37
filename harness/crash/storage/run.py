"""The crash tests: `python -m harness.crash.storage.run --kills 40 --cuts 150 [--seed N]`.

Owns: the run as a whole, its table and its verdict. Processes are killed with SIGKILL at named
points and at random (`crash_kills`), recorded stores lose power at random places (`crash_cuts`),
and after each the store is opened and compared with what it had acknowledged (`crash_check`).
The exit code is 0 only if nothing was lost, unexplained, reused, or out of step with an index.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harness.crash.storage.check import Fault, Verdict
from harness.crash.storage.cuts import NOTHING, Cut, RecordedLoad, check_cut, cuts_of, record_load
from harness.crash.storage.kills import kill_loop
from harness.crash.storage.points import CRASH_POINTS
from harness.limits import reported

_CUTS_PER_LOAD: Final = 30
_VIOLATIONS_SHOWN: Final = 20


@dataclass(slots=True)
class Outcome:
    """The sum of one kind of test."""

    done: int = 0
    checked: int = 0
    seconds: float = 0.0
    faults: Counter[Fault] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    points: Counter[str] = field(default_factory=Counter)
    """Kills at each named point that were reached."""

    def add(self, where: str, verdict: Verdict) -> None:
        self.checked += verdict.checked
        for fault, text in verdict.violations:
            self.faults[fault] += 1
            self.texts.append(f"{where}: {fault.value}: {text}")


def run_kills(folder: Path, kills: int, seed: int, progress: Progress | None = None) -> Outcome:
    outcome = Outcome()
    started = time.monotonic()
    task = None if progress is None else progress.add_task("kills", total=kills)
    for kill in kill_loop(folder, kills, seed):
        if kill.verdict is not None:
            outcome.add(f"kill {outcome.done} ({kill.planned})", kill.verdict)
        outcome.done += 1
        if kill.reached:
            outcome.points[kill.planned.partition(" ")[0]] += 1
        if progress is not None and task is not None:
            progress.advance(task)
    outcome.seconds = time.monotonic() - started
    return outcome


def run_cuts(
    folder: Path,
    cuts: int,
    seed: int,
    progress: Progress | None = None,
    *,
    looks_for: Fault | None = None,
) -> Outcome:
    """Several recorded loads, each beginning with what a cut of the one before left.

    `looks_for` is the fault of a store without one of its rules: the load that shows it ends the
    run.
    """
    outcome = Outcome()
    started = time.monotonic()
    task = None if progress is None else progress.add_task("power cuts", total=cuts)
    before = NOTHING
    number = 0
    while outcome.done < cuts and not (looks_for and outcome.faults[looks_for]):
        loading = folder / f"load-{number}"
        try:
            load = asyncio.run(record_load(loading, seed, before))
        except Exception as error:  # noqa: BLE001  whatever a broken store raises, it is a finding
            outcome.faults[Fault.LOST] += 1
            outcome.texts.append(f"load {number}, begun after cut {before.place}: {error!r}")
            break
        before = _cut_load(load, min(_CUTS_PER_LOAD, cuts - outcome.done), loading, outcome)
        shutil.rmtree(loading)
        number += 1
        if progress is not None and task is not None:
            progress.update(task, completed=outcome.done)
    outcome.seconds = time.monotonic() - started
    return outcome


def _cut_load(load: RecordedLoad, cuts: int, folder: Path, outcome: Outcome) -> Cut:
    """Check so many cuts of a load; one of the later ones, for the next load to begin with."""
    kept = load.before
    for place, cut in enumerate(cuts_of(load, cuts, outcome.done)):
        target = folder.with_name(f"cut-{outcome.done}")
        verdict = asyncio.run(check_cut(target, load.seed, cut))
        outcome.add(f"cut {outcome.done} (step {cut.place} of {len(load.steps)})", verdict)
        outcome.done += 1
        if verdict.violations:
            continue  # its files are kept, to be looked at
        shutil.rmtree(target)
        if place <= cuts * 3 // 4:
            kept = cut
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    seed = options.seed if options.seed is not None else secrets.randbelow(10**6)
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="magnetar-crash-"))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        kills = run_kills(folder / "kills", options.kills, seed, progress)
        cuts = run_cuts(folder / "cuts", options.cuts, seed, progress)
    _print_table(console, kills, cuts)
    failed = bool(kills.texts or cuts.texts)
    if failed:
        for text in (kills.texts + cuts.texts)[:_VIOLATIONS_SHOWN]:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print(f"seed {seed} failed; the files of what failed are in {folder}")
        again = f"--kills {options.kills} --cuts {options.cuts} --seed {seed}"
        console.print(f"again: python -m harness.crash.storage.run {again}", soft_wrap=True)
    else:
        shutil.rmtree(folder)
        named = len(kills.points.keys() - {"random"})
        console.print(f"seed {seed}: {named} of {len(CRASH_POINTS)} named crash points reached")
    return int(failed)


def _print_table(console: Console, kills: Outcome, cuts: Outcome) -> None:
    table = Table(title="Crashes survived")
    table.add_column("", no_wrap=True)
    for heading in ("runs", "checked", "lost", "unexplained", "index", "reused", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, outcome in (("kill -9", kills), ("power cut", cuts)):
        faults = [str(outcome.faults[fault]) for fault in Fault]
        cells = (name, str(outcome.done), f"{outcome.checked:,}", *faults)
        table.add_row(*cells, f"{outcome.seconds:.1f}")
    console.print(table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.crash.storage.run")
    parser.add_argument("--kills", type=int, default=40, help="processes to kill")
    parser.add_argument("--cuts", type=int, default=150, help="power cuts")
    parser.add_argument("--seed", type=int, help="of the load and of all choices; else random")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(reported(main))
