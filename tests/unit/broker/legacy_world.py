"""Legacy transactions on a topic of the world in memory: ends, restarts."""

from __future__ import annotations

from magnetar.broker.topic.topic import Topic
from magnetar.txn.legacy.legacy_buffer import LegacyTransactionBuffer
from magnetar.txn.legacy.stream_state import StreamRecord, stream_key
from magnetar.txn.records import decode
from magnetar.wire.messages import TxnId
from tests.unit.broker.txn_world import (
    Broker,
    quiet,
)
from tests.unit.broker.world import NAME

L1, L2, L3 = (TxnId(0, number) for number in (1, 2, 3))


def legacy_of(topic: Topic) -> LegacyTransactionBuffer:
    assert topic.legacy_transactions is not None
    return topic.legacy_transactions


async def commit(topic: Topic, txn: TxnId, low: int = -1) -> None:
    await legacy_of(topic).end(txn, commit=True, low_watermark=low)
    await quiet()


async def abort(topic: Topic, txn: TxnId, low: int = -1) -> None:
    await legacy_of(topic).end(txn, commit=False, low_watermark=low)
    await quiet()


async def record_of(broker: Broker) -> StreamRecord | None:
    found = await broker.parts.metadata.get(stream_key(str(NAME)))
    return None if found is None else decode(found, StreamRecord)


async def moved(broker: Broker, topic: Topic, *, clean: bool) -> tuple[Broker, Topic]:
    """The topic at another broker: unloaded there before, or its broker was killed."""
    if clean:
        await topic.close()
    else:
        broker.kill()
    other = broker.world.broker()
    return other, await other.topic()
