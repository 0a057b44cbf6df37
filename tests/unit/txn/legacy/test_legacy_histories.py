"""Legacy coordinators under random clients, crashes, moving leaders and failing participants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar

import pytest

from magnetar.errors import (
    DeadlineExceeded,
    InvalidTxnStatus,
    MagnetarError,
    ServiceNotReady,
    TransactionNotFound,
)
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual.virtual_time import run
from magnetar.txn.legacy.coordinator import LegacyCoordinator
from magnetar.txn.legacy.coordinator_entries import Acknowledging
from magnetar.wire.messages import TxnId
from tests.unit.txn.coordinator_world import Broker, EndCall, Stage, World

TOPICS = [f"persistent://a/b/{number}" for number in range(4)]
PARTITIONS_USED = (0, 1)
CLIENTS = 6
TRANSACTIONS = 8
"""Of each client."""

Answer = TypeVar("Answer")


class Watcher(Stage):
    """Participants that check what each end tells them."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history

    async def _end(self, call: EndCall) -> None:
        await asyncio.sleep(self._history.chance.random() * 0.3)
        if self._history.chance.random() < 0.2:
            raise ServiceNotReady(f"{call.where} is moving")
        self._history.check_low(call)
        await super()._end(call)
        await asyncio.sleep(self._history.chance.random() * 0.3)


class History:
    """What clients were told, over all brokers."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.world = World(Limits(close_seconds=5, txn_end_wait_seconds=5))
        self.stage = self.world.participants = Watcher(self)
        self.brokers: list[Broker] = []
        self.places: dict[TxnId, set[str]] = {}
        """Where each transaction takes part, as answered."""
        self.ended: dict[TxnId, bool] = {}
        """Whether it was committed, as answered."""
        self.asked: dict[TxnId, bool] = {}
        self.faults: list[str] = []

    def check_low(self, call: EndCall) -> None:
        """What the low watermark has passed is carried out everywhere."""
        if call.low_watermark >= call.txn.least:
            self.faults.append(f"{call} is above its own transaction")
        for txn, places in self.places.items():
            is_passed = txn.most == call.txn.most and txn.least <= call.low_watermark
            if is_passed and not places <= self.stage.outcomes(txn).keys():
                self.faults.append(f"{call}, and {txn} is not over in {places}")

    # --- clients

    async def ask(self, partition: int, ask: Callable[[Broker], Awaitable[Answer]]) -> Answer:
        """Of whoever leads, again and again."""
        async with asyncio.timeout(300):
            while True:
                for broker in self.brokers:
                    if broker.partitions.leads(partition):
                        try:
                            async with asyncio.timeout(20):
                                return await ask(broker)
                        except (InvalidTxnStatus, TransactionNotFound):
                            raise
                        except (MagnetarError, TimeoutError):
                            break
                await asyncio.sleep(0.5)

    async def client(self, chance: Random) -> None:
        for _ in range(TRANSACTIONS):
            await self.transaction(chance)
            await asyncio.sleep(chance.random() * 4)

    async def transaction(self, chance: Random) -> None:
        partition = chance.choice(PARTITIONS_USED)
        timeout_ms = chance.choice((3000, 60_000, 120_000))
        txn = await self.ask(partition, lambda broker: broker.legacy.begin(partition, timeout_ms))
        assert txn not in self.places
        assert txn.least > self.lowest_allowed(partition)
        self.places[txn] = set()
        try:
            for topic in chance.sample(TOPICS, chance.randint(0, 3)):
                await self.add(txn, topic, chance)
                await asyncio.sleep(chance.random() * 2)
            draw = chance.random()
            if draw < 0.8:
                await self.end(txn, commit=draw < 0.5)
        except InvalidTxnStatus:
            assert timeout_ms == 3000, "nobody else ends it"

    def lowest_allowed(self, partition: int) -> int:
        """Topics refuse what is at or below what they were told."""
        told = [call.low_watermark for call in self.stage.ends if call.txn.most == partition]
        return max(told, default=0)

    async def add(self, txn: TxnId, topic: str, chance: Random) -> None:
        if chance.random() < 0.5:
            await self.ask(txn.most, lambda broker: broker.legacy.add_partitions(txn, [topic]))
            self.places[txn].add(topic)
        else:
            place = Acknowledging(topic, "s")
            await self.ask(txn.most, lambda broker: broker.legacy.add_subscriptions(txn, [place]))
            self.places[txn].add(f"{topic} s")

    async def end(self, txn: TxnId, *, commit: bool) -> None:
        self.asked[txn] = commit
        await self.ask(txn.most, lambda broker: broker.legacy.end(txn, commit=commit))
        self.ended[txn] = commit
        found = self.stage.outcomes(txn)
        assert self.places[txn] <= found.keys(), "the answer comes after all have ended it"

    # --- trouble

    async def trouble(self) -> None:
        for _ in range(5):
            await asyncio.sleep(self.chance.random() * 15)
            await self.one_trouble()

    async def one_trouble(self) -> None:
        broker = self.chance.choice(self.brokers)
        draw = self.chance.random()
        if draw < 0.4:
            self.brokers.remove(broker)
            await self.world.kill(broker)
            self.brokers.append(await self.world.broker())
        elif draw < 0.7:
            self.brokers.remove(broker)
            await broker.stop()
            self.brokers.append(await self.world.broker())
        else:
            for own in broker.legacy.here():
                own.log._failure = DeadlineExceeded("as if the disk had failed")

    # --- the whole

    async def play(self) -> None:
        self.brokers = [await self.world.broker() for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            group.create_task(self.trouble())
            for number in range(CLIENTS):
                group.create_task(self.client(Random(f"{self.chance.random()} {number}")))
        await asyncio.sleep(200)  # every deadline is over, and everyone has answered
        await self.check()
        for broker in self.brokers:
            await broker.stop()

    async def check(self) -> None:
        assert self.faults == []
        for broker in self.brokers:
            assert [each for own in broker.legacy.here() for each in own.live()] == []
            assert broker.coordinators.open_count == 0
        for txn, places in self.places.items():
            found = self.stage.outcomes(txn)
            assert places <= found.keys()
            for committed in set(found.values()):
                assert committed is self.ended.get(txn, committed)
                assert not committed or self.asked.get(txn), "nobody committed it"
            await self.check_answers(txn)

    async def check_answers(self, txn: TxnId) -> None:
        commit = self.ended.get(txn)
        if commit is not None:
            await self.ask(txn.most, lambda broker: broker.legacy.end(txn, commit=commit))
            with pytest.raises(InvalidTxnStatus):
                await self.ask(txn.most, lambda broker: broker.legacy.end(txn, commit=not commit))


def play(seed: int) -> None:
    async def main() -> None:
        await History(seed).play()

    run(main())


@pytest.mark.parametrize("seed", range(12))
def test_random_histories(seed: int) -> None:
    play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [30, pytest.param(100, marks=pytest.mark.soak)])
def test_many_random_histories(seeds: int) -> None:
    for seed in range(12, seeds):
        try:
            play(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


# --- without a rule


def _is_caught() -> bool:
    caught = False
    for seed in range(12):
        try:
            play(seed)
        except* (AssertionError, TimeoutError):  # the latter: an end that never comes
            caught = True
        if caught:
            break
    return caught


async def _at_once(self: LegacyCoordinator, held: Any) -> None:
    """The answer does not wait for the participants."""


def _open_alone(self: LegacyCoordinator) -> int:
    """What is ending does not hold the low watermark."""
    live = [each.number for each in self.live() if each.is_open]
    return min(live, default=self.last_number) - 1


@pytest.mark.parametrize("rule", ["answer after the end", "low watermark", "recovery"])
def test_without_a_rule_a_history_breaks(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if rule == "answer after the end":
        monkeypatch.setattr(LegacyCoordinator, "_over", _at_once)
    elif rule == "low watermark":
        monkeypatch.setattr(LegacyCoordinator, "low_watermark", property(_open_alone))
    else:
        recover = LegacyCoordinator.recover

        async def forgetful(self: LegacyCoordinator) -> None:
            """What a former leader decided is not carried out."""
            with monkeypatch.context() as patch:
                patch.setattr(self, "_decided", lambda *_: None)
                await recover(self)

        monkeypatch.setattr(LegacyCoordinator, "recover", forgetful)
    assert _is_caught()
