"""Legacy transactions for tests of their coordinators: begun, looked at, refused."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from magnetar.txn.legacy.coordinator_entries import Acknowledging
from magnetar.wire.messages import TxnId
from tests.unit.txn.coordinator_world import MINUTE_MS, Broker

T1, T2 = "persistent://public/default/t1", "persistent://public/default/t2"
SUB = Acknowledging(T1, "s")


async def begun(broker: Broker, *topics: str, timeout_ms: int = MINUTE_MS) -> TxnId:
    txn = await broker.legacy.begin(0, timeout_ms)
    if topics:
        await broker.legacy.add_partitions(txn, topics)
    return txn


async def state(broker: Broker, txn: TxnId) -> str | None:
    known = await broker.legacy.find(txn)
    return None if known is None else known.state


async def refused(request: Awaitable[Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        await request
