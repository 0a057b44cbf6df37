"""Conformance items 38-46: watches."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Mapping

from magnetar.metadata.api import Event, EventKind, MetadataStore, Record, Watch
from magnetar.metadata.recipes import TableView
from magnetar.testing.kits.metadata_base import (
    WAIT_S,
    MetadataKitBase,
    MetadataWorld,
    drain,
    events_until,
    eventually,
    everything,
    item,
    upcoming,
)

LOAD_SEED = 40
LOAD_WRITES = 400


def _collapsed(events: list[Event]) -> list[EventKind]:
    """The kinds, an event that was told twice in a row counted once."""
    kinds: list[EventKind] = []
    for position, event in enumerate(events):
        if position == 0 or event != events[position - 1]:
            kinds.append(event.kind)
    return kinds


async def _load(store: MetadataStore, seed: int) -> None:
    """Random writes in one directory."""
    choose = random.Random(seed)
    for n in range(LOAD_WRITES):
        key = f"/load/{choose.randrange(40):02d}"
        # On forty keys only: puts, deletes and ranges of several writers meet all the time.
        kind = choose.randrange(10)
        if kind < 6:
            await store.put(key, b"%d-%d" % (seed, n))
        elif kind < 9:
            await store.delete(key)
        else:
            low = choose.randrange(40)
            await store.delete_range("/load", f"{low:02d}", f"{low + 3:02d}")


class WatchItems(MetadataKitBase):
    """Watches."""

    @item
    async def test_38_events_of_a_key(self, world: MetadataWorld) -> None:
        store = await world.connect()
        writer = await world.connect()
        async with store.watch(key="/k/watched") as watch:
            created = await writer.put("/k/watched", b"1")
            # A sibling and, later, a child: not the key that is watched.
            await writer.put("/k/other", b"")
            modified = await writer.put("/k/watched", b"2")
            await writer.delete("/k/watched")
            await writer.put("/k/watched/below", b"")
            events = await drain(watch)
        assert _collapsed(events) == [EventKind.CREATED, EventKind.MODIFIED, EventKind.DELETED]
        assert {event.key for event in events} == {"/k/watched"}
        versions = [event.version for event in events if event.kind is not EventKind.DELETED]
        assert set(versions) == {created.version, modified.version}

    @item
    async def test_39_events_of_a_directory(self, world: MetadataWorld) -> None:
        store = await world.connect()
        writer = await world.connect()
        async with store.watch(parent="/dir") as watch, store.watch(parent="") as top:
            await writer.put("/dir", b"")
            await writer.put("/dir/a", b"")
            await writer.put("/dir/a/below", b"")
            await writer.put("/dir0", b"")
            await writer.append("/dir/seq", b"")
            await writer.delete("/dir/a")
            await writer.put("/dir/end", b"")
            events = await events_until(watch, key="/dir/end")
            assert {event.key for event in await drain(top)} == {"/dir", "/dir0"}
        keys = [event.key for event in events if not event.key.startswith("/dir/seq-")]
        assert keys == ["/dir/a", "/dir/a", "/dir/end"]
        assert len(events) == 4

    @item
    async def test_40_watch_then_scan_has_no_gap(self, world: MetadataWorld) -> None:
        store = await world.connect()
        writer = await world.connect()
        await _load(writer, LOAD_SEED)
        view = TableView(store, "/load")
        following = asyncio.ensure_future(view.run())
        try:
            # Two writers, one of them through the watched store object itself.
            await asyncio.gather(_load(writer, LOAD_SEED + 1), _load(store, LOAD_SEED + 2))
            await view.loaded(timeout_s=WAIT_S)
            final = await everything(writer, "/load")
            await eventually(lambda: _plain(view.records) == _plain(final))
        finally:
            following.cancel()

    @item
    async def test_41_delete_range_is_seen(self, world: MetadataWorld) -> None:
        store = await world.connect()
        writer = await world.connect()
        for name in "abcd":
            await writer.put(f"/rng/{name}", b"")
        async with (
            store.watch(parent="/rng") as directory,
            store.watch(key="/rng/b") as inside,
            store.watch(key="/rng/d") as outside,
        ):
            await writer.delete_range("/rng", "b", "d")
            await writer.put("/rng/end", b"")
            gone = set()
            for event in await events_until(directory, key="/rng/end"):
                # A backend may tell a range as one event or key by key; a reader understands both.
                if event.kind is EventKind.RANGE_DELETED:
                    assert event.end is not None
                    gone |= {key for key in ("/rng/b", "/rng/c") if event.key <= key < event.end}
                elif event.kind is EventKind.DELETED:
                    gone.add(event.key)
            assert gone == {"/rng/b", "/rng/c"}
            kinds = {event.kind for event in await drain(inside)}
            assert kinds
            assert kinds <= {EventKind.DELETED, EventKind.RANGE_DELETED}
            assert await drain(outside) == []

    @item
    async def test_42_an_event_is_readable(self, world: MetadataWorld) -> None:
        store = await world.connect()
        writer = await world.connect()
        async with store.watch(parent="/read") as watch:
            writes = [writer.put(f"/read/{n:03d}", b"%d" % n) for n in range(200)]
            for _ in range(200):
                # Told after the fact, never before: whoever reads at once finds it.
                event = await upcoming(watch)
                record = await store.get(event.key)
                assert record is not None, f"{event.key} was announced and is not there"
                assert record.version == event.version
            await asyncio.gather(*writes)

    @item
    async def test_43_slow_reader_gets_resync(self, world: MetadataWorld) -> None:
        store = await world.connect()
        async with store.watch(parent="/slow") as watch:
            # Twice over the limit: one RESYNC stands for all that was dropped.
            for _ in range(2):
                puts = [store.put(f"/slow/{n}", b"") for n in range(2 * world.watch_limit + 10)]
                await asyncio.gather(*puts)
            events = await drain(watch)
            assert len(events) <= world.watch_limit + 1
            assert events[0].kind is EventKind.RESYNC
            assert [event.kind for event in events].count(EventKind.RESYNC) == 1
            await store.put("/slow/again", b"")
            assert (await events_until(watch, key="/slow/again"))[-1].kind is EventKind.CREATED

    @item
    async def test_44_cut_connection_is_told(self, world: MetadataWorld) -> None:
        store = await world.connect()
        writer = await world.connect()
        async with store.watch(parent="/cut") as directory, store.watch(key="/cut/a") as one:
            await writer.put("/cut/a", b"1")
            await events_until(directory, key="/cut/a")
            await world.cut(store)
            await writer.put("/cut/a", b"2")
            await writer.put("/cut/b", b"")
            await world.heal(store)
            for watch, missed in ((directory, {"/cut/a", "/cut/b"}), (one, {"/cut/a"})):
                events = await drain(watch)
                # Either what was missed comes later, or a RESYNC asks to
                # read again; silence is the bug.
                resync = any(event.kind is EventKind.RESYNC for event in events)
                assert resync or missed <= {event.key for event in events}
            await writer.put("/cut/c", b"")
            assert (await events_until(directory, key="/cut/c"))[-1].kind is EventKind.CREATED

    @item
    async def test_46_closing_a_watch(self, world: MetadataWorld) -> None:
        store = await world.connect()
        watch = store.watch(parent="/closed")
        await store.put("/closed/a", b"")
        watch.close()
        watch.close()
        await store.put("/closed/b", b"")
        assert [event async for event in watch] == [], "a closed watch delivers nothing"
        # Closed watches must be let go: a store that keeps them would grow without end.
        alive: weakref.WeakSet[Watch[Event] | Watch[str]] = weakref.WeakSet()
        for n in range(1000):
            opened = (
                store.watch(parent=f"/closed/{n % 10}"),
                store.watch(key=f"/closed/{n}"),
                store.watch_sequence(f"/closed/{n % 10}"),
            )
            alive.update(opened)
            for one in opened:
                one.close()
        del opened, one
        await asyncio.sleep(0)
        gc.collect()
        assert len(alive) == 0
        # A reader in the middle of its wait is woken, and its loop ends.
        waiting = asyncio.ensure_future(_next_or_end(store.watch(key="/closed/a")))
        await asyncio.sleep(0)
        await store.close()
        assert await asyncio.wait_for(waiting, WAIT_S) is None, "closing the store ends its watches"


async def _next_or_end(watch: Watch[Event]) -> Event | None:
    async for event in watch:
        return event
    return None


def _plain(records: Mapping[str, Record]) -> dict[str, tuple[int, bytes]]:
    """Version and value of each record: what does not depend on who looks."""
    return {key: (record.version, record.value) for key, record in records.items()}
