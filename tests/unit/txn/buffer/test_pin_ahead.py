"""Where pins and entries share a journal, a transaction's first message need not wait."""

from __future__ import annotations

import pytest

from magnetar.errors import TooManyRequests, Unavailable
from magnetar.metadata.api import ABSENT
from magnetar.model.ids import Position
from magnetar.txn.buffer.pins import place_pin
from tests.unit.broker.txn_world import (
    T1,
    TxnWorld,
    errors,
    in_txn_world,
    joined,
    publish,
    quiet,
    read_all,
    sent,
)
from tests.unit.broker.world import NAME, message, receipts


def test_the_first_message_is_appended_behind_its_pin() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker(shares_journal=True)
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        world.slow = 0.1
        producer.send(sent(0, T1, "t"))
        producer.send(message(1, "a"))
        assert topic.ledger.pending == 2
        assert await broker.keys() == []  # submitted, and not durable
        assert errors(await receipts(producer, 2)) == [None, None]
        world.slow = 0.0
        assert await read_all(topic, "s") == []
        await broker.commit(T1)
        assert await read_all(topic, "s2") == ["t", "a"]
        await quiet()
        assert await broker.keys() == []

    in_txn_world(scenario)


@pytest.mark.parametrize("state", ["COMMITTED", "ABORTED"])
def test_a_pin_that_lands_after_the_end_goes(state: str) -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker(shares_journal=True)
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        world.slow = 1.0
        producer.send(sent(0, T1, "t"))
        broker.outcomes.learn(T1, "COMMITTED" if state == "COMMITTED" else "ABORTED")
        assert errors(await receipts(producer, 1)) == [None]
        await quiet(10)
        world.slow = 0.0
        assert await read_all(topic, "s") == (["t"] if state == "COMMITTED" else [])
        assert [key for key in await broker.keys() if "-w-" in key] == []
        assert topic.transactions is not None
        assert topic.transactions.undecided == 0

    in_txn_world(scenario)


def test_an_elder_pin_is_taken_over() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker(shares_journal=True)
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        late = await place_pin(broker.store, T1, str(NAME), Position(0, 0), 0)  # a late write
        await publish(producer, T1, "t")
        await quiet()
        found = await broker.store.pin(T1, str(NAME))
        assert found is not None
        assert found.op.version > late.version
        assert (found.pin.bound, found.pin.epoch) == (Position(0, 0), topic.ledger.epoch)
        await broker.commit(T1)
        await quiet()
        assert await broker.keys() == []

    in_txn_world(scenario)


def test_a_pin_that_fails_loses_the_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker(shares_journal=True)
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        put = broker.store.metadata.put

        async def failing() -> object:
            raise Unavailable("the disk is full")

        def refused(key: str, value: bytes, **options: object) -> object:
            if options["expected"] == ABSENT and "-w-" in key:
                return failing()
            return put(key, value, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(broker.store.metadata, "put", refused)
        producer.send(sent(0, T1, "t"))
        await quiet()
        assert topic.transactions is not None
        assert isinstance(topic.transactions.failure, Unavailable)

    in_txn_world(scenario)


def test_what_others_coordinate_waits_for_its_pin() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker(shares_journal=True, coordinates=False)
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        producer.send(sent(0, T1, "t"))
        assert topic.ledger.pending == 0
        assert errors(await receipts(producer, 1)) == [None]
        assert await broker.store.pin(T1, str(NAME)) is not None

    in_txn_world(scenario)


def test_one_that_cannot_be_submitted_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker(shares_journal=True)
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)

        def full(*_: object) -> object:
            raise TooManyRequests("no room")

        monkeypatch.setattr("magnetar.txn.buffer.transaction_buffer.submit_pin", full)
        producer.send(sent(0, T1, "t"))
        assert topic.ledger.pending == 0
        assert errors(await receipts(producer, 1)) == [None]

    in_txn_world(scenario)
