"""Acknowledgements in transactions in random order, with crashes, against single messages."""

from __future__ import annotations

import random
from typing import Final

import pytest

from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.topic import Topic
from magnetar.errors import TransactionConflict
from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType
from magnetar.txn.ids import metadata_id
from magnetar.wire.messages import Send, TxnId
from tests.unit.broker.subscription_world import EXCLUSIVE, FAILOVER, KEY_SHARED, SHARED, Client
from tests.unit.broker.txn_world import Broker, TxnWorld, in_txn_world, joined, quiet
from tests.unit.broker.world import entry, receipts

ENTRIES: Final = 6
SIZE: Final = 3
WHOLE: Final = (1 << SIZE) - 1
STEPS: Final = 40
FREE, DONE = "free", "done"

Message = tuple[int, int]
"""The number of its entry, and its number in it."""


class Play:
    """One run: a topic with batches, a client, and where every message must be."""

    def __init__(self, world: TxnWorld, rng: random.Random, type_: SubscriptionType) -> None:
        self.world = world
        self.rng = rng
        self.type = type_
        self.owner: dict[Message, object] = {
            (number, each): FREE for number in range(ENTRIES) for each in range(SIZE)
        }
        self.through: TxnId | None = None
        self.open: list[TxnId] = []
        self.begun = 0
        self.positions: list[Position] = []
        # Both ways of an acknowledgement, in turns.
        self.shares_journal = bool(rng.getrandbits(1))
        self.broker: Broker = world.broker(shares_journal=self.shares_journal)
        self.topic: Topic
        self.client: Client

    @property
    def subscription(self) -> Subscription:
        return self.topic.subscriptions["s"]

    async def set_up(self) -> None:
        self.topic = await self.broker.topic()
        await self.topic.create_subscription("s", Position(-1, -1))
        producer = await joined(self.topic)
        for number in range(ENTRIES):
            producer.send(Send(1, number, SIZE, entry(number, str(number), batch=SIZE)))
        self.positions = [each.position for each in await receipts(producer, ENTRIES)]
        self.client = Client(self.subscription, self.type)

    # --- steps

    async def step(self) -> None:
        kinds = [self.ack, self.ack, self.ack, self.ack_through, self.plain, self.end, self.end]
        kinds += [self.begin, self.rejoin, self.crash, self.redeliver]
        await self.rng.choice(kinds)()
        await quiet()
        self.check_backlog()

    async def begin(self) -> None:
        if len(self.open) < 3:
            self.begun += 1
            self.open.append(await self.broker.begin(metadata_id(0, self.begun)))

    async def ack(self) -> None:
        # One by one beneath its own cumulative one is the affair of another test.
        able = [each for each in self.open if each != self.through]
        if not able:
            return
        txn, number = self.rng.choice(able), self.rng.randrange(ENTRIES)
        bits = self.rng.choice([WHOLE, WHOLE, *range(1, WHOLE)])
        wanted = {(number, each) for each in range(SIZE) if bits >> each & 1}
        owners = {self.owner[each] for each in wanted}
        whole_entry_done = all(self.owner[number, each] == DONE for each in range(SIZE))
        clash = owners - {FREE, DONE} or whole_entry_done or (bits != WHOLE and DONE in owners)
        taken = await self._try(txn, [Ack(self.positions[number], WHOLE & ~bits)])
        assert taken is not bool(clash)
        if taken:
            self._hold(txn, wanted)

    async def ack_through(self) -> None:
        if not self.open or not self.type.takes_cumulative_acks or self.through is not None:
            return
        txn, number = self.rng.choice(self.open), self.rng.randrange(ENTRIES)
        wanted = {each for each in self.owner if each[0] <= number}
        owners = {self.owner[each] for each in wanted}
        clash = owners - {FREE, DONE, txn} or owners == {DONE}
        taken = await self._try(txn, [Ack(self.positions[number])], cumulative=True)
        assert taken is not bool(clash)
        if taken:
            self.through = txn
            self._hold(txn, wanted)

    async def _try(self, txn: TxnId, acks: list[Ack], *, cumulative: bool = False) -> bool:
        try:
            await self.subscription.ack_in_txn(
                self.client.consumer, txn, acks, cumulative=cumulative
            )
        except TransactionConflict:
            return False
        return True

    def _hold(self, txn: TxnId, wanted: set[Message]) -> None:
        for each in wanted:
            if self.owner[each] != DONE:
                self.owner[each] = txn

    async def plain(self) -> None:
        number, bits = self.rng.randrange(ENTRIES), self.rng.randrange(1, WHOLE + 1)
        self.subscription.ack(self.client.consumer, [Ack(self.positions[number], WHOLE & ~bits)])
        for each in range(SIZE):
            if bits >> each & 1 and self.owner[number, each] == FREE:
                self.owner[number, each] = DONE

    async def end(self, txn: TxnId | None = None) -> None:
        if not self.open:
            return
        txn = txn or self.rng.choice(self.open)
        self.open.remove(txn)
        commits = self.rng.random() < 0.5
        await self.broker.end(txn, "COMMITTED" if commits else "ABORTED")
        if self.through == txn:
            self.through = None
        for each, owner in self.owner.items():
            if owner == txn:
                self.owner[each] = DONE if commits else FREE

    async def redeliver(self) -> None:
        self.subscription.redeliver(self.client.consumer)

    async def rejoin(self) -> None:
        self.client.leave()
        self.client = Client(self.subscription, self.type)
        await quiet()
        self.check_delivered()

    async def crash(self) -> None:
        await self.subscription.ack_durable()  # plain ones are durable later, or when asked for
        self.broker.kill()
        self.broker = self.world.broker(shares_journal=self.shares_journal)
        self.topic = await self.broker.topic()
        self.client = Client(self.subscription, self.type)
        await quiet()
        self.check_delivered()

    # --- checks

    def check_delivered(self) -> None:
        """A first consumer gets what is free, and nothing else."""
        got: set[Message] = set()
        for each in self.client.take():
            bits = each.ack_set[0] if each.ack_set else WHOLE
            number = self.positions.index(each.position)
            got |= {(number, index) for index in range(SIZE) if bits >> index & 1}
        assert got == {each for each, owner in self.owner.items() if owner == FREE}

    def check_backlog(self) -> None:
        done = {
            number
            for number in range(ENTRIES)
            if all(self.owner[number, each] == DONE for each in range(SIZE))
        }
        assert self.subscription.backlog() == ENTRIES - len(done)
        state = self.subscription._membership.state
        if state is not None:
            state.check_invariants()

    async def finish(self) -> None:
        while self.open:
            await self.end(self.open[0])
        await self.crash()
        await quiet(2)
        assert await self.broker.keys() == []
        await self.topic.close()


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER, SHARED, KEY_SHARED])
@pytest.mark.parametrize("seed", range(10))
def test_nothing_aborted_sticks_and_nothing_committed_comes_back(
    seed: int, type_: SubscriptionType
) -> None:
    print(f"seed {seed}")  # noqa: T201  shown when it fails

    async def scene(world: TxnWorld) -> None:
        play = Play(world, random.Random(seed), type_)
        await play.set_up()
        for _ in range(STEPS):
            await play.step()
        await play.finish()

    in_txn_world(scene)
