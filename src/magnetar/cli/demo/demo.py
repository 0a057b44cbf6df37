"""`magnetar demo`: serve, write, crash, recover, verify, report.

Owns: the demonstration. A server does a round trip with a client, is killed while a publisher
waits for receipts, and is started again (`demo_server`). Below it, storage alone: a process writes
entries and metadata records; it is killed in the middle; the store is opened again and compared
with what was acknowledged. Then once more, with an orderly end. The exit code is 0 only if nothing
was lost and nothing found that nobody wrote.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
from rich.console import Console

from magnetar.cli.demo.server import ROUND_TRIP_MESSAGES, ServerResult, serve_and_kill
from magnetar.cli.demo.writer import INDEX, entry_payload, record_folder, record_value
from magnetar.cli.output import print_table
from magnetar.cli.stored_metadata import look_at_metadata
from magnetar.errors import DeadlineExceeded, NotAllowed, StorageError
from magnetar.runtime.disk import LocalDisk
from magnetar.server.config import limits_from
from magnetar.server.embedded import Storage, open_storage

_SECONDS_MAX = 60.0
# For the start and the end of a writer, beside the time in which it writes.
_GRACE_SECONDS = 30.0
_READ_BYTES = 1 << 16
_HEADINGS = ("end", "entries", "records", "per s", "replayed", "open ms", "unheard", "lost")


@dataclass(slots=True)
class Reported:
    """The reports of the writers, over all runs: the last of each stream, -1 for none."""

    submitted: dict[str, int] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)
    is_ready: bool = False
    is_closed: bool = False

    def take(self, line: str) -> None:
        word, *rest = line.split()
        if word == "ready":
            self.is_ready = True
        elif word == "closed":
            self.is_closed = True
        else:
            stream, last = rest
            # "Everything up to": one number stands for all before it,
            # so reports need not name each entry.
            known = self.acknowledged if word == "acknowledged" else self.submitted
            known[stream] = int(last)

    def count(self, kind: str) -> int:
        """Acknowledged entries (`ledger-`) or records (`records-`)."""
        return sum(last + 1 for name, last in self.acknowledged.items() if name.startswith(kind))


@dataclass(slots=True)
class Result:
    """One run and what was found after it."""

    end: str
    seconds: float = 0.0
    entries: int = 0
    records: int = 0
    replayed: int = 0
    """Durable records that the reopening brought home."""
    reopened_ms: float = 0.0
    not_acknowledged: int = 0
    """Found and submitted; the writer died before it could hear of them."""
    lost: int = 0
    unexplained: int = 0
    index_mismatches: int = 0

    @property
    def is_sound(self) -> bool:
        return not (self.lost or self.unexplained or self.index_mismatches)


@click.command()
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="A new or empty folder to work in and keep; else a temporary one.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, _SECONDS_MAX),
    default=1.0,
    show_default=True,
    help="How long each of the three runs writes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def demo(context: click.Context, data: Path | None, seconds: float, as_json: bool) -> None:
    """Serve a client, kill the server, recover, and verify that nothing is lost."""
    console = Console(stderr=True)
    with data_folder(data) as folder, _told(console) as tell:
        served = serve_and_kill(folder / "server", seconds, tell)
        stored = _write_and_compare(folder / "storage", seconds, tell)
    if as_json:
        report = {"server": asdict(served), "storage": [asdict(result) for result in stored]}
        click.echo(json.dumps(report, indent=2))
    else:
        _print(served, stored)
    # Reported first, then failed: whoever sees the exit code finds the reason above it.
    if not (served.is_sound and all(result.is_sound for result in stored)):
        context.exit(1)


def _write_and_compare(folder: Path, seconds: float, tell: Callable[[str], None]) -> list[Result]:
    """Storage alone: a run that is killed, and one that ends by itself."""
    # One for both runs: the second finds, and checks again, what the first one wrote.
    reported = Reported()
    results = []
    for run, end in enumerate(("kill -9", "orderly")):
        tell(f"storage alone: writing for {seconds:g} s, then: {end}")
        result = _write(folder, run, end, seconds, reported)
        tell("reopening and comparing with what was acknowledged")
        asyncio.run(compare(folder, reported, result))
        results.append(result)
    return results


@contextmanager
def data_folder(chosen: Path | None) -> Iterator[Path]:
    """The folder that was chosen, if it is empty, or a temporary one."""
    if chosen is None:
        with tempfile.TemporaryDirectory(prefix="magnetar-demo-") as name:
            yield Path(name)
        return
    # Whatever is found there counts as "nobody wrote it": a used folder would fail the demo.
    if chosen.exists() and any(chosen.iterdir()):
        raise NotAllowed(
            f"{chosen} is not empty", hint="choose a new folder: all that is found there is checked"
        )
    yield chosen


@contextmanager
def _told(console: Console) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, a plain line for each step elsewhere."""
    if not console.is_terminal:
        yield lambda what: console.print(what, highlight=False, soft_wrap=True)
        return
    with console.status("starting") as status:
        yield status.update


# --- writing


def _write(folder: Path, run: int, end: str, seconds: float, reported: Reported) -> Result:
    """Let a process write; kill it after `seconds`, or let it end by itself by then."""
    kills = end == "kill -9"
    reported.is_ready = reported.is_closed = False
    before = reported.count("ledger-"), reported.count("records-")
    command = [sys.executable, "-m", "magnetar.cli.demo.writer", str(folder), str(run)]
    # A writer that is to be killed must not end by itself before that.
    command.append(str(_SECONDS_MAX * 2 if kills else seconds))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            _follow(process, seconds if kills else None, reported)
        # Also when we are interrupted: no writer stays behind.
        finally:
            process.kill()
    if not kills and not reported.is_closed:
        raise StorageError(f"the writer ended with exit code {process.returncode}")
    return Result(
        end,
        seconds=seconds,
        entries=reported.count("ledger-") - before[0],
        records=reported.count("records-") - before[1],
    )


def _follow(process: subprocess.Popen[bytes], kill_after: float | None, reported: Reported) -> None:
    """Take in what the process reports until its end."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    deadline = time.monotonic() + _SECONDS_MAX + _GRACE_SECONDS
    kill_at: float | None = None
    rest = b""
    while True:
        now = time.monotonic()
        if now > deadline:
            raise DeadlineExceeded("the writer did not end")
        # Counted from "ready": starting Python and opening the store is not writing.
        if kill_after is not None and kill_at is None and reported.is_ready:
            kill_at = now + kill_after
        if kill_at is not None and now >= kill_at:
            process.kill()
            # Once only; then what is left in the pipe is read to its end, for it was acknowledged.
            kill_at = deadline
        wait = (kill_at or deadline) - now
        if not select.select([descriptor], [], [], wait)[0]:
            continue
        data = os.read(descriptor, _READ_BYTES)
        # End of the pipe: the process is gone.
        if not data:
            return
        # The last piece may be half a line; after a kill it stays one, and counts for nothing.
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            reported.take(line.decode())


# --- comparing


async def compare(folder: Path, reported: Reported, result: Result) -> None:
    started = time.monotonic()
    storage = await open_storage(folder, limits=limits_from(os.environ))
    try:
        result.reopened_ms = (time.monotonic() - started) * 1000
        result.replayed = storage.recovered_records
        await _compare_ledgers(storage, reported, result)
        await _compare_records(storage, reported, result)
    finally:
        await storage.close()
    result.index_mismatches += len(look_at_metadata(folder, LocalDisk()).mismatches)


async def _compare_ledgers(storage: Storage, reported: Reported, result: Result) -> None:
    found = {f"ledger-{each}": each async for each in storage.ledgers.list()}
    for stream in reported.acknowledged:
        if stream.startswith("ledger-") and stream not in found:
            result.lost += reported.acknowledged[stream] + 2  # its entries and itself
    for stream, ledger_id in found.items():
        info = await storage.ledgers.info(ledger_id)
        entry_id = 0
        while entries := await storage.ledgers.read(ledger_id, entry_id, info.last_entry):
            # A payload says where it belongs: an entry at another place is not explained.
            result.unexplained += sum(
                entry.payload != entry_payload(*entry.position) for entry in entries
            )
            entry_id += len(entries)
        _count(stream, entry_id - 1, reported, result)


async def _compare_records(storage: Storage, reported: Reported, result: Result) -> None:
    streams = [each for each in reported.submitted if each.startswith("records-")]
    count = 0
    async with storage.connect() as store:
        for stream in streams:
            last = -1
            async for record in store.scan(record_folder(stream)):
                last += 1
                count += 1
                result.unexplained += record.value != record_value(stream, last)
            _count(stream, last, reported, result)
        indexed = [record async for record in store.scan_index(INDEX)]
    result.index_mismatches += abs(len(indexed) - count)


def _count(stream: str, last: int, reported: Reported, result: Result) -> None:
    """Compare the end of a stream with what was reported of it, and go on from what was found."""
    acknowledged = reported.acknowledged.get(stream, -1)
    result.lost += max(0, acknowledged - last)
    result.unexplained += max(0, last - reported.submitted.get(stream, -1))
    result.not_acknowledged += max(0, last - acknowledged)
    # What survived is the state from which the next run goes on: it must not vanish later either.
    reported.acknowledged[stream] = reported.submitted[stream] = last


def _print(served: ServerResult, stored: list[Result]) -> None:
    click.echo(
        f"server: {served.round_trip} of {ROUND_TRIP_MESSAGES} messages there and back with "
        f"{served.client}; killed with {served.sent - served.receipted} messages in flight, "
        f"{served.not_acknowledged} of them stored; ready again after {served.restart_ms:.0f} ms"
    )
    rows = [
        (
            *(each.end, each.entries, each.records, round(each.entries / each.seconds)),
            *(each.replayed, round(each.reopened_ms), each.not_acknowledged, each.lost),
        )
        for each in stored
    ]
    title = "Storage alone: written, ended, reopened, compared"
    print_table(_HEADINGS, rows, none="", title=title)
    # "unheard" is no fault: durable, and the writer died before it could be told.
    checked = sum(result.entries + result.records for result in stored)
    if served.is_sound:
        click.echo(f"verified: {served.receipted:,} receipted messages, 0 lost, 0 unexplained")
    else:
        click.echo(
            f"FAILED: of {served.receipted} receipted messages {served.lost} are lost; "
            f"{served.doubled} doubled, {served.unexplained} unexplained; round trip of "
            f"{served.round_trip} messages"
        )
    # Each failure has its own line, for the exit code says only that there was one.
    wrong = [result for result in stored if not result.is_sound]
    if not wrong:
        click.echo(f"verified: {checked:,} acknowledged entries and records, 0 lost, 0 unexplained")
    for result in wrong:
        click.echo(
            f"FAILED after {result.end}: {result.lost} lost, {result.unexplained} unexplained, "
            f"{result.index_mismatches} index mismatches"
        )
