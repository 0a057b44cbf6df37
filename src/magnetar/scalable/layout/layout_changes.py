"""Carrying out a layout change: what each step does to the segments.

Owns: `LayoutChanges`: from the record of a topic, wherever its change stands, to its end.

A change is carried out by whoever leads the topic, from the record alone. If that one stops (or
dies) at any await, the next one repeats the step: `SegmentHost` calls can be repeated, and the
record moves on by compare-and-set. Two controllers at once do the same things; one of them stores.

The order is what keeps the promises:
1. Subscriptions that are recorded are established before children are made, and every child has
   the cursor of each of them before anything is sealed: nobody misses a message in a child.
2. Parents are sealed before their children are shown: a child has no message older, by key, than
   the last one of its parents.
3. Before the first of these, and as long as that may wait, no transaction is open that could send
   to the parents (`txn_barrier`): the layout that is shown at the end makes clients fail such
   sends.
4. Children inherit the sequences of all their parents before they are shown: a repeated send finds
   out that it was stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from functools import reduce
from typing import Final, TypeVar

from magnetar.broker.publish.lineage import NO_LINEAGE, Lineage
from magnetar.errors import MagnetarError, StoreClosed
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import (
    SCALABLE_CHANGE_SECONDS,
    SCALABLE_CHANGES,
    SCALABLE_MERGES,
    SCALABLE_SEALED_SEGMENTS,
    SCALABLE_SPLITS,
)
from magnetar.scalable.layout import changes
from magnetar.scalable.layout.segments import CursorWanted, SegmentHost
from magnetar.scalable.layout.subscriptions import Subscriptions
from magnetar.scalable.layout.txn_barrier import TransactionBarrier
from magnetar.scalable.records import LayoutChange, ScalableRecord, segment_topic
from magnetar.scalable.store import ScalableStore

Result = TypeVar("Result")

# Clients keep sending to the parents meanwhile, so it may take its time; then the
# change gives way to others.
PREPARE_SECONDS: Final = 10.0
"""How long the making of children is tried before it is undone."""

_PAUSE_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 0.1
"""While a change waits for transactions, its controller sees to other things so often."""

_LOG: Final = logger(__name__)


class LayoutChanges:
    """The changes of one topic."""

    def __init__(
        self,
        topic: TopicName,
        store: ScalableStore,
        host: SegmentHost,
        subscriptions: Subscriptions,
        txn_barrier: TransactionBarrier,
        clock: Clock,
    ) -> None:
        self._topic = topic
        self._store = store
        self._host = host
        self._subscriptions = subscriptions
        self._barriers = txn_barrier
        self._clock = clock

    async def carry_out(self, record: ScalableRecord) -> ScalableRecord | None:
        """Bring the change of a record to its end; None: the topic is gone.

        Superseded if another controller moved it on. A record that still has a change waits for
        transactions: nothing was done yet, and this is to be called again.
        """
        present: ScalableRecord | None = record
        began = self._clock.monotonic()
        # Each round is one step of the record, and what it does can be repeated: a crash anywhere
        # in here is a round that begins anew.
        while present is not None and present.change is not None:
            change = present.change
            match change.step:
                case "prepare":
                    # Back to the controller, which sees to consumers
                    # meanwhile, and comes back soon.
                    if not await self._is_undisturbed(change):
                        return present
                    present = await self._prepare(present, change)
                case "seal":
                    present = await self._seal(change)
                case "undo":
                    present = await self._undo(change)
                case "delete":
                    present = await self._delete(present, change)
            if present is None or present.change is None:
                _count(change, self._clock.monotonic() - began)
        return present

    # --- steps

    async def _is_undisturbed(self, change: LayoutChange) -> bool:
        """Whether its parents can be sealed without harm to transactions, or have to be."""
        # A new topic seals nothing that a transaction could write to.
        if change.after is None or not change.parents:
            return True
        parents = [self._name(each) for each in self._segments(change, change.parents)]
        return await self._barriers.granted(self._topic, change.after.epoch, parents, _LOOK_SECONDS)

    async def _prepare(self, record: ScalableRecord, change: LayoutChange) -> ScalableRecord | None:
        deadline = self._clock.monotonic() + PREPARE_SECONDS
        # Up to here nothing is visible to clients: it may be tried again, or undone
        # (invariant 3 of `changes`).
        while True:
            try:
                await self._make_children(record, change)
                return await self._store.step(self._topic, change, changes.prepared)
            except StoreClosed:
                raise
            except MagnetarError as error:
                _LOG.warning("segments-not-prepared", topic=str(self._topic), error=str(error))
                # It cannot succeed, or has had its time: back to where it was, and
                # others may change the topic.
                if not error.retryable or self._clock.monotonic() >= deadline:
                    return await self._go_back(change, str(error))
            await self._clock.sleep(_PAUSE_SECONDS)

    async def _go_back(self, change: LayoutChange, reason: str) -> ScalableRecord | None:
        return await self._store.step(
            self._topic, change, lambda record: changes.begin_undo(record, reason)
        )

    async def _make_children(self, record: ScalableRecord, change: LayoutChange) -> None:
        # Promise 1: who has subscribed by now gets a cursor on the children. Later ones are
        # established after the commit, on the children themselves.
        if record.layout is not None:
            await self._subscriptions.keep(record.layout.layout())
        known = await self._subscriptions.all()
        wanted = [
            # From the beginning: children are empty now, and every message in them
            # comes after the parent's.
            CursorWanted(each.name, "earliest", each.properties)
            for each in known
            if each.established and not each.deleting
        ]
        children = self._segments(change, change.children)
        await all_done(self._host.prepare(self._name(each), wanted) for each in children)

    async def _seal(self, change: LayoutChange) -> ScalableRecord | None:
        parents = self._segments(change, change.parents)
        children = self._segments(change, change.children)
        # Promise 2. From the first seal on the change can only be committed;
        # producers wait for that.
        lineages = await all_done(self._host.seal(self._name(each)) for each in parents)
        # Regular topics had subscriptions of their own, which no record knew of.
        if change.kind == "migrate":
            await self._copy_subscriptions(parents, children)
            if len(parents) == 1:
                # Clients call their producer on a regular topic as on a segment of that number.
                # Of several partitions nobody could say later which one a message was sent to.
                lineages = [each.renamed(_without_segment) for each in lineages]
        # Promise 4, by part of the ring: a child knows only what was sent for its own keys.
        known = reduce(Lineage.merged, lineages, NO_LINEAGE)
        await all_done(
            self._host.inherit(self._name(each), known.clipped(each.hash_range))
            for each in children
        )
        return await self._store.step(self._topic, change, changes.sealed)

    async def _copy_subscriptions(
        self, parents: Iterable[Segment], children: Iterable[Segment]
    ) -> None:
        """What regular topics had: now that they are terminated there will be no more."""
        found = await all_done(self._host.cursors(self._name(each)) for each in parents)
        by_name = {cursor.name: cursor for cursors in found for cursor in cursors}
        for cursor in by_name.values():
            await self._subscriptions.record_copied(cursor, self._clock.now_ms())
        # What the partitions still hold is read there, so the new segments are read whole.
        wanted = [CursorWanted(each.name, "earliest", each.properties) for each in by_name.values()]
        names = [self._name(each) for each in children]
        await all_done(self._host.add_cursors(name, wanted) for name in names)

    async def _undo(self, change: LayoutChange) -> ScalableRecord | None:
        children = self._segments(change, change.children)
        await all_done(self._host.delete(self._name(each)) for each in children)
        return await self._store.step(self._topic, change, changes.undone)

    async def _delete(self, record: ScalableRecord, change: LayoutChange) -> ScalableRecord | None:
        # The record goes last: as long as it is there, this step is repeated.
        await all_done(self._host.delete(TopicName.parse(name)) for name in record.garbage)
        await self._host.forget_schema(self._topic)
        await self._host.forget_partitions(self._topic)
        await self._store.forget(self._topic)
        return await self._store.step(self._topic, change, lambda _: None)

    # --- parts

    def _segments(self, change: LayoutChange, ids: Iterable[int]) -> list[Segment]:
        assert change.after is not None, "a deletion has no segments to come"
        layout: SegmentLayout = change.after.layout()
        return [layout.segment(each) for each in ids]

    def _name(self, segment: Segment) -> TopicName:
        return segment_topic(self._topic, segment)


def _without_segment(producer: str) -> str:
    return producer.removesuffix("-seg-0")


def _count(change: LayoutChange, seconds: float) -> None:
    """A change has come to its end, at the step that it was at last."""
    # Only an undo is a failure: any other last step has done what was asked for.
    outcome = "undone" if change.step == "undo" else "done"
    SCALABLE_CHANGES.labels(change.kind, outcome).inc()
    if outcome == "undone":
        return
    SCALABLE_CHANGE_SECONDS.labels(change.kind).observe(seconds)
    SCALABLE_SEALED_SEGMENTS.inc(len(change.parents))
    if change.kind == "split":
        SCALABLE_SPLITS.labels(change.cause).inc()
    elif change.kind == "merge":
        SCALABLE_MERGES.labels(change.cause).inc()


async def all_done(work: Iterable[Awaitable[Result]]) -> list[Result]:
    """Do it all at once; every one has come to its end before the first error is raised."""
    # All of them first: an error must not leave calls running that a repeated step would meet.
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
