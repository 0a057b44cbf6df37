"""Acknowledgements in transactions with and without a task: both do the same.

Where pins and entries share a journal most of them are written and answered by callbacks; elsewhere
a task asks who owns the subscription, and how the transaction stands. The same steps are played on
both kinds of broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.subscribe.ack import Ack
from magnetar.errors import MagnetarError, ServiceNotReady, TransactionConflict
from magnetar.model.subscriptions import SubscriptionType
from magnetar.txn.ids import metadata_id
from magnetar.wire.messages import TxnId
from tests.unit.broker.subscription_world import EXCLUSIVE, SHARED
from tests.unit.broker.txn_ack_world import Stage, ack, play
from tests.unit.broker.txn_world import T1, cut, heal, quiet

MESSAGES = 5
TXNS = [metadata_id(0, number) for number in range(1, 4)]

STEPS = st.one_of(
    st.tuples(
        st.just("ack"),
        st.integers(0, 2),
        st.lists(st.integers(0, MESSAGES - 1), min_size=1, max_size=3, unique=True),
        st.sampled_from([0, 0, 0, 1]),
    ),
    st.tuples(st.just("through"), st.integers(0, 2), st.integers(0, MESSAGES - 1)),
    st.tuples(st.sampled_from(["commit", "abort"]), st.integers(0, 2)),
    st.tuples(st.sampled_from(["plain", "nack"]), st.integers(0, MESSAGES - 1)),
    st.tuples(st.sampled_from(["wait", "cut", "heal"])),
)


class Steps:
    """The steps of one run, and what became of each."""

    def __init__(self, stage: Stage, type_: SubscriptionType) -> None:
        self.stage = stage
        self.client = stage.client(type_)
        self.found: list[object] = []
        self._asked: list[asyncio.Task[None]] = []
        self._open = set(range(len(TXNS)))
        self._is_cut = False

    async def play(self, steps: Sequence[tuple[Any, ...]]) -> list[object]:
        await self.stage.begin(*TXNS)
        await quiet()
        self.client.take()
        for kind, *arguments in steps:
            await getattr(self, f"_{kind}")(*arguments)
        await self._heal()
        await self._wait()
        for txn in range(len(TXNS)):
            await self._abort(txn)
        await quiet(3)
        self.found += [self.stage.subscription.backlog(), await self.stage.ops()]
        self.found.append(sorted(self.client.bodies()))
        return self.found

    def _ask(self, txn: int, bodies: Sequence[int], **options: Any) -> None:
        asked = ack(self.client, TXNS[txn], *map(str, bodies), **options)
        self._asked.append(asyncio.create_task(asked))

    async def _ack(self, txn: int, bodies: Sequence[int], unacked: int) -> None:
        self._ask(txn, bodies, unacked=unacked)

    async def _through(self, txn: int, body: int) -> None:
        self._ask(txn, [body], cumulative=True)

    async def _wait(self) -> None:
        results = await asyncio.gather(*self._asked, return_exceptions=True)
        self._asked.clear()
        self.found.append([type(each) for each in results])
        await quiet()
        self.found += [self.stage.subscription.backlog(), self.client.bodies()]

    async def _commit(self, txn: int) -> None:
        await self._end(txn, self.stage.broker.commit)

    async def _abort(self, txn: int) -> None:
        await self._end(txn, self.stage.broker.abort)

    async def _end(self, txn: int, end: Callable[[TxnId], Awaitable[None]]) -> None:
        if not self._is_cut and txn in self._open:
            # One that is on its way may or may not be a part of it.
            await self._wait()
            self._open.discard(txn)
            await end(TXNS[txn])

    async def _plain(self, body: int) -> None:
        self.client.ack(str(body))

    async def _nack(self, body: int) -> None:
        self.client.nack(str(body))

    async def _cut(self) -> None:
        if not self._is_cut:
            await self._wait()
            self._is_cut = True
            cut(self.stage.broker)

    async def _heal(self) -> None:
        if self._is_cut:
            await self._wait()
            self._is_cut = False
            heal(self.stage.broker)
            await quiet(3)


def played(
    steps: Sequence[tuple[Any, ...]], type_: SubscriptionType, *, shares_journal: bool
) -> list[object]:
    found: list[object] = []

    async def scenario(stage: Stage) -> None:
        found.extend(await Steps(stage, type_).play(steps))

    play(scenario, messages=MESSAGES, shares_journal=shares_journal)
    return found


@given(st.lists(STEPS, max_size=14), st.sampled_from([EXCLUSIVE, SHARED]))
def test_both_ways_do_the_same(steps: list[tuple[Any, ...]], type_: SubscriptionType) -> None:
    by_task = played(steps, type_, shares_journal=False)
    assert played(steps, type_, shares_journal=True) == by_task


def test_an_ack_needs_no_task_where_nobody_is_asked() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        before = asyncio.all_tasks()
        client.take()
        stage.world.slow = 0.1
        acks = [Ack(client.position_of("0"))]
        work = stage.subscription.ack_in_txn(client.consumer, T1, acks)
        new = {each.get_name() for each in asyncio.all_tasks() - before}
        assert not isinstance(work, asyncio.Task)
        assert not any("ack" in each for each in new)
        await work
        stage.world.slow = 0.0
        assert await stage.ops() == 1, "it is durable"

    play(scenario, shares_journal=True)


@pytest.mark.parametrize("decides", [True, False])
def test_what_another_broker_decides_is_asked_for(decides: bool) -> None:
    """A sole owner of the subscription knows nothing of a transaction that others decide."""

    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        # Decided elsewhere: the store knows it, this broker does not.
        await stage.broker.store.end(T1, "COMMITTED", 0)
        if decides:
            await ack(client, T1, "0")  # in a broker that decides this cannot happen
        else:
            with pytest.raises(TransactionConflict, match="is COMMITTED"):
                await ack(client, T1, "0")

    play(scenario, shares_journal=True, coordinates=decides)


def test_a_seek_during_the_write_refuses_and_removes_the_record() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        first = client.position_of("0")
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "0"))
        await asyncio.sleep(0)
        seek = asyncio.create_task(stage.subscription.seek(first))
        with pytest.raises(ServiceNotReady):
            await answer
        await seek
        stage.world.slow = 0.0
        await quiet(1)
        assert await stage.ops() == 0
        await stage.broker.commit(T1)
        assert stage.subscription.backlog() == MESSAGES

    play(scenario, shares_journal=True)


def test_an_unknown_outcome_is_settled_by_a_task() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "0"))
        await asyncio.sleep(0.15)
        cut(stage.broker, in_flight_arrives=True)
        await asyncio.sleep(0)
        stage.world.slow = 0.0
        heal(stage.broker)
        result = (await asyncio.gather(answer, return_exceptions=True))[0]
        await quiet(3)
        if isinstance(result, MagnetarError):
            await ack(client, T1, "0")
        await stage.broker.commit(T1)
        await quiet(3)
        assert stage.subscription.backlog() == MESSAGES - 1
        assert await stage.ops() == 0

    play(scenario, shares_journal=True)
