"""Watches: who hears what, bounded queues, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import pytest

from magnetar.errors import InvalidArgument, StoreClosed
from magnetar.metadata.api import Event, EventKind, SessionEvent
from magnetar.metadata.judge import sequence_key
from magnetar.metadata.watches import RESYNC, SESSION_QUEUE_LIMIT, SessionFeeds, Watchers
from magnetar.runtime.metrics import METADATA_WATCH_RESYNCS
from magnetar.testing.virtual.virtual_time import run
from tests.unit.runtime.counting import counted

Item = TypeVar("Item")


def created(key: str) -> Event:
    return Event(EventKind.CREATED, key, 1)


async def waiting(news: AsyncIterator[Item]) -> list[Item]:
    """What is in the queue of a watch now."""
    found = []
    while True:
        try:
            found.append(await asyncio.wait_for(anext(news), 1))
        except (TimeoutError, StopAsyncIteration):
            return found


def test_each_watch_hears_its_own() -> None:
    async def main() -> None:
        watchers = Watchers()
        key = watchers.watch(key="/d/a")
        directory = watchers.watch(parent="/d")
        top = watchers.watch(parent="")
        for path in ("/d", "/d/a", "/d/b", "/d/a/c", "/e/a"):
            watchers.publish(created(path))
        assert await waiting(key) == [created("/d/a")]
        assert await waiting(directory) == [created("/d/a"), created("/d/b")]
        assert await waiting(top) == [created("/d")]

    run(main())


def test_a_range_reaches_the_keys_in_it() -> None:
    async def main() -> None:
        watchers = Watchers()
        inside, outside = watchers.watch(key="/d/b"), watchers.watch(key="/d/c")
        directory = watchers.watch(parent="/d")
        event = Event(EventKind.RANGE_DELETED, "/d/a", end="/d/c")
        watchers.publish(event)
        assert await waiting(inside) == [Event(EventKind.DELETED, "/d/b")]
        assert await waiting(outside) == []
        assert await waiting(directory) == [event]
        watchers.publish(Event(EventKind.RANGE_DELETED, "/d/"))
        assert await waiting(outside) == [Event(EventKind.DELETED, "/d/c")]

    run(main())


def test_a_slow_reader_gets_one_resync() -> None:
    async def main() -> None:
        watchers = Watchers(limit=3)
        before = counted(METADATA_WATCH_RESYNCS)
        watch = watchers.watch(parent="/d")
        for n in range(4):
            watchers.publish(created(f"/d/{n}"))
        watchers.publish(created("/d/later"))
        assert await waiting(watch) == [RESYNC, created("/d/later")]
        assert counted(METADATA_WATCH_RESYNCS) == before + 1
        for n in range(20):
            watchers.publish(created(f"/d/{n}"))
        events = await waiting(watch)
        assert events[0] == RESYNC
        assert events.count(RESYNC) == 1
        assert len(events) <= 3

    run(main())


def test_a_waiting_reader_wakes() -> None:
    async def main() -> None:
        watchers = Watchers()
        watch = watchers.watch(key="/a")
        reader = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        watchers.publish(created("/a"))
        assert await reader == created("/a")

    run(main())


def test_closing_ends_the_iteration_and_leaves_nothing() -> None:
    async def main() -> None:
        watchers = Watchers()
        watches = [
            watchers.watch(key="/a"),
            watchers.watch(parent=""),
            watchers.watch(key="/a"),
        ]
        sequence = watchers.watch_sequence("/a", None)
        assert len(watchers) == 4
        watchers.publish(created("/a"))
        reader = asyncio.ensure_future(waiting(sequence))
        await asyncio.sleep(0)
        for _ in range(2):
            for watch in watches:
                watch.close()
            sequence.close()
        assert len(watchers) == 0
        watchers.publish(created("/a"))
        assert [await waiting(watch) for watch in watches] == [[], [], []]
        assert await reader == []

    run(main())


def test_close_all() -> None:
    async def main() -> None:
        watchers = Watchers()
        watches = [watchers.watch(key="/a"), watchers.watch(parent="/d")]
        sequence = watchers.watch_sequence("/s", "/s-1")
        watchers.close_all()
        assert len(watchers) == 0
        assert [await waiting(watch) for watch in watches] == [[], []]
        assert await waiting(sequence) == []
        with pytest.raises(StoreClosed):
            watchers.watch(key="/a")
        with pytest.raises(StoreClosed):
            watchers.watch_sequence("/a", None)

    run(main())


def test_sequence_watch_keeps_the_latest() -> None:
    async def main() -> None:
        watchers = Watchers()
        keys = [sequence_key("/q/s", [n]) for n in range(1, 6)]
        watch = watchers.watch_sequence("/q/s", keys[0])
        assert await waiting(watch) == [keys[0]]
        for key in keys[1:4]:
            watchers.publish(created(key))
        watchers.publish(created(sequence_key("/q/s2", [9])))
        watchers.publish(created("/q/s-9"))
        watchers.publish(Event(EventKind.MODIFIED, keys[4], 1))
        assert await waiting(watch) == [keys[3]]
        watchers.publish(created(keys[1]))
        assert await waiting(watch) == [], "below the highest: no news"
        for deletion in (
            Event(EventKind.DELETED, keys[3]),
            Event(EventKind.RANGE_DELETED, "/q/s-", end="/q/s."),
        ):
            watchers.publish(deletion)
            watchers.publish(created(keys[1]))
            assert await waiting(watch) == [keys[1]], "a number may come back after a delete"

    run(main())


def test_resync_all() -> None:
    async def main() -> None:
        watchers = Watchers()
        watches = [watchers.watch(key="/a"), watchers.watch(parent="/d")]
        sequence = watchers.watch_sequence("/q/s", None)
        watchers.publish(created("/a"))
        watchers.resync_all({"/q/s": "/q/s-5"}.get)
        assert [await waiting(watch) for watch in watches] == [[RESYNC], [RESYNC]]
        assert await waiting(sequence) == ["/q/s-5"]
        watchers.resync_all()
        assert await waiting(sequence) == []

    run(main())


def test_a_queue_needs_room() -> None:
    with pytest.raises(InvalidArgument):
        Watchers(limit=0)


def test_session_feed() -> None:
    async def main() -> None:
        feeds = SessionFeeds()
        feeds.say(SessionEvent.SUSPENDED)
        feed = feeds.open()
        feeds.say(SessionEvent.SUSPENDED)
        feeds.say(SessionEvent.CONNECTED)
        assert await waiting(feed) == [SessionEvent.SUSPENDED, SessionEvent.CONNECTED]
        feeds.close_all()
        assert await waiting(feed) == []
        assert await waiting(feeds.open()) == []

    run(main())


def test_a_slow_reader_of_the_session_learns_of_a_loss() -> None:
    async def main() -> None:
        feeds = SessionFeeds()
        feed = feeds.open()
        for _ in range(SESSION_QUEUE_LIMIT):
            feeds.say(SessionEvent.LOST)
            feeds.say(SessionEvent.REESTABLISHED)
        states = await waiting(feed)
        assert len(states) <= SESSION_QUEUE_LIMIT
        assert SessionEvent.LOST in states
        assert states[-1] is SessionEvent.REESTABLISHED

    run(main())
