"""The walks of five commands: how many borders between files they cross, and none of them upwards.

It prints the table of walks. The limits are what a newcomer has to follow; a change that needs
more says why, here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.server.app import Server
from magnetar.server.embedded import Storage
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.messages import Delivered
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.walks import Walk, layers, walk
from tests.unit.server.serving import connected, message, run, serving, subscribed

PUBLISH_BORDERS_MAX = 12
COMMIT_BORDERS_MAX = 23


class Scene:
    """A producer and a consumer of one topic, on connections of their own."""

    def __init__(self, sending: Driver, reading: Driver) -> None:
        self._sending = sending
        self._reading = reading
        self._number = 0
        self.txn: dict[str, int] = {}

    async def publish(self, **txn: Any) -> None:
        number, self._number = self._number, self._number + 1
        entry = build_message(b"x", sequence_id=number, producer_name="p", **txn)
        await self._sending.publish(1, number, entry, **txn)

    async def publish_and_take(self) -> Delivered:
        await self.publish()
        return await message(self._reading)

    async def begin(self) -> None:
        begun = await self._sending.request(
            "NEW_TXN", tc_id=0, txn_ttl_millis=60_000, scalable=True
        )
        self.txn = {
            "txnid_most_bits": begun.txnid_most_bits,
            "txnid_least_bits": begun.txnid_least_bits,
        }

    async def send_in_txn(self) -> None:
        await self.publish(**self.txn)

    async def ack_in_txn(self, taken: Delivered) -> None:
        place = {"ledgerId": taken.position.ledger_id, "entryId": taken.position.entry_id}
        await self._reading.request(
            "ACK", consumer_id=0, ack_type=pb.CommandAck.Individual, message_id=[place], **self.txn
        )

    async def commit(self) -> None:
        await self._sending.request("END_TXN", txn_action=pb.COMMIT, scalable=True, **self.txn)


async def walks_of(folder: Path) -> dict[str, Walk]:
    async with serving(folder) as server:
        sending, reading = await connected(server), await connected(server)
        await sending.request("PRODUCER", topic="topic", producer_id=1, producer_name="p")
        await subscribed(reading)
        scene, found = Scene(sending, reading), {}
        outstanding = _outstanding_of(server)
        taken = await scene.publish_and_take()  # what is done once is not part of a walk
        await scene.begin()
        await scene.send_in_txn()
        await scene.ack_in_txn(taken)
        await scene.commit()
        assert (await message(reading)).position > taken.position

        found["publish"], _ = await walk(scene.publish, outstanding)
        taken = await message(reading)
        found["publish and delivery"], _ = await walk(scene.publish_and_take, outstanding)
        found["NEW_TXN"], _ = await walk(scene.begin, outstanding)
        found["first SEND"], _ = await walk(scene.send_in_txn, outstanding)
        found["ACK"], _ = await walk(lambda: scene.ack_in_txn(taken), outstanding)
        found["commit"], _ = await walk(scene.commit, outstanding)
        assert (await message(reading)).position > taken.position
        await sending.close()
        await reading.close()
    return found


def _outstanding_of(server: Server) -> Callable[[], int]:
    """The number of records of a server's journal that are not durable yet."""
    storage = server.storage
    assert isinstance(storage, Storage)
    journal = storage._journal
    return lambda: journal.next_sequence - 1 - journal.synced


def _table(found: dict[str, Walk]) -> str:
    lines = [f"{'walk':22} {'to the journal':>14} {'borders':>8} {'files':>6} {'upward':>7}"]
    for name, each in found.items():
        to_journal, borders = len(each.borders(to_journal=True)), len(each.borders())
        files, upward = len(each.files()), len(each.upward())
        lines.append(f"{name:22} {to_journal:>14} {borders:>8} {files:>6} {upward:>7}")
    return "\n".join(["", *lines, ""])


def test_walks_are_short_and_lead_downwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        found = await walks_of(tmp_path)
        with capsys.disabled():
            sys.stdout.write(_table(found))
        for name, each in found.items():
            assert each.to_journal is not None, f"{name} wrote nothing"
            assert not each.upward(), f"{name} calls up: {each.upward()}"
        assert len(found["publish"].borders(to_journal=True)) <= PUBLISH_BORDERS_MAX
        assert len(found["commit"].borders(to_journal=True)) <= COMMIT_BORDERS_MAX, "\n".join(
            map(str, found["commit"].borders(to_journal=True))
        )

    run(scene())


def test_an_upward_call_is_seen(tmp_path: Path) -> None:
    """A rule that cannot fail is none: a callback from below is planted, and found."""

    async def scene() -> None:
        async with serving(tmp_path) as server:
            planted = server.context.check_scalable
            server.outcomes.learn = lambda *_: planted()  # type: ignore[method-assign]
            sending = await connected(server)
            scene = Scene(sending, sending)
            await scene.begin()
            found, _ = await walk(scene.commit, _outstanding_of(server))
            assert any("txn/open_transactions.py" in each for each in found.upward())
            await sending.close()

    run(scene())


def test_the_layers_are_those_of_the_import_contract() -> None:
    height = layers()
    assert height["server"] > height["scalable"] > height["broker"] > height["txn"]
    assert height["txn"] > height["managed_ledger"] > height["metadata"] > height["journal"]
    assert height["ledger"] == height["metadata"]
