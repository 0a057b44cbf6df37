"""The metadata conformance kit on the memory backend, on virtual time."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.limits import PATIENCE_S
from magnetar.errors import MetadataError, OutcomeUnknown, SessionLost, StoreClosed, Unavailable
from magnetar.metadata.api import EventKind, MetadataStore, SessionEvent
from magnetar.metadata.memory import MemoryMetadata, MemoryStore
from magnetar.runtime.clock import LoopClock
from magnetar.testing.kits.metadata import (
    NO_CHANGE_LOG,
    NO_DISK,
    MetadataKit,
    MetadataWorld,
)
from magnetar.testing.virtual.virtual_time import VirtualTimeLoop, run

EPOCH_MS = 1_700_000_000_000
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metadata-kit.md"


class MemoryWorld(MetadataWorld):
    """A server without delays."""

    def __init__(self) -> None:
        super().__init__()
        self.server = MemoryMetadata(LoopClock(EPOCH_MS), watch_limit=self.watch_limit)

    async def open_store(self) -> MetadataStore:
        return self.server.connect(self.session_timeout_s)

    async def cut(self, store: MetadataStore) -> None:
        assert isinstance(store, MemoryStore)
        self.server.cut(store)

    async def heal(self, store: MetadataStore) -> None:
        assert isinstance(store, MemoryStore)
        self.server.heal(store)


class SlowWorld(MemoryWorld):
    """A server whose messages take random times, so that clients interleave."""

    watch_limit = 200

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._ways = 0
        self.server = MemoryMetadata(
            LoopClock(EPOCH_MS), delay=self._delay, watch_limit=self.watch_limit
        )

    async def _delay(self) -> None:
        self._ways += 1
        await asyncio.sleep(self._random.random() * 0.004)

    async def cut(self, store: MetadataStore) -> None:
        assert isinstance(store, MemoryStore)
        self.server.cut(store, in_flight_arrives=self._random.random() < 0.5)

    def batches(self) -> int:
        return self._ways


class TestMemoryMetadata(MetadataKit):
    NOT_APPLICABLE = NO_DISK | NO_CHANGE_LOG
    faults = True

    def make_world(self, folder: Path) -> MetadataWorld:
        return MemoryWorld()

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualTimeLoop()


@pytest.mark.slow
class TestSlowMemoryMetadata(TestMemoryMetadata):
    """The same with delays: order and visibility do not depend on luck."""

    machine_examples = 10

    def make_world(self, folder: Path) -> MetadataWorld:
        return SlowWorld(seed=1)


# --- the kit itself ---


@pytest.mark.slow
def test_the_documented_example_runs(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    file = tmp_path / "test_example.py"
    file.write_text(example, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"\b5\d passed", done.stdout), done.stdout


def test_a_forgotten_item_is_noticed() -> None:
    class Forgetful(TestMemoryMetadata):
        NOT_APPLICABLE = NO_DISK

    with pytest.raises(AssertionError, match=r"\[45\]"):
        Forgetful().test_00_every_item_is_accounted_for()


# --- what only this backend has: faults of the network, on purpose ---


def slow_server() -> MemoryMetadata:
    async def delay() -> None:
        await asyncio.sleep(1)

    return MemoryMetadata(LoopClock(EPOCH_MS), delay=delay)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_cut_leaves_writes_on_their_way_unknown(arrives: bool) -> None:
    async def main() -> None:
        server = slow_server()
        store, other = server.connect(), server.connect()
        sent = store.put("/sent", b"")
        await asyncio.sleep(0.5)
        queued = store.put("/queued", b"")
        server.cut(store, in_flight_arrives=arrives)
        with pytest.raises(OutcomeUnknown):
            await sent
        with pytest.raises(Unavailable):
            await queued
        with pytest.raises(Unavailable):
            await store.put("/later", b"")
        server.heal(store)
        await store.put("/healed", b"")
        found = await other.scan_keys("")
        assert found == ["/healed", *(["/sent"] if arrives else [])]

    run(main())


def test_a_write_applied_before_the_cut_is_unknown_too() -> None:
    async def main() -> None:
        server = slow_server()
        store, other = server.connect(), server.connect()
        sent = store.put("/sent", b"")
        await asyncio.sleep(1.5)
        server.cut(store)
        with pytest.raises(OutcomeUnknown):
            await sent
        assert await other.get("/sent") is not None

    run(main())


def test_a_write_is_readable_only_once_it_arrived() -> None:
    async def main() -> None:
        server = slow_server()
        store = server.connect()
        async with store.watch(key="/a") as watch:
            early = asyncio.ensure_future(store.get("/a"))
            await asyncio.sleep(0.5)
            put = store.put("/a", b"")
            event = await anext(watch)
            assert asyncio.get_running_loop().time() == pytest.approx(1.5)
            assert await early is None
            assert (await put).version == event.version

    run(main())


def test_cancelling_the_awaiter_does_not_undo_a_write() -> None:
    async def main() -> None:
        server = slow_server()
        store = server.connect()

        async def write() -> None:
            await store.put("/a", b"")

        task = asyncio.ensure_future(write())
        await asyncio.sleep(0.5)
        task.cancel()
        await store.put("/b", b"")
        assert await store.scan_keys("") == ["/a", "/b"]

    run(main())


def test_a_dropped_broker_keeps_its_session_until_the_timeout() -> None:
    async def main() -> None:
        server = slow_server()
        store, other = server.connect(30), server.connect(30)
        await store.put("/eph", b"", ephemeral=True)
        queued = store.put("/never", b"")
        server.drop(store)
        with pytest.raises(Unavailable):
            await queued
        with pytest.raises(StoreClosed):
            await store.get("/eph")
        await store.close()
        dropped_at = asyncio.get_running_loop().time()
        async with other.watch(key="/eph") as watch:
            assert (await anext(watch)).kind is EventKind.DELETED
        assert 20 < asyncio.get_running_loop().time() - dropped_at <= 30
        assert await other.get("/never") is None

    run(main())


def test_slow_heartbeats_lose_the_session_at_the_client_first() -> None:
    async def main() -> None:
        pause = 0.1

        async def delay() -> None:
            await asyncio.sleep(pause)

        server = MemoryMetadata(LoopClock(EPOCH_MS), delay=delay)
        store, other = server.connect(6), server.connect(1000)
        await store.put("/eph", b"", ephemeral=True)
        states = store.session_events()
        pause = 5  # the answer comes too late, though the server hears every heartbeat
        while await anext(states) is not SessionEvent.LOST:
            pass
        with pytest.raises(SessionLost):
            await store.put("/late", b"", ephemeral=True)
        pause = 0
        assert await anext(states) is SessionEvent.REESTABLISHED
        assert await other.get("/eph") is None

    run(main())


def test_queued_writes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        store = slow_server().connect()
        puts = [store.put(f"/{n}", b"") for n in range(12)]
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, Unavailable)]
        assert len(refused) == 2
        assert len(await store.scan_keys("")) == 10

    monkeypatch.setattr("magnetar.metadata.memory.WRITES_QUEUED_MAX", 10)
    run(main())


def history(seed: int) -> list[str]:
    """What several clients see of each other, with cuts, as text."""

    async def main() -> list[str]:
        world = SlowWorld(seed)
        choose = random.Random(seed)
        stores = [await world.connect() for _ in range(3)]
        seen: list[str] = []

        async def follow() -> None:
            async for event in stores[0].watch(parent="/h"):
                now = asyncio.get_running_loop().time()
                seen.append(f"{now:.9f} {event}")

        async def act(number: int) -> None:
            for step in range(40):
                key = f"/h/{choose.randrange(6)}"
                try:
                    stat = await stores[number].put(key, b"", ephemeral=choose.random() < 0.3)
                    seen.append(f"{number} {step} {stat}")
                except MetadataError as error:
                    seen.append(f"{number} {step} {error}")
                await asyncio.sleep(choose.random())
                if choose.random() < 0.1:
                    await world.cut(stores[number])
                    await asyncio.sleep(choose.random() * 8)
                    await world.heal(stores[number])

        following = asyncio.ensure_future(follow())
        await asyncio.gather(*(act(number) for number in range(3)))
        await world.close()
        await following
        return seen

    return run(main())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_equal_seeds_give_equal_histories(seed: int) -> None:
    first = history(seed)
    assert first == history(seed)
    assert len(first) > 100
