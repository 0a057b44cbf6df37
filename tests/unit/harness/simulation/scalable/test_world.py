"""Brokers that are killed and started again in one process, on shared storage and on a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from harness.simulation.broker_lives import Life, follow, present_life
from harness.simulation.scalable.world import (
    PORT,
    DiskHost,
    ScalableWorld,
    SharedHost,
    SharedServers,
)
from harness.simulation.storage.history import Findings
from magnetar.errors import MagnetarError, Unavailable
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual import virtual_time
from magnetar.testing.virtual.driver import Driver, build_message

TOPIC = "persistent://public/default/x"


def _shared(world: ScalableWorld) -> None:
    servers = SharedServers(Random(1), session_seconds=6.0)
    for name in "ab":
        world.hosts[name] = SharedHost(world, name, servers)


def _alone(world: ScalableWorld) -> None:
    world.hosts["a"] = DiskHost(world, "a", Random(2))


async def _published(world: ScalableWorld, host: str, count: int) -> list[int]:
    """Publish to a topic at a host; the ids of the ledgers that took it."""
    driver = await Driver.connect(host, PORT, connect=world.connect)
    await driver.request("PRODUCER", topic=TOPIC, producer_id=1, producer_name="p")
    receipts = [
        await driver.publish(1, each, build_message(b"x", producer_name="p", sequence_id=each))
        for each in range(count)
    ]
    return [receipt.message_id.ledgerId for receipt in receipts]


@pytest.mark.slow
@pytest.mark.parametrize("furnish", [_shared, _alone])
def test_a_killed_broker_is_gone_and_the_next_has_its_data(
    furnish: Callable[[ScalableWorld], None],
) -> None:
    findings = Findings()

    async def main() -> None:
        follow(asyncio.get_running_loop())
        world = ScalableWorld(1, findings, Limits())
        furnish(world)
        for host in world.hosts.values():
            assert await host.start()
        host = world.hosts["a"]
        before = await _published(world, "a", 3)
        killed = host.server
        await host.kill()
        with pytest.raises(ConnectionRefusedError):
            await Driver.connect("a", PORT, connect=world.connect)
        assert all(not link.server.is_closing() or link.is_over for link in host.network.links)
        with pytest.raises(Unavailable):
            await host.ask(lambda server: server.topics.namespaces.tenants.names())
        assert await host.start()
        assert host.server is not killed
        assert min(await _published(world, "a", 1)) > max(before)
        for each in world.hosts.values():
            await each.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main())
    assert not findings.violations


@pytest.mark.slow
def test_a_disk_that_stops_in_mid_operation_ends_its_broker() -> None:
    async def main() -> None:
        follow(asyncio.get_running_loop())
        world = ScalableWorld(1, Findings(), Limits())
        _alone(world)
        host = world.hosts["a"]
        assert isinstance(host, DiskHost)
        assert await host.start()
        host.disk.plan.crash_at = 1
        with pytest.raises((MagnetarError, OSError)):
            await asyncio.gather(host.kill_when_stopped(), _published(world, "a", 1))
        assert not host.is_ready
        assert await host.start()
        assert await _published(world, "a", 1)
        await host.stop()
        host.close()

    virtual_time.run(main())


def test_what_a_life_starts_ends_with_it() -> None:
    ended: list[str] = []

    async def child(name: str) -> None:
        assert present_life() is not None
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(name)
            if name == "first":
                _keep(asyncio.create_task(child("late")))

    async def parent() -> None:
        _keep(asyncio.create_task(child("first")))
        asyncio.get_running_loop().call_later(0.1, lambda: _keep(asyncio.create_task(child("2"))))
        await asyncio.sleep(1000)

    tasks: set[asyncio.Task[None]] = set()

    def _keep(task: asyncio.Task[None]) -> None:
        tasks.add(task)

    async def main() -> None:
        follow(asyncio.get_running_loop())
        life = Life("a1")
        asked = asyncio.create_task(life.ask(parent()))
        bystander = asyncio.create_task(asyncio.sleep(5))
        await asyncio.sleep(1)
        life.kill()
        assert await life.cleared(1.0) == []
        with pytest.raises(Unavailable):
            await asked
        assert ended == ["first", "2"]  # one that never ran has nothing to end
        assert len(tasks) == 3
        assert not bystander.cancelled()
        with pytest.raises(Unavailable):
            await life.ask(parent())

    virtual_time.run(main())


def test_who_asks_can_leave_without_undoing_it() -> None:
    async def main() -> None:
        follow(asyncio.get_running_loop())
        life = Life("a1")
        done = asyncio.Event()

        async def work() -> None:
            await asyncio.sleep(1)
            done.set()

        asking = asyncio.create_task(life.ask(work()))
        await asyncio.sleep(0.5)
        asking.cancel()
        await asyncio.sleep(1)
        assert done.is_set()
        assert asking.cancelled()

    virtual_time.run(main())
