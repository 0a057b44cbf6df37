"""Ledger conformance items 21-28: restarts, crashes, large ledgers, closing, random steps, runs."""

from __future__ import annotations

import asyncio
import random

from magnetar.errors import InvalidArgument, LedgerClosed, LedgerMissing, StorageClosed
from magnetar.ledger.api import NO_ENTRY, LedgerInfo, LedgerState, LedgerStore, LedgerWriter
from magnetar.testing.kits.ledger_base import (
    LedgerKitBase,
    LedgerWorld,
    acknowledged,
    ids_of,
    item,
    outcomes,
    read_all,
    refuses,
    written,
)

LARGE_ENTRIES = 3000
CRASHES = 4
RUN = 7
# Every way in which a ledger can end, the orders of fence and close included.
ENDS = ("open", "fenced", "closed", "fenced-closed", "closed-fenced", "deleted")
RANDOM_SEED = 26
# Enough for each of the rarer steps to come about twenty times.
RANDOM_STEPS = 600


class DurabilityItems(LedgerKitBase):
    """Items about durability: what is there later, and with how much memory."""

    @item
    async def test_21_states_survive_a_restart(self, world: LedgerWorld) -> None:
        payloads = [b"%d" % n for n in range(100)]
        infos: dict[int, LedgerInfo] = {}
        gone: list[int] = []
        # From the journal alone, from files at rest, and after a proper end: three ways to recover.
        for at_rest, again in ((False, world.crash), (True, world.crash), (False, world.restart)):
            store = await world.connect()
            ids = [(await written(store, payloads)).ledger_id for _ in ENDS]
            ids.append((await store.create()).ledger_id)
            if at_rest:
                await world.settle()
            for ledger_id, end in zip(ids, [*ENDS, "open"], strict=True):
                await _end(store, ledger_id, end)
                if end == "deleted":
                    gone.append(ledger_id)
                else:
                    infos[ledger_id] = await store.info(ledger_id)
            await again()
            await _is_as_it_was(await world.connect(), infos, gone, payloads)

    @item
    async def test_22_an_open_ledger_of_a_former_process(self, world: LedgerWorld) -> None:
        for end in (world.restart, world.crash):
            store = await world.connect()
            writer = await written(store, [b"a", b"b"])
            await end()
            store = await world.connect()
            # A dead writer closes nothing: the ledger is open until somebody fences it.
            assert (await store.info(writer.ledger_id)).state is LedgerState.OPEN
            # The fence fixes the end, and that is durable: the next start must find the same one.
            info = await store.fence(writer.ledger_id)
            assert (info.state, info.last_entry, info.size_bytes) == (LedgerState.FENCED, 1, 2)
            assert await read_all(store, writer.ledger_id) == [b"a", b"b"]
            await end()
            store = await world.connect()
            assert await store.info(writer.ledger_id) == info
            assert (await store.close_ledger(writer.ledger_id)).state is LedgerState.CLOSED

    @item
    async def test_23_a_crash_keeps_what_was_acknowledged(self, world: LedgerWorld) -> None:
        for crash in range(CRASHES):
            store = await world.connect()
            writers = [await store.create() for _ in range(5)]
            appends = {writer: [writer.append(b"%d" % n) for n in range(200)] for writer in writers}
            # Another moment in each round: before the first write, then later and later.
            for _ in range(3 * crash):
                await asyncio.sleep(0)
            told = {
                writer: sum(append.done() and not append.exception() for append in each)
                for writer, each in appends.items()
            }
            await world.crash()
            for each in appends.values():
                await outcomes(each)
            store = await world.connect()
            for writer, count in told.items():
                info = await store.fence(writer.ledger_id)
                # More may be there than was acknowledged: durable, and
                # the answer was lost with the process.
                assert info.last_entry + 1 >= count, "an acknowledged entry is lost"
                found = await read_all(store, writer.ledger_id)
                assert found == [b"%d" % n for n in range(info.last_entry + 1)]

    @item
    async def test_24_a_large_ledger_needs_little_memory(self, world: LedgerWorld) -> None:
        store = await world.connect()
        writer = await store.create()
        for start in range(0, LARGE_ENTRIES, 500):
            payloads = [_payload(n) for n in range(start, start + 500)]
            await acknowledged(*[writer.append(payload) for payload in payloads])
        await world.settle()
        # Pages of some dozen entries, of some hundred, and all at once.
        for bytes_max in (5_000, 50_000, 10_000_000):
            seen = 0
            while seen < LARGE_ENTRIES:
                found = await store.read(writer.ledger_id, seen, 2**62, bytes_max=bytes_max)
                assert found
                for entry in found:
                    assert entry.payload == _payload(entry.position.entry_id)
                seen += len(found)
                cache = world.cache()
                assert cache is None or cache[0] <= cache[1], "the cache is above its limit"

    @item
    async def test_25_use_after_close(self, world: LedgerWorld) -> None:
        store = await world.connect()
        writer = await written(store, [b"a"])
        settled = await written(store, [b"b"])
        await world.settle()
        # Submitted and not awaited: `close` has to finish it or fail it, not forget it.
        queued = writer.append(b"queued")
        await world.restart()
        assert queued.done(), "closing finishes queued work"
        for closed in (writer, settled):
            with refuses(LedgerClosed, StorageClosed):
                await closed.append(b"late")
        # Every call of a closed store is refused at once; hanging would be as bad as doing it.
        async with asyncio.timeout(5):
            with refuses(StorageClosed):
                await store.create()
            with refuses(StorageClosed):
                await store.read(settled.ledger_id, 0, 0)
            with refuses(StorageClosed):
                await store.info(settled.ledger_id + 1_000_000)
            with refuses(StorageClosed):
                await store.fence(settled.ledger_id)
            with refuses(StorageClosed):
                await store.delete(settled.ledger_id)
            with refuses(StorageClosed):
                await ids_of(store)
        again = await world.connect()
        # What its future said decides: acknowledged means there, failed means not there.
        expected = [b"a", b"queued"] if queued.exception() is None else [b"a"]
        assert await read_all(again, writer.ledger_id) == expected

    @item
    async def test_26_random_operations(self, world: LedgerWorld) -> None:
        """Against a dictionary; the seed is fixed, so a failure repeats."""
        choose = random.Random(RANDOM_SEED)
        run = _RandomRun(world, choose)
        await run.reopen()
        for step in range(RANDOM_STEPS):
            try:
                await run.step()
            except BaseException as error:
                error.add_note(f"step {step} of seed {RANDOM_SEED}")
                raise
        await run.check_all()

    @item
    async def test_27_a_run_is_entries_that_follow_one_another(self, world: LedgerWorld) -> None:
        store = await world.connect()
        writer = await store.create()
        payloads = [b"", b"a", b"bc", b"def"]
        size = sum(map(len, payloads))
        before = writer.append(b"before")
        first = writer.append_run(payloads, size)
        second = writer.append_run(payloads[1:], size)
        after = writer.append(b"after")
        positions = await acknowledged(before, first, second, after)
        assert [each.entry_id for each in positions] == [0, 1, 5, 8]
        assert writer.last_durable == 8
        expected = [b"before", *payloads, *payloads[1:], b"after"]
        assert await read_all(store, writer.ledger_id) == expected
        # A run that is larger than a store takes as a whole leaves nothing behind.
        large = [bytes(writer.run_bytes_max // 2 + 1)] * 2
        if len(large[0]) <= world.entry_bytes_max:
            with refuses(InvalidArgument):
                writer.append_run(large, 2 * len(large[0]))
        await world.settle()
        assert await read_all(store, writer.ledger_id) == expected
        info = await writer.close()
        assert (info.last_entry, info.size_bytes) == (8, 2 * size + 11)
        with refuses(LedgerClosed):
            writer.append_run(payloads, size)

    @item
    async def test_28_a_crash_keeps_whole_runs(self, world: LedgerWorld) -> None:
        for crash in range(CRASHES):
            store = await world.connect()
            writer = await store.create()
            runs = [[b"%d-%d" % (number, n) for n in range(RUN)] for number in range(20)]
            appends = [writer.append_run(each, sum(map(len, each))) for each in runs]
            for _ in range(3 * crash):
                await asyncio.sleep(0)
            done = sum(each.done() and not each.exception() for each in appends)
            await world.crash()
            await outcomes(appends)
            store = await world.connect()
            await store.fence(writer.ledger_id)
            found = await read_all(store, writer.ledger_id)
            assert len(found) % RUN == 0, "a part of a run"
            assert len(found) >= done * RUN
            assert found == [payload for each in runs for payload in each][: len(found)]


class _RandomRun:
    """A store and what it must hold: payloads and state of each ledger."""

    def __init__(self, world: LedgerWorld, choose: random.Random) -> None:
        self.world = world
        self.choose = choose
        self.store: LedgerStore
        self.model: dict[int, tuple[LedgerState, list[bytes]]] = {}
        self.writers: dict[int, LedgerWriter] = {}

    async def reopen(self) -> None:
        self.store = await self.world.connect()
        self.writers.clear()

    async def step(self) -> None:
        # Weights: mostly writes and reads, sometimes an end, seldom a delete or a death.
        choices = [self.write] * 12 + [self.check] * 6 + [self.begin] * 3
        choices += [self.end] * 3 + [self.world.settle] * 2 + [self.delete, self.die]
        await self.choose.choice(choices)()

    async def begin(self) -> None:
        writer = await self.store.create()
        self.writers[writer.ledger_id] = writer
        self.model[writer.ledger_id] = (LedgerState.OPEN, [])

    async def write(self) -> None:
        if not self.writers:
            return await self.begin()
        writer = self.choose.choice([*self.writers.values()])
        payloads = [self.choose.randbytes(self.choose.randrange(60)) for _ in range(10)]
        await acknowledged(*[writer.append(payload) for payload in payloads])
        self.model[writer.ledger_id][1].extend(payloads)

    async def end(self) -> None:
        if self.model:
            ledger_id = self.choose.choice([*self.model])
            state, payloads = self.model[ledger_id]
            fence = self.choose.random() < 0.5
            how = self.store.fence if fence else self.store.close_ledger
            info = await how(ledger_id)
            # Closed is final: fencing a closed ledger leaves it closed (item 13).
            fenced = fence and state is not LedgerState.CLOSED
            after = LedgerState.FENCED if fenced else LedgerState.CLOSED
            assert (info.state, info.last_entry) == (after, len(payloads) - 1)
            self.model[ledger_id] = (after, payloads)
            self.writers.pop(ledger_id, None)

    async def delete(self) -> None:
        if self.model:
            ledger_id = self.choose.choice([*self.model])
            await self.store.delete(ledger_id)
            del self.model[ledger_id]
            self.writers.pop(ledger_id, None)

    async def die(self) -> None:
        await self.choose.choice([self.world.restart, self.world.crash])()
        await self.reopen()
        await self.check_all()

    async def check(self) -> None:
        if self.model:
            ledger_id = self.choose.choice([*self.model])
            state, payloads = self.model[ledger_id]
            info = await self.store.info(ledger_id)
            size = sum(map(len, payloads))
            assert info == LedgerInfo(ledger_id, state, len(payloads) - 1, size)
            assert await read_all(self.store, ledger_id, bytes_max=200) == payloads

    async def check_all(self) -> None:
        assert await ids_of(self.store) == sorted(self.model)
        for ledger_id, (state, payloads) in self.model.items():
            info = await self.store.info(ledger_id)
            assert (info.state, info.last_entry) == (state, len(payloads) - 1)
            assert await read_all(self.store, ledger_id) == payloads


async def _is_as_it_was(
    store: LedgerStore, infos: dict[int, LedgerInfo], gone: list[int], payloads: list[bytes]
) -> None:
    assert await ids_of(store) == sorted(infos)
    for ledger_id, info in infos.items():
        assert await store.info(ledger_id) == info
        expected = payloads if info.last_entry != NO_ENTRY else []
        assert await read_all(store, ledger_id) == expected
    for ledger_id in gone:
        with refuses(LedgerMissing):
            await store.info(ledger_id)
    # A deleted ledger's id must not return either: positions would name other entries.
    newest = await store.create()
    assert newest.ledger_id > max(*infos, *gone), "an id came back"
    await store.delete(newest.ledger_id)


async def _end(store: LedgerStore, ledger_id: int, kind: str) -> None:
    # "open" stands for doing nothing.
    for word in kind.split("-"):
        if word == "fenced":
            await store.fence(ledger_id)
        elif word == "closed":
            await store.close_ledger(ledger_id)
        elif word == "deleted":
            await store.delete(ledger_id)


def _payload(number: int) -> bytes:
    return b"%d" % number + bytes(number % 300)
