"""Transactions over real sockets, with a server in this process that stores on disk."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from harness.limits import PATIENCE_S
from magnetar.client.client import Client
from magnetar.client.transaction.state import TransactionState
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import InitialPosition
from tests.unit.server.serving import serving

NAME = TopicName.parse("topic://public/default/orders")
REGULAR = "persistent://public/default/plain"
WRITERS = 64
ROUNDS = 4
MESSAGES = 10


@pytest.mark.slow
def test_sixty_four_at_once_over_a_split_and_a_merge(tmp_path: Path) -> None:
    """Exactly once, each key in its order, and no commit fails."""

    async def story() -> None:
        async with (
            serving(tmp_path) as server,
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
        ):
            scalable = server.context.scalable
            await scalable.create(NAME, 1)
            async with await client.producer(str(NAME)) as producer:

                async def write(key: str) -> None:
                    for turn in range(ROUNDS):
                        async with client.transaction() as txn:
                            for number in range(MESSAGES):
                                payload = b"%d" % (turn * MESSAGES + number)
                                await producer.submit(payload, key=key, txn=txn)
                        assert txn.state is TransactionState.COMMITTED

                writing = asyncio.gather(*(write(f"k{number}") for number in range(WRITERS)))
                await asyncio.sleep(0)
                await scalable.split(NAME, 0)
                await scalable.merge(NAME, (1, 2))
                await writing
            found = await read(client, WRITERS * ROUNDS * MESSAGES)
        wanted = [b"%d" % number for number in range(ROUNDS * MESSAGES)]
        assert found == {f"k{number}": wanted for number in range(WRITERS)}

    asyncio.run(story())


async def read(client: Client, count: int) -> dict[str | None, list[bytes]]:
    """That many messages, by key; and there are no more."""
    found: dict[str | None, list[bytes]] = defaultdict(list)
    async with await client.stream_consumer(
        str(NAME), "check", initial_position=InitialPosition.EARLIEST
    ) as consumer:
        for _ in range(count):
            message = await consumer.receive(timeout=PATIENCE_S)
            found[message.key].append(message.value)
            consumer.ack_cumulative(message)  # children come once their parents are read
        assert await consumer.receive_many(1, timeout=0.5) == []
    return found


@pytest.mark.parametrize("scalable", [True, False])
def test_both_kinds_of_coordinators_on_a_regular_topic(tmp_path: Path, scalable: bool) -> None:
    async def story() -> None:
        async with (
            serving(tmp_path) as server,
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
        ):
            async with (
                await client.producer(REGULAR) as producer,
                await client.consumer(REGULAR, "s") as consumer,
            ):
                await producer.send(b"input")
                message = await consumer.receive(timeout=PATIENCE_S)
                async with client.transaction(scalable=scalable) as txn:
                    await producer.send(b"output", txn=txn)
                    consumer.ack(message, txn=txn)
                result = await consumer.receive(timeout=PATIENCE_S)
                assert (result.value, result.transaction) == (b"output", txn.txn_id)
            assert not [each for each in client._open if each is txn._core]

    asyncio.run(story())
