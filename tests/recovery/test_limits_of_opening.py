"""A large store opens fast and in little memory: nothing is read that is not asked for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from magnetar.ledger.api import LedgerState
from magnetar.ledger.file_format import LedgerHeader, encode_entry, encode_index
from magnetar.metadata.api import Index
from magnetar.server.embedded import open_storage

RECORDS = 1_000_000
LEDGERS = 10_000
BATCH = 20_000
SECONDS_MAX = 1.0
MEGABYTES_MAX = 200

OPEN = """
    import asyncio, json, sys, time
    from pathlib import Path
    from magnetar.server.embedded import open_storage

    async def main(folder):
        started = time.monotonic()
        storage = await open_storage(folder)
        seconds = time.monotonic() - started
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
        async with storage.connect() as store:
            record = await store.get("/many/0/123456")
        ledgers = [each async for each in storage.ledgers.list()]
        (entry,) = await storage.ledgers.read(ledgers[-1], 0, 0)
        print(json.dumps([seconds, peak, record.value.decode(), len(ledgers), len(entry.payload)]))
        await storage.close()

    asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_limits_of_opening(tmp_path: Path) -> None:
    asyncio.run(_add_records(tmp_path))
    _add_ledgers(tmp_path)
    best = None
    for _ in range(3):  # another process may be in the way; memory must fit each time
        command = [sys.executable, "-c", textwrap.dedent(OPEN), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        seconds, megabytes, value, ledgers, size = json.loads(done.stdout)
        assert (value, ledgers, size) == ("value 123456", LEDGERS, 100)
        assert megabytes < MEGABYTES_MAX
        best = min(best or seconds, seconds)
    assert best is not None
    assert best < SECONDS_MAX


async def _add_records(folder: Path) -> None:
    storage = await open_storage(folder)
    async with storage.connect() as store:
        for first in range(0, RECORDS, BATCH):
            puts = [
                store.put(
                    f"/many/{number % 8}/{number}",
                    f"value {number}".encode(),
                    indexes=[Index("half", f"{number % 1000}")] if number % 2 else (),
                )
                for number in range(first, first + BATCH)
            ]
            for put in puts:
                await put
            await storage.settle()
    await storage.close()


def _add_ledgers(folder: Path) -> None:
    """Closed ledgers with one entry each, written as a move leaves them."""
    for number in range(LEDGERS):
        ledger_id = 1 + number
        place = folder / "ledgers" / f"{ledger_id % 256:02x}"
        place.mkdir(parents=True, exist_ok=True)
        header = LedgerHeader(ledger_id, LedgerState.CLOSED, 0, last_entry=0, size_bytes=100)
        record = encode_entry(ledger_id, 0, b"x" * 100)
        (place / f"{ledger_id}.ledger").write_bytes(header.encode() + record)
        (place / f"{ledger_id}.index").write_bytes(encode_index(1024, [record]))
