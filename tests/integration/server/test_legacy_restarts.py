"""Legacy transactions over killed servers: of regular topics, and of ones that become scalable."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from bench.split import Served, serving
from harness.limits import PATIENCE_S, within
from harness.simulation.scalable.clients import QueueConsumer
from harness.simulation.scalable.links import Links
from magnetar.errors import RequestError, WireCode
from magnetar.testing.virtual.driver import Driver
from magnetar.wire.messages import TxnId
from tests.integration.server.legacy_stage import V4
from tests.integration.server.scalable_stage import nothing_comes, read

PATH = "public/default/orders"
REGULAR = f"persistent://{PATH}"
SCALABLE = f"topic://{PATH}"

pytestmark = pytest.mark.slow


async def client_of(served: Served) -> V4:
    return V4(await Driver.connect("127.0.0.1", served.running.port))


async def begun(served: Served) -> list[TxnId]:
    """Messages 0 to 9, two of them acknowledged; transactions that are open, in this order: one
    that will commit, one that will abort, and two with acknowledgements."""
    client = await client_of(served)
    await client.subscribe(REGULAR, subType=1)
    kept, dropped, acked, returned = [await client.begin(3) for _ in range(4)]
    await client.publish(REGULAR, b"#0")
    await client.publish(REGULAR, b"#1")
    for txn in (acked, returned):
        _, where = await client.receive()
        await client.ack(REGULAR, where, txn)
    before, aborted = await client.begin(3), await client.begin(3)
    await client.publish(REGULAR, b"#2", before)
    await client.publish(REGULAR, b"#3", aborted)
    for number, each in enumerate((kept, None, dropped, kept, dropped, None), 4):
        await client.publish(REGULAR, b"#%d" % number, each)
    await client.end(before)
    await client.end(aborted, commit=False)
    await client.close()
    return [kept, dropped, acked, returned]


async def ended(served: Served, txns: list[TxnId]) -> None:
    """Once their coordinator has read its log; it says so until then."""
    client = await client_of(served)
    for txn, commit in zip(txns, (True, False, True, False), strict=True):
        async with within("the server is ready"):
            while True:
                try:
                    await client.end(txn, commit=commit)
                    break
                except RequestError as error:
                    if error.wire_code is not WireCode.TRANSACTION_COORDINATOR_NOT_FOUND:
                        raise
                    await asyncio.sleep(0.1)
    await client.close()


async def check_scalable(served: Served) -> None:
    async with (
        Links(served.url, wait_s=PATIENCE_S) as links,
        QueueConsumer(links, SCALABLE, "sub", "c") as old,
        QueueConsumer(links, SCALABLE, "new", "c") as new,
    ):
        found = {each.payload for each in await read(old, 6)}
        assert found == {b"#%d" % number for number in (1, 2, 4, 5, 7, 9)}
        found = {each.payload for each in await read(new, 7)}
        assert found == {b"#%d" % number for number in (0, 1, 2, 4, 5, 7, 9)}
        await nothing_comes(old, 0.2)
        await nothing_comes(new, 0.2)


async def check_regular(served: Served) -> None:
    client = await client_of(served)
    await client.subscribe(REGULAR, subType=1)
    assert sorted(await client.payloads(6)) == [b"1", b"2", b"4", b"5", b"7", b"9"]
    await client.sees_nothing()
    await client.close()


def kill(served: Served) -> None:
    os.kill(served.running.pid, signal.SIGKILL)


@pytest.mark.parametrize("ends_after_the_kill", [True, False])
def test_a_server_is_killed_after_the_migration(tmp_path: Path, ends_after_the_kill: bool) -> None:
    with serving(tmp_path) as served:
        txns = asyncio.run(begun(served))
        served.admin("POST", f"{PATH}/migrate?force=true")
        if not ends_after_the_kill:
            asyncio.run(ended(served, txns))
        kill(served)
    with serving(tmp_path) as served:
        asyncio.run(ended(served, txns))  # again: the same
        asyncio.run(check_scalable(served))


def test_a_server_is_killed_with_open_transactions_and_after_their_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        txns = asyncio.run(begun(served))
        kill(served)
    with serving(tmp_path) as served:
        asyncio.run(ended(served, txns))
        kill(served)
    with serving(tmp_path) as served:
        asyncio.run(check_regular(served))
