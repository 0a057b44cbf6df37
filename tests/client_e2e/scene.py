"""What a story of the suite has: a client, topics of its own, and the administration of them.

Owns: `play`, which runs one story against a target; `Scene`, and what stories say again and again:
`send`, `drain`, `by_key`, `silence`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from itertools import count
from typing import Any, Final, TypeVar

import pytest

from harness.limits import PATIENCE_S, within
from magnetar import Client, InitialPosition, Message, Producer, TransactionState
from magnetar.client.consume.receiving import Receiving
from magnetar.client.transaction.transaction import Transaction
from tests.client_e2e.target import Feature, Target

FIRST: Final = InitialPosition.EARLIEST

COMES_S: Final = PATIENCE_S
"""For what must come: long, because machines are busy."""
LEAVES_S: Final = PATIENCE_S
"""Until the place of a member that left is free: Pulsar keeps it for a minute."""
_quiet_s: ContextVar[float] = ContextVar("quiet_s")
"""For what must not come."""

T = TypeVar("T")
_names = count(1)


class Scene:
    """One test's place at a server."""

    def __init__(self, target: Target, client: Client) -> None:
        self.target = target
        self.client = client

    @property
    def namespace(self) -> str:
        return self.target.namespace

    def new_name(self, what: str = "t") -> str:
        return f"{what}-{next(_names)}"

    async def regular(self, partitions: int = 0, *, namespace: str | None = None) -> str:
        """A new regular topic."""
        name = f"{namespace or self.namespace}/{self.new_name('regular')}"
        if partitions:
            await self.administer("PUT", f"persistent/{name}/partitions", partitions)
        return f"persistent://{name}"

    async def scalable(self, segments: int = 1, *, namespace: str | None = None) -> str:
        """A new scalable topic."""
        name = f"{namespace or self.namespace}/{self.new_name('scalable')}"
        if segments > 1 or Feature.ADMINISTRATION in self.target.features:
            await self.administer("PUT", f"scalable/{name}?numInitialSegments={segments}")
        return f"topic://{name}"

    async def topic(self, kind: str, parts: int = 1, *, namespace: str | None = None) -> str:
        """A new topic: `topic`, with so many segments, or `persistent`, with so many partitions."""
        if kind == "topic":
            return await self.scalable(parts, namespace=namespace)
        return await self.regular(0 if parts == 1 else parts, namespace=namespace)

    async def split(self, topic: str, segment: int) -> None:
        await self.administer("POST", f"{_scalable_path(topic)}/split/{segment}")

    async def merge(self, topic: str, *segments: int) -> None:
        parts = "/".join(map(str, segments))
        await self.administer("POST", f"{_scalable_path(topic)}/merge/{parts}")

    async def active(self, topic: str) -> list[int]:
        """The ids of the active segments, in the order of their ranges."""
        layout = await self.administer("GET", _scalable_path(topic))
        active = [each for each in layout["segments"].values() if each["state"] == "ACTIVE"]
        return [each["segmentId"] for each in sorted(active, key=_range_start)]

    async def unload(self) -> None:
        """Every topic of the namespace is loaded anew."""
        await self.administer("PUT", f"namespaces/{self.namespace}/unload")

    async def administer(self, method: str, path: str, body: object = None) -> Any:
        return await asyncio.to_thread(self.target.administer, method, path, body)


def _scalable_path(topic: str) -> str:
    return "scalable/" + topic.removeprefix("topic://")


def _range_start(segment: dict[str, Any]) -> int:
    start: int = segment["hashRange"]["start"]
    return start


Story = Callable[[Scene], Awaitable[None]]


def play(target: Target, story: Story, **options: Any) -> None:
    """Run a story with a client; afterwards nothing of the client is left."""

    async def scene() -> None:
        _quiet_s.set(target.quiet_s)
        async with target.client(**options) as client:
            await story(Scene(target, client))
        assert client._connections.count == 0
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, left

    asyncio.run(scene())


async def send(
    producer: Producer[bytes],
    numbers: Iterable[int],
    *,
    keys: int = 7,
    txn: Transaction | None = None,
) -> None:
    """The numbers as payloads, each with one of a few keys; all are stored afterwards."""
    for number in numbers:
        await producer.submit(b"%d" % number, key=f"k{number % keys}", txn=txn)
    await producer.flush()


async def drain(
    consumer: Receiving[T], count: int, ack: Any = None, *, within: float = COMES_S
) -> list[Message[T]]:
    """So many messages; each is acknowledged as it comes, if told how."""
    found: list[Message[T]] = []
    while len(found) < count:
        got = await consumer.receive_many(count - len(found), timeout=within)
        assert got, f"only {len(found)} of {count} came: {[each.data for each in found]}"
        for message in got:
            found.append(message)
            if ack is not None:
                ack(message)
    return found


async def silence(consumer: Receiving[Any], seconds: float | None = None) -> None:
    """Nothing comes for so long; unless told, as long as such a server may take."""
    came = await consumer.receive_many(1, timeout=seconds or _quiet_s.get())
    assert not came, f"{came[0]!r} came: {came[0].data!r}"


async def until(condition: Callable[[], bool]) -> None:
    """What a server does in its own time is looked for again and again."""
    async with within("what a server does in its own time", COMES_S):
        while not condition():  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.1)


def numbers(messages: Iterable[Message[bytes]]) -> list[int]:
    return sorted(int(message.value) for message in messages)


def in_order(messages: Iterable[Message[bytes]]) -> bool:
    """Whether each key has its numbers in ascending order."""
    found: dict[str | None, list[int]] = defaultdict(list)
    for message in messages:
        found[message.key].append(int(message.value))
    return all(values == sorted(values) for values in found.values())


def ends_as(txn: Transaction, state: TransactionState) -> None:
    assert txn.state is state, txn.state


needs = pytest.mark.needs
ON_SCALABLE: Final = needs(Feature.SCALABLE_TOPICS)
CHANGES: Final = needs(Feature.SCALABLE_TOPICS, Feature.ADMINISTRATION)
"""Topics of several segments, splits and merges."""
KINDS: Final = (pytest.param("topic", marks=ON_SCALABLE), "persistent")
STREAMED: Final = (
    pytest.param(("topic", 3), marks=CHANGES, id="topic"),
    pytest.param(("persistent", 1), marks=needs(Feature.STREAMS_OF_REGULAR), id="persistent"),
    pytest.param(
        ("persistent", 3),
        marks=needs(Feature.STREAMS_OF_REGULAR, Feature.ADMINISTRATION),
        id="partitioned",
    ),
)
"""Topics that stream consumers take."""
KINDS_WITH_PARTS: Final = (
    pytest.param(("topic", 3), marks=CHANGES, id="topic"),
    pytest.param(("persistent", 1), id="persistent"),
    pytest.param(("persistent", 3), marks=needs(Feature.ADMINISTRATION), id="partitioned"),
)
