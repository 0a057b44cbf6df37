"""`magnetar verify DIR`: read a whole data folder and say what is damaged.

Owns: the walk over every entry of every ledger and the look at the metadata database. The folder
is opened as a server opens it: what its journal holds is brought home first; nothing else changes.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from magnetar.cli.output import print_table
from magnetar.cli.stored_metadata import look_at_metadata
from magnetar.errors import CorruptData, CorruptEntry, StorageError
from magnetar.ledger.api import LedgerStore
from magnetar.runtime.disk import LocalDisk
from magnetar.runtime.limits import Limits
from magnetar.server.config import limits_from
from magnetar.server.embedded import open_storage

# A broken disk damages thousands of entries alike; JSON has them all.
_DAMAGE_SHOWN = 20


@dataclass(slots=True)
class Report:
    """The report on a data folder: what is in it, and what is damaged."""

    ledgers: int = 0
    entries: int = 0
    entry_bytes: int = 0
    records: int = 0
    index_entries: int = 0
    replayed: int = 0
    """Records that the journal still held."""
    damaged: list[str] = field(default_factory=list)
    index_mismatches: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.damaged and not self.index_mismatches


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def verify(context: click.Context, folder: Path, as_json: bool) -> None:
    """Read everything in the data folder FOLDER; exit 1 if anything is damaged."""
    # Asked first: opening storage on an empty folder would make a store of it.
    if not (folder / "FORMAT").exists():
        raise StorageError(f"{folder} holds no store", hint="name a data folder")
    console = Console(stderr=True)
    report = asyncio.run(verify_folder(folder, limits_from(os.environ), console))
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        _print(report, folder)
    if not report.is_sound:
        context.exit(1)


async def verify_folder(folder: Path, limits: Limits, console: Console) -> Report:
    report = Report()
    storage = await open_storage(folder, limits=limits)
    try:
        report.replayed = storage.recovered_records
        ledger_ids = [ledger_id async for ledger_id in storage.ledgers.list()]
        columns = (TextColumn("ledgers"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            for ledger_id in progress.track(ledger_ids):
                await _read_ledger(storage.ledgers, ledger_id, report)
    finally:
        await storage.close()
    # Behind the close: everything is in the database by then, and nobody else has it open.
    metadata = look_at_metadata(folder, LocalDisk())
    report.records = metadata.records
    report.index_entries = metadata.index_entries
    report.index_mismatches.extend(metadata.mismatches)
    return report


async def _read_ledger(ledgers: LedgerStore, ledger_id: int, report: Report) -> None:
    report.ledgers += 1
    try:
        info = await ledgers.info(ledger_id)
    # The whole ledger cannot be opened: noted, and the others are read.
    except CorruptData as error:
        report.damaged.append(str(error))
        return
    entry_id = 0
    while entry_id <= info.last_entry:
        try:
            entries = await ledgers.read(ledger_id, entry_id, info.last_entry)
        # One entry: those behind it can still be read, so the walk goes on with the next.
        except CorruptEntry as error:
            report.damaged.append(str(error))
            entry_id += 1
            continue
        # The ledger says that it has more than it gives.
        if not entries:
            report.damaged.append(f"ledger {ledger_id} ends before entry {entry_id}")
            return
        report.entries += len(entries)
        report.entry_bytes += sum(len(entry.payload) for entry in entries)
        entry_id += len(entries)


def _print(report: Report, folder: Path) -> None:
    print_table(("what", "count"), _rows(report), none="", title=f"Data folder {folder}")
    found = report.damaged + report.index_mismatches
    for text in found[:_DAMAGE_SHOWN]:
        click.echo(f"damaged: {text}")
    if len(found) > _DAMAGE_SHOWN:
        click.echo(f"... and {len(found) - _DAMAGE_SHOWN} more")
    click.echo("verified: everything can be read" if report.is_sound else "not sound: see above")


def _rows(report: Report) -> Iterable[tuple[str, int]]:
    yield "ledgers", report.ledgers
    yield "entries", report.entries
    yield "bytes in entries", report.entry_bytes
    yield "metadata records", report.records
    yield "index entries", report.index_entries
    yield "replayed from the journal", report.replayed
    yield "damaged", len(report.damaged)
    yield "index mismatches", len(report.index_mismatches)
