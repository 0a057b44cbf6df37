"""Kills of a server under transactions: `python -m harness.crash.txn.run --kills 40 --seed N`.

Owns: the plan of each kill, the lives of a server between them, the table and the verdict. The
server starts again on the same folder and port; clients (`txn_crash_load`) consume, transform and
produce over all its lives. After the last kill the load drains, and what must hold then is checked
(`txn_crash_check`): after the drain, after an orderly stop, after the retention of transactions,
and on the records that are stored.
The exit code is 0 only if no rule was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harness.crash.server.process import SERVE, ServerProcess, died_by_kill
from harness.crash.txn.check import Server, check_records, check_served, until_forgotten
from harness.crash.txn.history import ALONG, INPUT, OUTPUTS, SUBSCRIPTION, TxnFault, TxnHistory
from harness.crash.txn.load import HOST, WORKERS, TxnLoad, publish_all, subscribe
from harness.limits import PATIENCE_S, expire, reported, within
from harness.patient_clients import PatientDriver
from magnetar.errors import MagnetarError, RemoteProtocolError, ServiceNotReady
from magnetar.model.subscriptions import SubscriptionType

PLANS: Final = (
    *("random", "commit sent", "random", "start", "random", "commit answered", "random"),
)
"""When the server dies: one after the other."""

_TRANSACTIONS_MIN: Final = 100
_TRANSACTIONS_MAX: Final = 300
"""So many are begun before a kill: a slow machine has done as much."""
_POLL_SECONDS: Final = 0.01
_AFTER_EVENT_SECONDS: Final = 0.01
_START_SECONDS: Final = 0.8
"""About what a start takes, as long as none was seen."""
_INPUTS_LEFT_MIN: Final = 300
_INPUTS_ADDED: Final = 600
_VIOLATIONS_SHOWN: Final = 20
_SHORT_RETENTION: Final = "txn_retention_seconds = 1.0\ntxn_collect_seconds = 0.5\n"
_PORTS: Final = range(20_000, 30_000)
"""Below those that systems give to connections: nobody takes it while the server is down."""

_PORTS_TRIED: Final = 100


@dataclass(slots=True)
class TxnOutcome:
    """The sum of a run."""

    history: TxnHistory = field(default_factory=TxnHistory)
    kills: int = 0
    headers: int = 0
    seconds: float = 0.0
    drain_seconds: float = 0.0
    slowest_start: float = 0.0


class TxnKills:
    """Kills a server on one folder so many times."""

    def __init__(
        self,
        folder: Path,
        kills: int,
        seed: int,
        *,
        serve: Sequence[str] = SERVE,
        workers: int = WORKERS,
        legacy_share: float = 0.0,
        looks_for: TxnFault | None = None,
    ) -> None:
        """`looks_for` is the fault of a server without one of its rules: it ends the run."""
        self.outcome = TxnOutcome()
        self._history = self.outcome.history
        self._folder = folder / "store"
        self._kills = kills
        self._chance = Random(f"transaction kills {seed}")
        self._command = serve
        self._looks_for = looks_for
        self._ports = _free_ports(2)
        self._load = TxnLoad(
            self._history, self._ports[0], seed, workers=workers, legacy_share=legacy_share
        )

    async def run(self, progress: Callable[[], None] = lambda: None) -> TxnOutcome:
        started = time.monotonic()
        clients = asyncio.create_task(self._load.run())
        try:
            for number in range(self._kills):
                if self._is_found:
                    break
                plan = PLANS[number % len(PLANS)]
                self._history.where = f"kill {number} ({plan})"
                await self._live(plan, clients)
                progress()
            if not self._is_found:
                await self._drain(clients)
        except (MagnetarError, OSError) as error:
            self._history.fault(TxnFault.FAILED, repr(error))
        finally:
            clients.cancel()
            await asyncio.wait({clients})
        self.outcome.seconds = time.monotonic() - started
        return self.outcome

    @property
    def _is_found(self) -> bool:
        return self._looks_for is not None and self._history.faults[self._looks_for] > 0

    # --- one life

    def _start(self, settings: str = "") -> ServerProcess:
        port, admin = self._ports
        file = self._folder.with_name("settings.toml")
        file.write_text(settings)
        arguments = (f"--port={port}", f"--admin-port={admin}", f"--config={file}")
        return ServerProcess.start(self._folder, self._command, arguments)

    async def _live(self, plan: str, clients: asyncio.Task[None]) -> None:
        process = self._start()
        try:
            if plan == "start":
                whole = self.outcome.slowest_start or _START_SECONDS
                await process.part_of_start(self._chance.random() * whole)
            else:
                await self._serve(process)
                await self._until(plan, clients)
        finally:
            self._load.up.clear()
            code = process.kill()
        self.outcome.kills += 1
        if not died_by_kill(code):
            self._history.fault(TxnFault.FAILED, f"exit code {code}")

    async def _serve(self, process: ServerProcess) -> None:
        if not await process.until_ready():
            raise RemoteProtocolError(f"the server did not become ready: {process.said}")
        self.outcome.slowest_start = max(self.outcome.slowest_start, process.ready_seconds)
        self._load.outlive_start(self.outcome.slowest_start)
        if not self._history.inputs:
            await self._prepare()
        self._load.life += 1
        self._load.up.set()
        if self._history.inputs - len(self._history.transformed) < _INPUTS_LEFT_MIN:
            await self._add_inputs()

    async def _prepare(self) -> None:
        """Subscriptions that are there before the first message."""
        places = [(INPUT, SUBSCRIPTION, SubscriptionType.SHARED)]
        places += [(topic, ALONG, SubscriptionType.EXCLUSIVE) for topic in OUTPUTS]
        for topic, name, kind in places:
            driver = await PatientDriver.connect(HOST, self._ports[0])
            try:
                await subscribe(driver, topic, name, kind)
            finally:
                await driver.close()

    async def _add_inputs(self) -> None:
        first = self._history.inputs
        numbers = range(first, first + _INPUTS_ADDED)
        await publish_all(
            self._ports[0], INPUT, f"numbers-{first}", [str(each).encode() for each in numbers]
        )
        self._history.inputs += _INPUTS_ADDED

    def _is_idle(self, clients: asyncio.Task[None]) -> bool:
        """Whether nothing more comes of the load: no input is left, or its clients failed."""
        return self._history.is_transformed or clients.done()

    async def _until(self, plan: str, clients: asyncio.Task[None]) -> None:
        """The moment to kill."""
        event = {
            "commit sent": self._load.commit_sent,
            "commit answered": self._load.commit_answered,
        }.get(plan)
        more = self._chance.randint(_TRANSACTIONS_MIN, _TRANSACTIONS_MAX)
        enough = self._history.events["begun"] + more
        async with within(f"{more} transactions, or all inputs transformed"):
            while self._history.events["begun"] < enough and not self._is_idle(clients):
                await asyncio.wait({clients}, timeout=_POLL_SECONDS)
        if event is None:
            return
        event.clear()
        waiting = asyncio.create_task(event.wait())
        try:
            async with within(f"the event {plan!r}, or all inputs transformed"):
                while not waiting.done() and not self._is_idle(clients):
                    await asyncio.wait({waiting, clients}, timeout=_POLL_SECONDS)
        finally:
            waiting.cancel()
        if not event.is_set():
            self._history.events["event did not come"] += 1
        await asyncio.sleep(self._chance.random() * _AFTER_EVENT_SECONDS)

    # --- the end

    async def _drain(self, clients: asyncio.Task[None]) -> None:
        """Let all inputs be transformed; check; stop in an orderly way; check what that left."""
        self._history.where = "the drain"
        self._load.draining = True
        process = self._start()
        try:
            await self._serve(process)
            began = time.monotonic()
            await self._until_transformed(clients)
            self.outcome.drain_seconds = time.monotonic() - began
            self._load.ending = True
            async with within("clients end"):
                await asyncio.wait({clients})
            if (error := clients.exception()) is not None:
                raise error
            if self._is_found:
                return
            await check_served(self._history, self._server, "drained")
            if self._is_found:
                return
            await self._stop(process)
        finally:
            process.kill()
        self._history.where = "after an orderly stop"
        self.outcome.headers = await check_records(self._history, self._folder)
        await self._served_again("restarted")
        self._history.where = "after the retention"
        await self._served_again("forgotten", forgotten=True)
        await check_records(self._history, self._folder, forgotten=True)

    async def _served_again(self, name: str, *, forgotten: bool = False) -> None:
        """One more life, which begins and ends in an orderly way."""
        process = self._start(_SHORT_RETENTION if forgotten else "")
        try:
            if not await process.until_ready():
                raise RemoteProtocolError(f"the server did not become ready: {process.said}")
            if forgotten:
                await until_forgotten(self._history, self._server)
            await check_served(self._history, self._server, name, forgotten=forgotten)
            await self._stop(process)
        finally:
            process.kill()

    @property
    def _server(self) -> Server:
        port, admin = self._ports
        return Server(port, f"http://{HOST}:{admin}")

    async def _until_transformed(self, clients: asyncio.Task[None]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not self._is_idle(clients) and not self._is_found:
            if time.monotonic() > until:
                left = [
                    number
                    for number in range(self._history.inputs)
                    if number not in self._history.transformed
                ]
                expire(f"{len(left)} inputs are transformed: {left[:20]}")
            await asyncio.sleep(0.1)

    async def _stop(self, process: ServerProcess) -> None:
        code = await process.stop()
        if code != 0:
            self._history.fault(TxnFault.FAILED, f"exit code {code}")


def _free_ports(count: int) -> list[int]:
    """Not by the seed: runs of one seed at a time would take the same ports."""
    found: list[int] = []
    for port in secrets.SystemRandom().sample(_PORTS, _PORTS_TRIED):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
        if len(found) == count:
            return found
    raise ServiceNotReady(f"no {count} of {_PORTS_TRIED} ports tried are free")


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    seed = options.seed if options.seed is not None else secrets.randbelow(10**6)
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="magnetar-txn-crash-"))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("transaction kills", total=options.kills)
        kills = TxnKills(folder, options.kills, seed, legacy_share=options.legacy)
        outcome = asyncio.run(kills.run(lambda: progress.advance(task)))
    _print_table(console, outcome)
    texts = outcome.history.texts
    if texts:
        for text in texts[:_VIOLATIONS_SHOWN]:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print(f"seed {seed} failed; its data folder is in {folder}")
        again = f"python -m harness.crash.txn.run --kills {options.kills} --seed {seed}"
        again += f" --legacy {options.legacy}"
        console.print(f"again: {again}", soft_wrap=True)
        return 1
    shutil.rmtree(folder)
    console.print(
        f"seed {seed}: drained in {outcome.drain_seconds:.1f} s;"
        f" slowest start {outcome.slowest_start:.2f} s"
    )
    return 0


def _print_table(console: Console, outcome: TxnOutcome) -> None:
    history = outcome.history
    table = Table(title="A server killed under transactions")
    table.add_column("")
    table.add_column("count", justify="right")
    for name, count in (
        ("kills", outcome.kills),
        ("inputs", history.inputs),
        ("outputs seen while it ran", sum(map(len, history.seen.values()))),
        *((f"transactions: {name}", count) for name, count in sorted(history.events.items())),
        ("headers stored at the end", outcome.headers),
        *((fault.value, history.faults[fault]) for fault in TxnFault),
    ):
        table.add_row(name, f"{count:,}")
    table.add_row("seconds", f"{outcome.seconds:.1f}")
    console.print(table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.crash.txn.run")
    parser.add_argument("--kills", type=int, default=40, help="servers to kill")
    parser.add_argument("--seed", type=int, help="of the load and of all choices; else random")
    parser.add_argument(
        "--legacy", type=float, default=0.0, help="share of transactions that end by markers"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(reported(main))
