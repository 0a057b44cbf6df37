"""The simulation of scalable topics finds what it is for: each test takes one rule away.

A rule is taken away by patching it from here; the product has no switch for it. That the same seeds
find nothing with the rule in place is shown by `test_scalable_seeds.py` and `make sim`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from harness.simulation.scalable.run import simulate_scalable
from magnetar.broker.api import SubscribeRequest
from magnetar.broker.dispatch.delay_rule import DelayRule
from magnetar.broker.dispatch.delayed_index import DelayedIndex
from magnetar.broker.publish.lineage import Lineage
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.topic import Topic
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.segments import NEVER, Segment, SegmentLayout
from magnetar.scalable.groups import assignment, group_records, sessions
from magnetar.scalable.groups.sessions import ConsumerSession
from magnetar.scalable.layout import changes
from magnetar.scalable.layout.drains import Drains
from magnetar.scalable.layout.layout_changes import LayoutChanges
from magnetar.scalable.layout.segments import CursorWanted, LocalSegments
from magnetar.scalable.records import (
    DrainedRecord,
    GroupRecord,
    LayoutChange,
    ScalableRecord,
    drained_key,
    segment_topic,
)
from magnetar.scalable.service import ScalableTopics
from tests.simulation.search import hinted

pytestmark = pytest.mark.slow

SEEDS = 60


def _is_caught(
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    delay: Callable[[pytest.MonkeyPatch], None] = lambda _: None,
    *,
    first: int = 0,
) -> None:
    """Some seed sees it, and says this; with the rule in place the same seed finds nothing.

    `delay` makes something slow that always may be, with the rule and without it.
    """
    delay(monkeypatch)
    others: list[str] = []
    for seed in hinted(SEEDS, first):
        violations = simulate_scalable(seed).violations
        if any(text in violation for violation in violations):
            sys.stdout.write(f"seen by seed {seed}\n")
            monkeypatch.undo()
            delay(monkeypatch)
            assert not simulate_scalable(seed).violations, f"seed {seed}"
            return
        others += [f"seed {seed}: {each}" for each in violations]
    pytest.fail(f"{SEEDS} seeds do not see that this is missing; {others[:5]}")


def test_children_that_are_shown_before_their_parents_are_sealed_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def shown_first(self: LayoutChanges, change: LayoutChange) -> ScalableRecord | None:
        shown = await self._store.step(self._topic, change, changes.sealed)
        for parent in self._segments(change, change.parents):
            await self._host.seal(self._name(parent))
        return shown

    monkeypatch.setattr(LayoutChanges, "_seal", shown_first)
    _is_caught(monkeypatch, "were not delivered", first=6)


def test_children_without_cursors_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def bare(self: LocalSegments, name: TopicName, _: Sequence[CursorWanted]) -> None:
        await self._topics.create(name)

    subscribing = ScalableTopics.subscribing

    async def as_asked(
        self: ScalableTopics, name: TopicName, options: SubscribeRequest
    ) -> SubscribeRequest:
        await subscribing(self, name, options)
        return options  # and not at the earliest message, which would make good for it

    monkeypatch.setattr(LocalSegments, "prepare", bare)
    monkeypatch.setattr(ScalableTopics, "subscribing", as_asked)
    _is_caught(monkeypatch, "not delivered", first=7)


def test_children_that_are_given_out_before_their_parents_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_of_them(layout: SegmentLayout, _: Any) -> list[Segment]:
        return list(layout.segments.values())

    monkeypatch.setattr(assignment, "_cleared", all_of_them)
    _is_caught(monkeypatch, "was given", first=8)


def test_sequences_that_are_not_inherited_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: LocalSegments, name: TopicName, lineage: Lineage) -> None:
        return None

    monkeypatch.setattr(LocalSegments, "inherit", nothing)
    _is_caught(monkeypatch, "stored twice", first=23)


def test_layouts_that_change_without_a_new_epoch_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sealed = changes.sealed

    def at_the_same_epoch(record: ScalableRecord) -> ScalableRecord:
        after = sealed(record)
        assert record.layout is not None
        assert after.layout is not None
        return replace(after, layout=replace(after.layout, epoch=record.layout.epoch))

    monkeypatch.setattr(changes, "sealed", at_the_same_epoch)
    _is_caught(monkeypatch, "two different layouts", first=2)


def test_subscriptions_that_are_not_recorded_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unrecorded(
        self: ScalableTopics, name: TopicName, options: SubscribeRequest
    ) -> SubscribeRequest:
        return options

    monkeypatch.setattr(ScalableTopics, "subscribing", unrecorded)
    _is_caught(monkeypatch, "were not delivered")


def test_marks_before_the_acknowledgements_are_durable_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = Drains._judge
    durable = Subscription.ack_durable

    def delay(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Subscription, "ack_durable", slowly)

    async def slowly(self: Subscription) -> None:
        """It always may take so long; seldom enough, though, that few seeds would see it."""
        await asyncio.sleep(0.5)
        await durable(self)

    async def at_once(
        self: Drains, topic: Topic, segment_id: int, subscription: Subscription
    ) -> None:
        if not subscription.durable:
            await judge(self, topic, segment_id, subscription)
            return
        name = subscription.name
        wanted = DrainedRecord(segment_id, name) if subscription.backlog() == 0 else None
        key = drained_key(topic.name.scalable_topic(), segment_id, name)
        await self._store.change(key, DrainedRecord, lambda _: wanted)

    monkeypatch.setattr(Drains, "_judge", at_once)
    _is_caught(monkeypatch, "after the durable acknowledgement of", delay, first=1)


def test_members_that_are_detached_by_former_connections_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_name(group: GroupRecord, name: str, _: str, now_ms: int) -> GroupRecord:
        members = tuple(
            replace(member, lost_ms=now_ms)
            if member.name == name and member.lost_ms == NEVER
            else member
            for member in group.members
        )
        return replace(group, members=members)

    def content(self: ConsumerSession) -> bool:
        if self._wish.name != "ATTACHED":
            return True
        member = None if self._record is None else group_records.member_of(self._record, self.name)
        return member is None or member.connection != self._token

    monkeypatch.setattr(sessions, "detached", by_name)
    # A session that sees that it is taken for lost attaches again: two rules for one promise.
    monkeypatch.setattr(ConsumerSession, "_must_write", content)
    _is_caught(monkeypatch, "takes them for lost", first=27)


# --- times of delivery


def test_messages_that_are_forgotten_while_they_wait_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DelayedIndex, "add", lambda *_: None)
    _is_caught(monkeypatch, "no rest", first=1)


def test_messages_before_their_time_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    first_due = DelayedIndex.first_due

    def two_seconds_early(
        index: DelayedIndex, count: int, now_ms: int, rule: DelayRule
    ) -> list[Position]:
        return first_due(index, count, now_ms + 2000, rule)

    monkeypatch.setattr(DelayedIndex, "first_due", two_seconds_early)
    _is_caught(monkeypatch, "before its time", first=1)


# --- expiry


def test_expiry_that_leaves_out_sealed_segments_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def of_active_ones(
        self: ScalableTopics, topic: TopicName, name: str, seconds: int
    ) -> None:
        layout = await self._layout_with(topic, name)
        for segment in layout.active:
            await self.host.expire(segment_topic(topic, segment), name, seconds)

    monkeypatch.setattr(ScalableTopics, "expire", of_active_ones)
    _is_caught(monkeypatch, "after its durable acknowledgement", first=3)
