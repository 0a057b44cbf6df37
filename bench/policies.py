"""How long it takes until a changed policy is followed by all topics that are loaded.

    python -m bench.policies [--topics 10000]

A server in this process loads the topics, every second one with a policy of its own. A policy of
their namespace is changed again and again, and the statistics of all topics are asked for over
HTTP; meanwhile a coroutine counts how long it waits for its turn. The limit for a change is one
second; the longest turn is told beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import uvloop
from rich.console import Console

from bench.report import Row, publish
from bench.storage import scratch
from magnetar.broker.policy.namespaces import DEFAULT
from magnetar.broker.policy.policies import Policies
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.server.admin import create_admin
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig

REACH_MAX_SECONDS = 1.0
LOADED_AT_ONCE = 100
CHANGES = 5
CLOSE_SECONDS = 300.0


class Measured:
    """One piece of work: how long it took, and the longest time between two turns of the loop."""

    seconds = 0.0
    longest_turn = 0.0


@asynccontextmanager
async def measured() -> AsyncIterator[Measured]:
    found, began = Measured(), time.perf_counter()

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            found.longest_turn = max(found.longest_turn, time.perf_counter() - before)

    watching = asyncio.create_task(watch())
    try:
        yield found
    finally:
        found.seconds = time.perf_counter() - began
        watching.cancel()


def ttl(seconds: int) -> Callable[[Policies], Policies]:
    return lambda held: msgspec.structs.replace(held, message_ttl_in_seconds=seconds)


async def loaded(server: Server, count: int) -> None:
    names = [TopicName.parse(f"persistent://{DEFAULT}/t{number}") for number in range(count)]
    for at in range(0, count, LOADED_AT_ONCE):
        await asyncio.gather(*map(server.topics.get, names[at : at + LOADED_AT_ONCE]))
    await server.topics.change_topics(names[::2], own)


def own(held: Policies) -> Policies:
    return msgspec.structs.replace(held, max_producers_per_topic=9)


async def run(count: int) -> list[Row]:
    with scratch() as folder:
        # To close ten thousand topics is not what is measured: a busy disk takes its time for it.
        limits = Limits(close_seconds=CLOSE_SECONDS)
        config = ServerConfig(data=str(folder), port=0, admin_port=0, limits=limits)
        async with Server(config, create_admin=create_admin) as server:
            await loaded(server, count)
            changes = []
            for number in range(1, CHANGES + 1):
                async with measured() as change:
                    await server.topics.change_namespace(DEFAULT, ttl(number))
                changes.append(change)
                topics = server.topics.loaded.values()
                reached = {topic.policies.message_ttl_seconds for topic in topics}
                assert reached == {number}, reached
            async with aiohttp.ClientSession() as http, measured() as stats:
                url = f"{server.admin_url}/admin/v2/broker-stats/topics"
                async with http.get(url) as answer:
                    await answer.read()
    slowest = max(change.seconds for change in changes)
    turn = max(change.longest_turn for change in changes)
    many = f"{count:,} topics"
    return [
        Row(measure=f"policy reaches {many}", value=slowest, unit="s", samples=CHANGES),
        Row(measure=f"longest turn, policy of {many}", value=turn * 1000, unit="ms", samples=1),
        Row(
            measure=f"longest turn, statistics of {many}",
            value=stats.longest_turn * 1000,
            unit="ms",
            samples=1,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=10_000)
    arguments = parser.parse_args()
    rows = uvloop.run(run(arguments.topics))
    console = Console()
    for row in rows:
        console.print(f"{row.measure}: {row.value:.3f} {row.unit}")
    publish("policies", rows)
    return int(rows[0].value > REACH_MAX_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
