"""Who began a transaction and who decided it, over HTTP, for both kinds and over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.limits import within
from magnetar.server.session import CLIENT_TEXT_MAX
from magnetar.testing.virtual.driver import Driver
from magnetar.txn.ids import to_text
from magnetar.wire.messages import TxnId
from tests.unit.server.admin.txn_client import ABORT, COMMIT, TxnClient, txn_client
from tests.unit.server.admin.world import FULL, World, run

BASE = "/admin/v3/transactions"
KINDS = pytest.mark.parametrize("scalable", [True, False])


async def story(world: World, txn: TxnId) -> Any:
    return await world.get(f"{BASE}/transactionMetadata/{txn.most}/{txn.least}")


def events(found: Any) -> list[str]:
    return [each["event"] for each in found["timeline"]]


@KINDS
def test_who_began_is_told_by_the_client_while_nobody_is_identified(
    tmp_path: Path, scalable: bool
) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            await client.publish(FULL)
            txn = await client.begin(scalable=scalable)
            await client.subscribe(FULL, "sub")
            await client.add(txn, FULL, "sub")
            await client.publish(FULL, txn)
            await client.publish(FULL)
            (listed,) = (await world.get(f"{BASE}/open"))["transactions"]
            told = await story(world, txn)
            (held,) = (await world.get(f"{BASE}/blocked/{FULL.replace('://', '/')}"))["segments"]
            stats = await world.get(f"/admin/v2/{FULL.replace('://', '/')}/stats")
            (publisher,) = stats["publishers"]
            for each in (listed, told, held["blocker"]):
                assert each["owner"] is None
                assert each["client"]["address"] == publisher["address"]
                assert each["client"]["version"] == publisher["clientVersion"]
                assert each["producers"] == [publisher["producerName"]]
                (consumer,) = each["consumers"]
                assert consumer.startswith("sub ")
                assert each["decidedBy"] is None
            assert events(told)[0] == (
                f"begun by {publisher['address']} {publisher['clientVersion']}"
            )

    run(tmp_path, scenario)


@pytest.mark.slow
@KINDS
def test_who_decided_is_kept(tmp_path: Path, scalable: bool) -> None:
    """By a client, by an operator, by the deadline: the next process knows it as well."""
    expected: dict[TxnId, tuple[str, str]] = {}

    async def first(world: World) -> None:
        async with (
            txn_client(world.server.service_url) as client,
            txn_client(world.server.service_url) as other,
        ):
            done = [await client.begin(scalable=scalable) for _ in range(3)]
            late = await client.begin(scalable=scalable, txn_ttl_millis=1)
            address = (await story(world, done[0]))["client"]["address"]
            await client.end(done[0], COMMIT)
            await other.end(done[1], ABORT)
            path = f"{done[2].most}/{done[2].least}"
            await world.change("POST", f"{BASE}/abortTransaction/{path}")
            async with within("its deadline has passed"):
                while (await story(world, late))["status"] != "ABORTED":
                    pass
            deciders = ("client", "client", "operator 127.0.0.1", "deadline")
            for txn, decider in zip((*done, late), deciders, strict=True):
                found = (await story(world, txn))["decidedBy"]
                assert found.startswith(decider)
                assert any(f" by {found}" in each for each in events(await story(world, txn)))
                expected[txn] = address, found
        assert expected[done[0]][1].startswith(f"client {address} ")
        assert not expected[done[1]][1].startswith(f"client {address} ")

    async def second(world: World) -> None:
        for txn, (address, decider) in expected.items():
            async with within("the coordinators are there"):
                while True:
                    answer = await world.get(f"{BASE}/coordinatorStats")
                    if all(each["state"] == "Ready" for each in answer.values()):
                        break
            found = await story(world, txn)
            assert (found["client"]["address"], found["decidedBy"]) == (address, decider)

    run(tmp_path, first)
    run(tmp_path, second)


def test_what_a_group_decided_says_so(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            group = await client.open_group("app")

            async def member(sequence: int, epoch: int = group.epoch) -> TxnId:
                given = {"application": "app", "epoch": epoch, "sequence": sequence}
                return await client.begin(group.tc_id, group=given)

            won, lost, aborted, fenced = [await member(number) for number in (0, 0, 1, 2)]
            await client.end(aborted, ABORT)
            await commit_group(client, group.epoch, 0, won)
            await open_anew(client)
            expected = {
                won: "commit of sequence 0 of its group",
                lost: "commit of sequence 0 of its group, without it",
                aborted: "client 127.0.0.1:",
                fenced: "epoch 2 of its group, which fenced epoch 1",
            }
            for txn, decider in expected.items():
                async with within(f"{to_text(txn)} is final in its header"):
                    while (found := await story(world, txn))["decidedBy"] is None:
                        pass
                assert found["decidedBy"].startswith(decider)

    run(tmp_path, scenario)


async def commit_group(client: TxnClient, epoch: int, sequence: int, txn: TxnId) -> None:
    ids = [{"most_bits": txn.most, "least_bits": txn.least}]
    await client._driver.request(
        "COMMIT_GROUP", application="app", epoch=epoch, sequence=sequence, transactions=ids
    )


async def open_anew(client: TxnClient) -> None:
    await client._driver.request("OPEN_GROUP", application="app", generation="g", run="another")


def test_the_version_of_a_client_is_cut_and_printable(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        host, _, port = world.server.service_url.removeprefix("pulsar://").partition(":")
        version = "v\n\x1b[31m" + "x" * 10_000
        driver = await Driver.connect(host, int(port), client_version=version)
        txn = await TxnClient(driver).begin()
        told = (await story(world, txn))["client"]["version"]
        assert len(told) <= CLIENT_TEXT_MAX
        assert told.startswith("v??[31mxxx")
        await driver.close()

    run(tmp_path, scenario)
