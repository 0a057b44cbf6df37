"""The ledger conformance kit on the memory backend, on virtual time; and the documented example."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from magnetar.ledger.api import LedgerStore
from magnetar.ledger.memory import MemoryLedgers, MemoryLedgerStore
from magnetar.testing.kits.ledger import LedgerKit, LedgerWorld
from magnetar.testing.virtual.virtual_time import VirtualTimeLoop

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "ledger-kit.md"


class MemoryWorld(LedgerWorld):
    """A server without delays."""

    def __init__(self) -> None:
        super().__init__()
        self.server = MemoryLedgers()

    async def open_store(self) -> LedgerStore:
        return self.server.connect()

    async def crash(self) -> None:
        stores, self._stores = self._stores, []
        for store in stores:
            assert isinstance(store, MemoryLedgerStore)
            self.server.drop(store)


class SlowWorld(MemoryWorld):
    """A server whose commits take random times, so that clients interleave."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._commits = 0
        self.server = MemoryLedgers(delay=self._delay)

    async def _delay(self) -> None:
        self._commits += 1
        await asyncio.sleep(self._random.random() * 0.004)

    def batches(self) -> int:
        return self._commits


class TestMemoryLedgers(LedgerKit):
    def make_world(self, folder: Path) -> LedgerWorld:
        return MemoryWorld()

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualTimeLoop()


class TestSlowMemoryLedgers(TestMemoryLedgers):
    """The same with delays: order and fencing do not depend on luck."""

    def make_world(self, folder: Path) -> LedgerWorld:
        return SlowWorld(seed=1)


@pytest.mark.slow
def test_the_documented_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    (tmp_path / "test_example.py").write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "29 passed" in done.stdout
