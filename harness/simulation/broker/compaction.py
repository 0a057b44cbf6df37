"""Compacts topics of a simulated broker, and compares their views with what was sent.

Owns: the actor `compact`, which begins one run after the other; `hold_all`, by which nothing is
trimmed from the first message on that was not compacted; and `compare_view`.

Invariants:
1. The story is told of a run's horizon only after the run reported its success.
2. A view is compared while no run is under way; after that it is compacted once more now and then,
   with nothing published meanwhile, and compared again.

Relies on: `views`, where it is computed what a reader may see.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final

from harness.simulation.broker.history import NOWHERE, TopicStory
from harness.simulation.broker.log_reader import read_log
from harness.simulation.broker.views import wrong_with
from harness.simulation.broker.world import BrokerWorld
from magnetar.broker.topic.topic import Topic
from magnetar.errors import MagnetarError
from magnetar.model.ids import Position
from magnetar.model.names import TopicName

_AGAIN: Final = 0.4
"""How many comparisons have a run and a second look."""
_TRIES_MAX: Final = 60


async def compact(world: BrokerWorld, random: Random, story: TopicStory) -> None:
    """Begin a run of compaction again and again, whatever else is done to the topic."""
    while not world.over:
        await asyncio.sleep(random.expovariate(3))
        topic = _loaded(world, story)
        if topic is None or world.over:
            continue
        try:
            await _run(world, story, topic)
        except MagnetarError as error:
            world.failed(f"compaction of {story.name}", error)


async def _run(world: BrokerWorld, story: TopicStory, topic: Topic) -> bool:
    """One run, to its end; whether it succeeded."""
    # What clients know is stored and visible: a run that begins now looks at all of it.
    horizon = max(story.at, default=NOWHERE)
    world.findings.operations += 1
    topic.compaction.begin()
    world.note(f"{story.name} is being compacted, up to {horizon} at least")
    await topic.compaction.ended()
    if world.disk.is_stopped:
        return False
    report = topic.compaction.report
    world.note(f"{story.name}: {report.status}, {report.removed} removed, {report.last_error}")
    if report.status != "SUCCESS":
        return False
    story.horizon_min = max(story.horizon_min, horizon)
    return True


async def hold_all(world: BrokerWorld, story: TopicStory) -> None:
    """Have nothing trimmed from now on that was not compacted."""
    for _ in range(_TRIES_MAX):
        topic = _loaded(world, story)
        try:
            if topic is not None:
                await topic.compaction.keep_all()
                return
        except MagnetarError as error:
            world.failed(f"compaction of {story.name}", error)
        await asyncio.sleep(1.0)  # a disk that was full has room again


async def compare_view(
    world: BrokerWorld, random: Random, story: TopicStory, log: list[Position]
) -> None:
    """Read what is compacted, and see that it is right (invariant 2)."""
    topic = _loaded(world, story)
    if topic is not None:
        await topic.compaction.ended()
    await _compare(world, story, log, "view-reader")
    topic = _loaded(world, story)
    if topic is None or world.disk.is_stopped or random.random() >= _AGAIN:
        return
    done = await _run(world, story, topic)
    if world.disk.is_stopped:
        return
    if not done and not world.disk.plan.faults and not world.has_failed:
        world.findings.broken(f"{story.name} is not compacted: {topic.compaction.report}")
    await _compare(world, story, log, "second-view-reader")


async def _compare(world: BrokerWorld, story: TopicStory, log: list[Position], reader: str) -> None:
    client = await world.connect()
    view = await read_log(world, client, story.name, name=reader, compacted=True)
    if world.disk.is_stopped:
        return
    world.note(f"{story.name} has {len(view)} of {len(log)} entries in its view")
    wrong = wrong_with(story, log, view)
    if wrong:
        world.findings.broken(f"{story.name}: {wrong}")


def _loaded(world: BrokerWorld, story: TopicStory) -> Topic | None:
    topic = world.server.topics.loaded.get(TopicName.parse(story.name))
    if not isinstance(topic, Topic) or topic.closing or topic.lost is not None:
        return None
    return topic
