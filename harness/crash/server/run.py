"""Kills of a server under load: `python -m harness.crash.server.run --kills 40 [--seed N]`.

Owns: the plan of each kill, the lives of a server between them, the table and the verdict. A life
is: start on the folder that the kill before left, compare with what clients were told
(`server_crash_check`), serve a load (`server_crash_load`), die. The exit code is 0 only if nothing
was lost, doubled, unexplained or out of order, and no acknowledgement forgotten or invented.
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
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harness.crash.server.check import ServerFault, ServerVerdict, check_server
from harness.crash.server.history import new_history
from harness.crash.server.load import ServerLoad, prepare
from harness.crash.server.process import SERVE, SERVE_TO_A_POINT, ServerProcess, died_by_kill
from harness.crash.storage.points import CRASH_POINTS
from harness.limits import PATIENCE_S, reported, within
from magnetar.errors import MagnetarError, RemoteProtocolError, ServiceNotReady

_STORE_LIVES: Final = 8
"""Kills before a new, empty folder is taken."""
_LOAD_SHARE_MIN: Final = 0.1
"""Of the entries of a life, before it ends at random: a sample has something to look for."""
_POINT_SECONDS: Final = 1.0
"""A point that is not passed so long after everything was sent is given up."""
_START_SECONDS: Final = 0.8
"""About what a start takes, as long as none was seen."""
_STOP_SECONDS: Final = 0.05
_VIOLATIONS_SHOWN: Final = 20

PLANS: Final = ("random", "point", "first receipt", "random", "start", "point", "first ack", "stop")
"""When the server dies: one after the other."""


class _Plan(NamedTuple):
    """How one life is to end."""

    kind: str
    point: str = ""
    nth: int = 0

    def __str__(self) -> str:
        return f"{self.point} #{self.nth}" if self.point else self.kind


@dataclass(slots=True)
class ServerOutcome:
    """The sum of a run."""

    kills: int = 0
    checks: int = 0
    messages: int = 0
    acknowledged: int = 0
    seconds: float = 0.0
    faults: Counter[ServerFault] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    """Lives that ended as planned, by kind."""
    starts: list[float] = field(default_factory=list)
    """Seconds until a started process said that it serves."""

    def add(self, where: str, verdict: ServerVerdict) -> None:
        self.checks += 1
        self.messages += verdict.messages
        self.acknowledged += verdict.acknowledged
        for fault, text in verdict.violations:
            self.fault(where, fault, text)

    def fault(self, where: str, fault: ServerFault, text: str) -> None:
        self.faults[fault] += 1
        self.texts.append(f"{where}: {fault.value}: {text}")


class ServerKills:
    """Kills so many servers, on folders below `folder`."""

    def __init__(
        self,
        folder: Path,
        kills: int,
        seed: int,
        *,
        serve: Sequence[str] = SERVE,
        at_points: bool = True,
        looks_for: Collection[ServerFault] = (),
    ) -> None:
        """`looks_for` are faults of a server without one of its rules: any of them ends the run."""
        self.outcome = ServerOutcome()
        self._folder = folder
        self._kills = kills
        self._chance = Random(f"server kills {seed}")
        self._serve = serve
        self._at_points = at_points
        """False: only processes of `serve` are killed."""
        self._looks_for = looks_for
        self._store = folder
        self._history = new_history()
        self._where = ""

    async def run(self, progress: Callable[[], None] = lambda: None) -> ServerOutcome:
        started = time.monotonic()
        for number in range(self._kills):
            if self._is_found:
                break
            if number % _STORE_LIVES == 0:
                if number:
                    await self._last_life()
                self._store = self._folder / f"store-{number}"
                self._history = new_history()
            plan = self._plan(number)
            self._where = f"kill {number} ({plan})"
            await self._live(plan)
            progress()
        if not self._is_found:
            await self._last_life()
        self.outcome.seconds = time.monotonic() - started
        return self.outcome

    @property
    def _is_found(self) -> bool:
        return any(self.outcome.faults[each] for each in self._looks_for)

    def _plan(self, number: int) -> _Plan:
        kind = PLANS[number % len(PLANS)]
        is_young = number % _STORE_LIVES == 0 and number // _STORE_LIVES % 2 == 1
        if not self._at_points or (kind != "point" and not is_young):
            return _Plan("random" if kind == "point" else kind)
        # Some points are passed only while a store is made; those of deletions never here.
        points = [
            each
            for each in CRASH_POINTS
            if (each.often == 1) == is_young and "remove" not in each.name
        ]
        point = self._chance.choice(points)
        return _Plan("point", point.name, self._chance.randrange(point.often) + 1)

    # --- one life

    async def _live(self, plan: _Plan) -> None:
        process = self._start(plan)
        self._history.life += 1
        reached = True
        try:
            if plan.kind == "start":
                whole = max(self.outcome.starts, default=_START_SECONDS)
                await process.part_of_start(self._chance.random() * whole)
            else:
                reached = await self._serve_until_planned(process, plan)
        except* (RemoteProtocolError, ServiceNotReady, OSError) as lost:
            await self._explain_loss(process, plan, lost)
        except* MagnetarError as failed:
            self._failed(failed)
        finally:
            code = process.kill()
        self.outcome.kills += 1
        if plan.kind == "stop" and code == 0:
            return  # it was done before the kill came
        if not died_by_kill(code):
            self.outcome.fault(self._where, ServerFault.FAILED, f"exit code {code}")
        elif reached:
            self.outcome.ends[plan.kind] += 1

    def _start(self, plan: _Plan) -> ServerProcess:
        if plan.point:
            arguments = [f"--point={plan.point}", f"--nth={plan.nth}"]
            return ServerProcess.start(self._store, SERVE_TO_A_POINT, arguments)
        return ServerProcess.start(self._store, self._serve)

    async def _serve_until_planned(self, process: ServerProcess, plan: _Plan) -> bool:
        """Check, load, kill; False: what was to be waited for did not come."""
        if not await process.until_ready():
            if plan.point and not process.is_alive:
                return True
            raise RemoteProtocolError(f"the server did not become ready: {process.said}")
        self.outcome.starts.append(process.ready_seconds)
        await self._check(process)
        load = ServerLoad(self._history, process.port, self._chance)
        running = asyncio.create_task(load.run())
        try:
            reached = await self._until(plan, process, load, running)
            load.ending = True
            if plan.kind == "stop":
                process.process.terminate()
                await asyncio.sleep(self._chance.random() * _STOP_SECONDS)
            process.kill()
            # What the server had sent before its death is read to the end: it counts.
            async with within("clients see that their server is dead"):
                await asyncio.wait({running})
        finally:
            running.cancel()
            await asyncio.wait({running})
        self._judge_load(plan, load, reached)
        return reached

    async def _check(self, process: ServerProcess) -> None:
        known = self._history.prepared
        await prepare(self._history, process.port, process.admin_url)
        if known:
            verdict = await check_server(self._history, process.port)
            self.outcome.add(self._where, verdict)

    async def _until(
        self, plan: _Plan, process: ServerProcess, load: ServerLoad, running: asyncio.Task[None]
    ) -> bool:
        """Wait for the moment to kill, or for the end of the load if it comes before.

        Moments are told by what was done, not by the clock: a slow machine does as much.
        """
        moments = load.moments
        share = self._chance.uniform(_LOAD_SHARE_MIN, 1.0)
        moment: Coroutine[Any, Any, object]
        match plan.kind:
            case "point":
                moment = _after(moments.all_sent, _POINT_SECONDS)
            case "first receipt":
                moment = moments.receipts.past(0)
            case "first ack":
                moment = moments.first_ack_answer.wait()
            case _:
                moment = moments.receipts.past(int(share * load.entries) - 1)
        waits = [asyncio.create_task(moment), asyncio.create_task(moments.failure.wait())]
        try:
            async with within(f"the moment of {self._where}"):
                await asyncio.wait({running, *waits}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if plan.point:  # it was passed, if that is why connections broke
            return moments.failure.is_set() and await process.died_within(PATIENCE_S)
        return waits[0].done()

    def _judge_load(self, plan: _Plan, load: ServerLoad, reached: bool) -> None:
        """Connections break with the process, not before."""
        texts = [repr(error) for error in load.failures]
        if not (plan.point and reached):
            texts += load.broken
        for text in texts:
            self.outcome.fault(self._where, ServerFault.FAILED, text[:500])

    async def _explain_loss(
        self, process: ServerProcess, plan: _Plan, lost: BaseExceptionGroup[BaseException]
    ) -> None:
        """A check lost its connection: that is so only if the process killed itself."""
        if not plan.point or not await process.died_within(PATIENCE_S):
            self._failed(lost)

    def _failed(self, error: BaseExceptionGroup[BaseException]) -> None:
        for leaf in _leaves(error):
            self.outcome.fault(self._where, ServerFault.FAILED, repr(leaf)[:500])

    async def _last_life(self) -> None:
        """Check once more, stop in an orderly way, and check what that left too."""
        for end in ("after the last kill", "after an orderly stop"):
            self._where = f"{self._where.partition(',')[0]}, {end}"
            process = ServerProcess.start(self._store, self._serve)
            self._history.life += 1
            try:
                if await process.until_ready():
                    await self._check(process)
                    code = await process.stop()
                else:
                    code = process.kill()
            except (MagnetarError, OSError) as error:
                process.kill()
                self.outcome.fault(self._where, ServerFault.FAILED, repr(error)[:500])
                return
            if code != 0:
                self.outcome.fault(self._where, ServerFault.FAILED, f"exit code {code}")


async def _after(event: asyncio.Event, seconds: float) -> None:
    await event.wait()
    await asyncio.sleep(seconds)


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in _leaves(each)]


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    seed = options.seed if options.seed is not None else secrets.randbelow(10**6)
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="magnetar-server-crash-"))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("server kills", total=options.kills)
        kills = ServerKills(folder, options.kills, seed)
        outcome = asyncio.run(kills.run(lambda: progress.advance(task)))
    _print_table(console, outcome)
    if outcome.texts:
        for text in outcome.texts[:_VIOLATIONS_SHOWN]:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print(f"seed {seed} failed; its data folders are in {folder}")
        again = f"python -m harness.crash.server.run --kills {options.kills} --seed {seed}"
        console.print(f"again: {again}", soft_wrap=True)
        return 1
    shutil.rmtree(folder)
    ends = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.ends.items()))
    slowest = max(outcome.starts, default=0.0)
    console.print(f"seed {seed}: died as planned: {ends}; slowest start {slowest:.2f} s")
    return 0


def _print_table(console: Console, outcome: ServerOutcome) -> None:
    table = Table(title="A server killed under load")
    table.add_column("")
    table.add_column("count", justify="right")
    for name, count in (
        ("kills", outcome.kills),
        ("checks of all topics and subscriptions", outcome.checks),
        ("messages that had to be there", outcome.messages),
        ("acknowledgements that had to hold", outcome.acknowledged),
        *((fault.value, outcome.faults[fault]) for fault in ServerFault),
    ):
        table.add_row(name, f"{count:,}")
    table.add_row("seconds", f"{outcome.seconds:.1f}")
    console.print(table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.crash.server.run")
    parser.add_argument("--kills", type=int, default=40, help="servers to kill")
    parser.add_argument("--seed", type=int, help="of the load and of all choices; else random")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(reported(main))
