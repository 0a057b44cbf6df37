"""One transaction with very many messages: what it keeps is no more for each of them.

`make bench-txn-large` does the same with a million.
"""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import pytest

from harness.limits import PATIENCE_S
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.messages import Delivered, TxnId
from tests.integration.server.process import MIB, Running, measured, served
from tests.integration.server.test_transactions import begun, ended, ids
from tests.unit.server.serving import subscribed

FEW, MANY = 1000, 20_000
IN_FLIGHT = 500
NAMESPACES = ("public/default", "public/second")


def topic_name(namespace: str) -> str:
    return f"persistent://{namespace}/large"


async def publish(driver: Driver, producer_id: int, first: int, count: int, txn: TxnId) -> None:
    for start in range(first, first + count, IN_FLIGHT):
        some = range(start, min(start + IN_FLIGHT, first + count))
        entries = (build_message(b"%d" % each, sequence_id=each, **ids(txn)) for each in some)
        sends = zip(some, entries, strict=True)
        await asyncio.gather(
            *(driver.publish(producer_id, number, entry, **ids(txn)) for number, entry in sends)
        )


async def delivered(driver: Driver, count: int) -> int:
    """How many messages come, of so many."""
    found = 0
    for number in range(count):
        if number % IN_FLIGHT == 0:
            driver.send("FLOW", consumer_id=0, messagePermits=IN_FLIGHT)
        found += isinstance(await driver.pushes.get(), Delivered)
    return found


def outstanding_ops(server: Running) -> float:
    with urllib.request.urlopen(f"{server.admin_url}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    name = "pulsar_txn_metadata_store_outstanding_op_records"
    (line,) = [each for each in lines if each.startswith(name)]
    return float(line.rpartition(" ")[2])


@pytest.mark.slow
@measured
def test_memory_and_records_do_not_grow_with_the_messages(tmp_path: Path) -> None:
    async def scene(server: Running) -> None:
        driver = await server.connect()
        for number, namespace in enumerate(NAMESPACES):
            await driver.request("PRODUCER", topic=topic_name(namespace), producer_id=number)
        txn = await begun(driver)
        for number in range(len(NAMESPACES)):
            await publish(driver, number, 0, FEW, txn)
        before = server.rss()
        for number in range(len(NAMESPACES)):
            await publish(driver, number, FEW, MANY, txn)
        grown = server.rss() - before
        # They are about 100 bytes each; the newest stay in memory until they are settled.
        assert grown < 16 * MIB, f"{grown / MIB:.0f} MiB more"
        assert outstanding_ops(server) == len(NAMESPACES)
        await ended(driver, txn)
        for namespace in NAMESPACES:
            reader = await server.connect()
            await subscribed(reader, topic=topic_name(namespace))
            assert await delivered(reader, FEW + MANY) == FEW + MANY
            await reader.close()
        await driver.close()

    with served(tmp_path) as server:
        url = f"{server.admin_url}/admin/v2/namespaces/{NAMESPACES[1]}"
        request = urllib.request.Request(url, method="PUT", data=b"{}")
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()
        asyncio.run(scene(server))
