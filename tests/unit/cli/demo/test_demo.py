"""The demonstration's own arithmetic: it must see a loss, or its verdict would say nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from magnetar.cli.demo import server
from magnetar.cli.demo.demo import Reported, Result, compare
from magnetar.cli.demo.server import (
    ROUND_TRIP_MESSAGES,
    Published,
    ServerResult,
    compare_messages,
    number_of,
    serve_and_kill,
    text_of,
)
from magnetar.cli.demo.writer import entry_payload, record_folder, record_value
from magnetar.metadata.api import Index
from magnetar.server.embedded import open_storage

STREAM = "records-0-0"


@pytest.mark.slow
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


def test_messages_that_were_read_are_compared_with_receipts() -> None:
    def compared(*texts: str) -> ServerResult:
        result = ServerResult("nobody", round_trip=ROUND_TRIP_MESSAGES)
        compare_messages(Published(sent=4, receipted={0, 1, 2}), list(texts), result)
        return result

    first, second, third, fourth = map(text_of, range(4))
    assert compared(first, second, third).is_sound
    unheard = compared(first, second, third, fourth)
    assert (unheard.is_sound, unheard.not_acknowledged) == (True, 1)
    assert (compared(first, third).is_sound, compared(first, third).lost) == (False, 1)
    assert compared(first, second, third, third).doubled == 1
    assert compared(first, second, third, text_of(4)).unexplained == 1
    assert compared(first, second, third, "anything").unexplained == 1
    assert number_of(text_of(7)) == 7
    assert number_of("7 and more") is None


@pytest.mark.slow
def test_without_the_official_client_our_own_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    told: list[str] = []
    result = serve_and_kill(tmp_path / "server", 0.2, told.append)
    assert result.is_sound, result
    assert result.client == "our own client"
    assert "is not installed" in told[0]


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
