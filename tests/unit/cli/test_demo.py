"""The demonstration's own arithmetic: it must see a loss, or its verdict would say nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from magnetar.cli.demo import Reported, Result, compare
from magnetar.cli.demo_writer import entry_payload, record_folder, record_value
from magnetar.metadata.api import Index
from magnetar.server.embedded import open_storage

STREAM = "records-0-0"


def test_what_is_there_is_compared_with_what_was_reported(tmp_path: Path) -> None:
    ledger_id = asyncio.run(_write(tmp_path, entries=3, records=2))
    sound = _compare(tmp_path, f"ledger-{ledger_id}", acknowledged=2, submitted=2)
    assert sound.is_sound
    assert sound.not_acknowledged == 0
    assert not _compare(tmp_path, f"ledger-{ledger_id}", acknowledged=3, submitted=3).is_sound
    assert _compare(tmp_path, f"ledger-{ledger_id}", acknowledged=5, submitted=5).lost == 3
    unheard = _compare(tmp_path, f"ledger-{ledger_id}", acknowledged=0, submitted=2)
    assert (unheard.is_sound, unheard.not_acknowledged) == (True, 2)
    assert _compare(tmp_path, f"ledger-{ledger_id}", acknowledged=0, submitted=1).unexplained == 1


def test_a_missing_ledger_is_a_loss(tmp_path: Path) -> None:
    asyncio.run(_write(tmp_path, entries=0, records=2))
    assert _compare(tmp_path, "ledger-77", acknowledged=9, submitted=9).lost == 11


def _compare(folder: Path, ledger: str, *, acknowledged: int, submitted: int) -> Result:
    reported = Reported()
    for line in (
        "ready",
        f"submitted {ledger} {submitted}",
        f"acknowledged {ledger} {acknowledged}",
        f"submitted {STREAM} 1",
        f"acknowledged {STREAM} 1",
    ):
        reported.take(line)
    result = Result("orderly")
    asyncio.run(compare(folder, reported, result))
    return result


async def _write(folder: Path, *, entries: int, records: int) -> int:
    storage = await open_storage(folder)
    ledger_id = 0
    if entries:
        writer = await storage.ledgers.create()
        ledger_id = writer.ledger_id
        for entry_id in range(entries):
            await writer.append(entry_payload(ledger_id, entry_id))
    async with storage.connect() as store:
        for number in range(records):
            key = f"{record_folder(STREAM)}/{number:08d}"
            indexes = [Index("demo-by-writer", STREAM)]
            await store.put(key, record_value(STREAM, number), indexes=indexes)
    await storage.close()
    return ledger_id
