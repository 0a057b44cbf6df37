"""The controllers of scalable topics, and which broker runs each of them.

Owns: `Controllers`: the elections of one broker, and the `Controller` of every topic that it leads.

Topics are dealt to `SLOTS` slots by their names, and each slot has a leader: a handful of ephemeral
records instead of one per topic, and a topic has its controller from the moment it exists, whoever
uses it.

Invariants:
1. A controller runs here only while this broker leads the slot of its topic. A former leader that
   has not heard of it yet does no harm: what it stores is compare-and-set.
2. Every topic with a record has its controller, here or at another broker, as long as one lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Final

from magnetar.errors import MagnetarError
from magnetar.metadata.recipes import LeaderElection
from magnetar.model.hashing import key_hash
from magnetar.model.names import NamespaceName, TopicName
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import SCALABLE_CONTROLLER_FAILOVERS, SCALABLE_CONTROLLERS
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.runtime.slices import SlicePace
from magnetar.scalable.controller import Controller, ControllerParts
from magnetar.scalable.records import CONTROLLERS, ScalableRecord, topic_key

# Fixed for a cluster: brokers that deal differently would run two controllers for one topic.
SLOTS: Final = 16

_LOG: Final = logger(__name__)


def slot_of(topic: TopicName) -> int:
    return _slot(str(topic.scalable_topic()))


def _slot(name: str) -> int:
    return key_hash(name) % SLOTS


class Controllers(Service):
    """The controllers of one broker."""

    def __init__(
        self, parts: ControllerParts, policies_changed: Signal, broker: str, url: str
    ) -> None:
        super().__init__("controllers", stop_seconds=parts.limits.close_seconds)
        self._parts = parts
        self._policies_changed = policies_changed
        self._url = url
        # The first part tells processes apart, the second one tells clients where to go.
        value = f"{broker} {url}".encode()
        self._elections = [
            LeaderElection(parts.store.metadata, f"{CONTROLLERS}/{slot}", value)
            for slot in range(SLOTS)
        ]
        self._running: dict[str, _Running] = {}

    async def _start(self) -> None:
        for slot, election in enumerate(self._elections):
            self.spawn(election.run(), f"election of slot {slot}")
            self.spawn(self._follow_election(slot, election), f"leadership of slot {slot}")
        self.spawn(self._follow_topics(), "topics")
        self.spawn(self._follow_brokers(), "brokers")
        self.spawn(self._follow_policies(), "policies")

    async def _stop(self) -> None:
        # Controllers before elections: while one still works here, no other broker begins.
        for running in list(self._running.values()):
            await running.stop()
        for election in self._elections:
            await election.close()

    # --- what is led here

    def leads(self, topic: TopicName) -> bool:
        return self._elections[slot_of(topic)].leading

    def controller(self, topic: TopicName) -> Controller | None:
        """The controller of a topic, if it is here."""
        running = self._running.get(topic_key(topic))
        return None if running is None else running.controller

    def running(self) -> list[Controller]:
        """All controllers that are here."""
        return [each.controller for each in self._running.values()]

    async def leader_url(self, topic: TopicName) -> str | None:
        """Where the controller of a topic is; None: nobody leads it now."""
        if self.leads(topic):
            return self._url
        found = await self._parts.store.metadata.get(f"{CONTROLLERS}/{slot_of(topic)}")
        return None if found is None else found.value.decode().partition(" ")[2]

    # --- following

    async def _follow_election(self, slot: int, election: LeaderElection) -> None:
        seen, another_led = 0, await self._is_led_by_another(slot)
        while True:
            # For the count of failovers alone: a slot that nobody led before is not one.
            if election.leading and another_led:
                SCALABLE_CONTROLLER_FAILOVERS.inc()
            another_led = not election.leading
            # All topics, whichever slot: cheap, and the same code for coming and going.
            await self._arrange(self._parts.layouts.records.keys())
            seen = await election.changes.past(seen)

    async def _is_led_by_another(self, slot: int) -> bool:
        try:
            found = await self._parts.store.metadata.get(f"{CONTROLLERS}/{slot}")
        except MagnetarError:
            return False  # for the count of take-overs alone
        return found is not None and not found.stat.mine

    async def _follow_topics(self) -> None:
        layouts, seen = self._parts.layouts, 0
        while True:
            since, seen = seen, await layouts.news.past(seen)
            await self._arrange(layouts.changed_since(since))

    async def _follow_brokers(self) -> None:
        seen = 0
        while True:
            seen = await self._parts.live_brokers.changes.past(seen)
            # Consumers of a broker that died have lost their connections:
            # each controller judges that.
            for running in self._running.values():
                running.controller.wake.advance()

    async def _follow_policies(self) -> None:
        seen, known = 0, dict[NamespaceName, dict[str, object] | None]()
        while True:
            seen = await self._policies_changed.past(seen)
            served = {running.controller.topic.namespace for running in self._running.values()}
            found = {name: await self._lifecycle_of(name) for name in served}
            # One that is seen for the first time counts as changed: nobody knows since when.
            changed = {each for each in served if each not in known or known[each] != found[each]}
            known = found
            pace = SlicePace()
            for running in list(self._running.values()) if changed else ():
                if running.controller.topic.namespace in changed:
                    running.controller.policies_changed()
                await pace.after()

    async def _lifecycle_of(self, namespace: NamespaceName) -> dict[str, object] | None:
        try:
            policies = await self._parts.namespaces.policies(namespace)
        except MagnetarError:
            return None  # it is gone, or each controller reads it at its next tick
        return policies.scalable_topic_lifecycle_policy

    async def _arrange(self, keys: Set[str]) -> None:
        """Run the controllers of these topics that are to run here, and no others."""
        for key in list(keys):
            if self.stopping:
                return
            record = self._parts.layouts.records.get(key)
            running = self._running.get(key)
            # Over: the topic is gone, or its controller crashed, and a record
            # that came anew starts one.
            if running is not None and (running.is_over or not self._is_led(record)):
                del self._running[key]
                await running.stop()
            # Once more after the await: the leadership may be gone, or another
            # call may have started it.
            if self._is_led(record) and key not in self._running and not self.stopping:
                assert record is not None, "what is led exists"
                self._running[key] = _Running(Controller(record.topic, self._parts))
        SCALABLE_CONTROLLERS.set(len(self._running))

    def _is_led(self, record: ScalableRecord | None) -> bool:
        return record is not None and self._elections[_slot(record.name)].leading


class _Running:
    """A controller and its tasks; a crash of one topic's is not one of all."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        name = str(controller.topic)
        self._tasks = [
            asyncio.create_task(controller.state.run(), name=f"{name}: state"),
            asyncio.create_task(controller.run(), name=f"{name}: controller"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    @property
    def is_over(self) -> bool:
        return any(task.done() for task in self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("controller-crashed", error, task=task.get_name())
        # Neither is of use alone: a view that nobody reads, a controller that sees nothing.
        for each in self._tasks:
            each.cancel()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
