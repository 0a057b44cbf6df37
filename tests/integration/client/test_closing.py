"""What is closed although another part fails to be."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.client.connection.connection import BrokerConnection
from magnetar.client.consume.checkpoint import FROM_EARLIEST
from magnetar.client.layout.watch import LayoutWatch
from magnetar.client.transaction.coordinators import CoordinatorClients
from magnetar.errors import NotConnected
from tests.integration.client.stage import new_client, play
from tests.integration.server.scalable_stage import NAME, Stage

REGULAR = "persistent://public/default/plain"


def make_fail(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Each call does its work, and then fails."""
    working = getattr(owner, name)

    async def failing(self: object) -> None:
        await working(self)
        raise NotConnected("it could not be closed")

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(CoordinatorClients, "stop"), (LayoutWatch, "stop"), (BrokerConnection, "close")],
)
def test_one_part_that_fails_to_close_leaves_no_other_open(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        before = asyncio.all_tasks()
        client = new_client(stage)
        await client.producer(NAME)
        await client.stream_consumer(NAME, "s")
        await client.checkpoint_consumer(NAME, start=FROM_EARLIEST, group="g")
        await client.consumer([REGULAR, f"{REGULAR}-2"], "s")
        for scalable in (True, False):
            await (await client.transaction(scalable=scalable)).abort()
        open_ones = list(client._connections._open.values())
        make_fail(monkeypatch, owner, name)
        with pytest.raises(NotConnected, match="could not be closed"):
            await client.close()
        assert not any(each.is_open for each in open_ones)
        await asyncio.sleep(1)
        names = [each.get_name() for each in asyncio.all_tasks() - before]
        assert not [each for each in names if "magnetar-" in each or "layout of" in each]

    play(story)
