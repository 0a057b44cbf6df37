"""The process that `magnetar demo` writes with, and kills.

    python -m magnetar.cli.demo.writer FOLDER RUN SECONDS

Owns: the demonstration's writers and the lines they report on stdout, one unbuffered write each:
`ready`, `submitted <what> <last>`, `acknowledged <what> <last>`, `closed`. `<what>` is
`ledger-<id>` or `records-<run>-<writer>`; everything up to `<last>` is meant. What is written
derives from its place, so that the reader needs nothing else to check it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from magnetar.ledger.api import LedgerWriter
from magnetar.metadata.api import Index, MetadataStore
from magnetar.server.config import limits_from
from magnetar.server.embedded import Storage, open_storage

WRITERS = 4
INDEX = "demo-by-writer"
# Appends without an await between them: what a publisher in a hurry does.
_PIPELINED = 64
_STDOUT = 1
_FILLER = bytes(range(256)) * 4


def entry_payload(ledger_id: int, entry_id: int) -> bytes:
    """A kilobyte that says where it belongs."""
    return f"{ledger_id}:{entry_id}:".encode() + _FILLER[: 900 + entry_id % 100]


def record_folder(stream: str) -> str:
    return f"/demo/{stream}"


def record_value(stream: str, number: int) -> bytes:
    return f"{stream} {number}".encode()


def _report(line: str) -> None:
    # Not `print`: a buffer would die with the process, and what was acknowledged with it.
    os.write(_STDOUT, f"{line}\n".encode())


async def _write(storage: Storage, store: MetadataStore, stream: str, deadline: float) -> None:
    """Append in pipelined groups, and keep the progress of each in a metadata record."""
    writer = await storage.ledgers.create()
    _report(f"acknowledged ledger-{writer.ledger_id} -1")
    group = 0
    while time.monotonic() < deadline:
        last = (group + 1) * _PIPELINED - 1
        # Told before it is done: the reader must know of everything that could be found.
        _report(f"submitted ledger-{writer.ledger_id} {last}")
        await _append_group(writer, group * _PIPELINED, last)
        _report(f"acknowledged ledger-{writer.ledger_id} {last}")
        _report(f"submitted {stream} {group}")
        key = f"{record_folder(stream)}/{group:08d}"
        entries = [Index(INDEX, stream)]
        await store.put(key, record_value(stream, group), indexes=entries)
        _report(f"acknowledged {stream} {group}")
        group += 1
    await writer.close()


async def _append_group(writer: LedgerWriter, first: int, last: int) -> None:
    ledger_id = writer.ledger_id
    appends = [
        writer.append(entry_payload(ledger_id, entry_id)) for entry_id in range(first, last + 1)
    ]
    for append in appends:
        await append


async def _run(folder: Path, run: str, seconds: float) -> None:
    storage = await open_storage(folder, limits=limits_from(os.environ))
    try:
        _report("ready")
        deadline = time.monotonic() + seconds
        async with storage.connect() as store, asyncio.TaskGroup() as group:
            for number in range(WRITERS):
                stream = f"records-{run}-{number}"
                group.create_task(_write(storage, store, stream, deadline))
    finally:
        await storage.close()
    _report("closed")


def main(arguments: Sequence[str]) -> None:
    folder, run, seconds = arguments
    asyncio.run(_run(Path(folder), run, float(seconds)))


if __name__ == "__main__":
    main(sys.argv[1:])
