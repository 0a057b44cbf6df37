"""The ground of the metadata conformance kit: a world to test in, and how an item is played.

Owns: `MetadataWorld`, which a backend fills in; `MetadataKitBase`, the switches and limits of a
kit; `item`, which makes a test of a coroutine; and what the items share.

Invariants:
1. Every item gets a fresh world and leaves no store object of it open.
2. An item that waits, waits for something: with a deadline, never for a length of time.
3. No dependency on a test runner: a skip is `unittest.SkipTest`, a folder is whatever the runner
   gives for an argument named `tmp_path`.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar
from unittest import SkipTest

from magnetar.errors import MagnetarError, NotSupported
from magnetar.metadata.api import Event, Index, MetadataStore, Record, Watch

ITEMS: Final = 62
WAIT_S: Final = 20.0
"""How long an item waits for what must happen."""
QUIET_S: Final = 0.1
"""How long an item listens for what must not happen."""

_POLL_S = 0.005
# The number in a test's name is the item's: lists of exceptions and the docs go by it.
_ITEM_NAME = re.compile(r"test_(\d\d)_\w+")

Item = TypeVar("Item")


def partition_of(key: str) -> str | None:
    """The kit's partitions: what stands before ':' in the last part of a key."""
    name = key.rpartition("/")[2]
    partition, colon, _ = name.partition(":")
    return partition if colon else None


class MetadataWorld(ABC):
    """One store with its clients, made for one test.

    A backend gives `open_store`; one with a network also `cut` and `heal`. Backends that spread
    records over partitions give `partition_of` of this module to their store objects.
    """

    shared: ClassVar[bool] = True
    """Several store objects can be open at a time. If not, `connect` gives the same one again."""
    session_timeout_s: float = 6.0
    """The session timeout of the store objects."""
    watch_limit: int = 1024
    """How many events a watch keeps for a slow reader."""

    def __init__(self) -> None:
        self._stores: list[MetadataStore] = []

    @abstractmethod
    async def open_store(self) -> MetadataStore:
        """Another client of this world's store."""

    async def connect(self) -> MetadataStore:
        # An exclusive store cannot be opened twice: both "clients" are one then.
        if self.shared or not self._stores:
            self._stores.append(await self.open_store())
        return self._stores[-1]

    async def restart(self) -> None:
        """Close every store object; what is opened next finds what they left."""
        for store in self._stores:
            await store.close()
        self._stores.clear()

    async def cut(self, store: MetadataStore) -> None:
        """Break the connection of one client, until `heal`."""
        raise NotSupported("this world has no connections to cut")

    async def heal(self, store: MetadataStore) -> None:
        raise NotSupported("this world has no connections to heal")

    def batches(self) -> int | None:
        """How many times writes became durable so far; None: this cannot be seen."""
        return None

    async def close(self) -> None:
        await self.restart()


class MetadataKitBase(ABC):
    """The base of the kit: what a subclass says about its backend, and how an item is played."""

    NOT_APPLICABLE: ClassVar[Mapping[int, str]] = {}
    """Items that mean nothing for this backend, with the reason."""
    ELSEWHERE: ClassVar[Mapping[int, str]] = {}
    """Items that need more than a kit (processes, disks), with the file that tests them."""

    faults: ClassVar[bool] = False
    """The world can `cut` and `heal`."""
    durable: ClassVar[bool] = True
    """Records are still there after `MetadataWorld.restart`."""
    machine_examples: ClassVar[int] = 40
    """How many random runs the state machine of item 62 makes."""

    @abstractmethod
    def make_world(self, folder: Path) -> MetadataWorld:
        """A fresh world; `folder` is empty and its own."""

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that a test runs on."""
        return asyncio.new_event_loop()

    def play(self, name: str, body: Body, folder: Path) -> None:
        number = item_number(name)
        assert number is not None, f"{name} is not named test_NN_what"
        # A backend may do without an item, but not in silence: the runner shows the reason.
        for listed in (self.NOT_APPLICABLE, self.ELSEWHERE):
            if number in listed:
                raise SkipTest(listed[number])
        with asyncio.Runner(loop_factory=self.new_loop) as runner:
            runner.run(self._play(body, folder))

    async def _play(self, body: Body, folder: Path) -> None:
        world = self.make_world(folder)
        try:
            await body(self, world)
        finally:
            await world.close()


Body = Callable[[Any, MetadataWorld], Coroutine[Any, Any, None]]


def item(body: Body) -> Callable[[Any, Path], None]:
    """Make a test of a coroutine that is named test_NN_what and takes a world."""

    def test(self: MetadataKitBase, tmp_path: Path) -> None:
        self.play(body.__name__, body, tmp_path)

    # Not functools.wraps: a runner would look through it and ask for an argument `world`.
    test.__name__ = body.__name__
    test.__qualname__ = body.__qualname__
    test.__doc__ = body.__doc__
    test.__module__ = body.__module__
    return test


def item_number(name: str) -> int | None:
    match = _ITEM_NAME.fullmatch(name)
    return int(match[1]) if match else None


# --- what items share ---


class Caught:
    """The error that a `refuses` block raised."""

    error: Any = None


@contextmanager
def refuses(*kinds: type[MagnetarError]) -> Iterator[Caught]:
    """The block must raise one of these errors."""
    caught = Caught()
    try:
        yield caught
    # Other errors pass: the test fails with them, and not with "nothing was raised".
    except kinds as error:
        caught.error = error
        return
    names = " or ".join(kind.__name__ for kind in kinds)
    raise AssertionError(f"expected {names}, but nothing was raised")


async def eventually(holds: Callable[[], bool], *, within_s: float = WAIT_S) -> None:
    """Wait until something holds."""
    try:
        async with asyncio.timeout(within_s):
            while not holds():  # noqa: ASYNC110  any backend: there is nothing to await
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise AssertionError(f"not so within {within_s} s") from error


async def eventually_gone(store: MetadataStore, key: str, *, within_s: float = WAIT_S) -> None:
    try:
        async with asyncio.timeout(within_s):
            while await store.get(key) is not None:  # noqa: ASYNC110  the store's answer counts
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise AssertionError(f"{key} is still there after {within_s} s") from error


async def upcoming(news: AsyncIterator[Item], *, within_s: float = WAIT_S) -> Item:
    """The next item of an iterator that must give one."""
    try:
        return await asyncio.wait_for(anext(news), within_s)
    except TimeoutError as error:
        raise AssertionError(f"nothing came within {within_s} s") from error


async def drain(news: AsyncIterator[Item]) -> list[Item]:
    """Take all items until it is quiet."""
    items = []
    while True:
        try:
            # Virtual time makes the quiet free; on a real loop it is a tenth of a second.
            items.append(await asyncio.wait_for(anext(news), QUIET_S))
        except (TimeoutError, StopAsyncIteration):
            return items


async def events_until(watch: Watch[Event], *, key: str) -> list[Event]:
    """Events up to the first one of `key`, that one included."""
    events = [await upcoming(watch)]
    while events[-1].key != key:
        events.append(await upcoming(watch))
    return events


async def value_of(store: MetadataStore, key: str) -> bytes | None:
    record = await store.get(key)
    return None if record is None else record.value


async def names_of(store: MetadataStore, parent: str, *bounds: str) -> list[str]:
    return [key.rpartition("/")[2] for key in await store.scan_keys(parent, *bounds)]


async def indexed_keys(
    store: MetadataStore, index: str, low: str | None = None, high: str | None = None
) -> list[str]:
    return sorted([record.key async for record in store.scan_index(index, low, high)])


async def everything(store: MetadataStore, parent: str) -> dict[str, Record]:
    return {record.key: record async for record in store.scan(parent)}


async def index_is_consistent(store: MetadataStore, parent: str, index: str) -> None:
    """Each record of the directory has exactly the one entry that its value names."""
    by_index = {record.key async for record in store.scan_index(index)}
    by_directory = set(await store.scan_keys(parent))
    assert by_index == by_directory, (by_index - by_directory, by_directory - by_index)


def entry(name: str, key: str) -> tuple[Index]:
    return (Index(name, key),)
