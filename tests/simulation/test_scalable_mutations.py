"""The simulation of scalable topics finds what it is for: each test takes one rule away.

A rule is taken away by patching it from here; the product has no switch for it. That the same seeds
find nothing with the rule in place is shown by `test_scalable_seeds.py` and `make sim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.broker.api import ConsumerOptions
from magnetar.broker.lineage import Lineage
from magnetar.broker.subscription import Subscription
from magnetar.model.names import TopicName
from magnetar.model.segments import NEVER, Segment, SegmentLayout
from magnetar.scalable import assignment, changes, groups
from magnetar.scalable.drains import Drains
from magnetar.scalable.layout_changes import LayoutChanges
from magnetar.scalable.records import Change, GroupRecord, ScalableRecord
from magnetar.scalable.scalable_topics import ScalableTopics
from magnetar.scalable.segments import CursorWanted, LocalSegments
from magnetar.scalable.store import ScalableStore
from magnetar.testing.simulate_scalable import simulate_scalable

pytestmark = pytest.mark.slow

SEEDS = 60


def _first_violation() -> str:
    for seed in range(SEEDS):
        report = simulate_scalable(seed)
        if report.violations:
            return f"seed {seed}: {report.violations}"
    return ""


def test_children_that_are_shown_before_their_parents_are_sealed_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seal = LayoutChanges._seal

    async def shown_first(self: LayoutChanges, change: Change) -> ScalableRecord | None:
        shown = await self._store.step(self._topic, change, changes.sealed)
        step = ScalableStore.step

        async def stored_already(*_: Any) -> ScalableRecord | None:
            return shown

        monkeypatch.setattr(ScalableStore, "step", stored_already)
        try:
            return await seal(self, change)
        finally:
            monkeypatch.setattr(ScalableStore, "step", step)

    monkeypatch.setattr(LayoutChanges, "_seal", shown_first)
    assert _first_violation()


def test_children_without_cursors_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def bare(self: LocalSegments, name: TopicName, _: Sequence[CursorWanted]) -> None:
        await self._topics.create(name)

    monkeypatch.setattr(LocalSegments, "prepare", bare)
    assert "not delivered" in _first_violation()


def test_children_that_are_given_out_before_their_parents_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_of_them(layout: SegmentLayout, _: Any) -> list[Segment]:
        return list(layout.segments.values())

    monkeypatch.setattr(assignment, "_cleared", all_of_them)
    assert "was given" in _first_violation()


def test_sequences_that_are_not_inherited_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: LocalSegments, name: TopicName, lineage: Lineage) -> None:
        return None

    monkeypatch.setattr(LocalSegments, "inherit", nothing)
    assert "stored twice" in _first_violation()


def test_changes_that_are_moved_on_by_former_leaders_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def blind(
        self: ScalableStore, topic: TopicName, expected: Change, transition: Any
    ) -> ScalableRecord | None:
        def moved(record: ScalableRecord) -> ScalableRecord | None:
            return transition(replace(record, change=expected))

        return await self.change_topic(topic, moved)

    monkeypatch.setattr(ScalableStore, "step", blind)
    assert _first_violation()


def test_subscriptions_that_are_not_recorded_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unrecorded(self: ScalableTopics, name: TopicName, options: ConsumerOptions) -> None:
        return None

    monkeypatch.setattr(ScalableTopics, "subscribing", unrecorded)
    assert _first_violation()


def test_marks_before_the_acknowledgements_are_durable_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = Drains._judge

    async def at_once(subscription: Subscription) -> None:
        return None

    async def hasty(self: Drains, topic: Any, segment_id: int, subscription: Subscription) -> None:
        durable = Subscription.ack_durable
        monkeypatch.setattr(Subscription, "ack_durable", at_once)
        try:
            await judge(self, topic, segment_id, subscription)
        finally:
            monkeypatch.setattr(Subscription, "ack_durable", durable)

    monkeypatch.setattr(Drains, "_judge", hasty)
    assert _first_violation()


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

    monkeypatch.setattr(groups, "detached", by_name)
    assert _first_violation()
