"""The index of messages that wait: never early, never lost, in order, small; against a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from magnetar.broker.dispatch.delay_rule import DelayRule
from magnetar.broker.dispatch.delayed_index import DelayedIndex
from magnetar.broker.policy.values import DelayedDeliveryPolicies
from magnetar.errors import InvariantBroken
from magnetar.model.ids import Position

LOOSE = DelayRule(tick_ms=1000)
STRICT = DelayRule(tick_ms=1000, strict=True)
RULES = st.builds(
    DelayRule,
    active=st.sampled_from((True, True, True, False)),
    tick_ms=st.sampled_from((1, 3, 64, 1000)),
    strict=st.booleans(),
)


def all_due(index: DelayedIndex, now_ms: int, rule: DelayRule) -> list[Position]:
    found = index.first_due(1_000_000, now_ms, rule)
    for position in found:
        assert index.remove(position)
    return found


class IndexMachine(RuleBasedStateMachine):
    """What was read comes in order and once; times, rules and the clock are anything."""

    def __init__(self) -> None:
        super().__init__()
        self.index = DelayedIndex()
        self.waiting: dict[Position, int] = {}
        self.next = Position(5, 0)
        self.now = 1_000_000
        self.rule = DelayRule(tick_ms=64)

    @rule(after=st.integers(0, 5000), gap=st.integers(1, 3))
    def comes(self, after: int, gap: int) -> None:
        self.next = Position(self.next.ledger_id, self.next.entry_id + gap)
        at = self.now + after
        if not self.rule.is_due(at, self.now):
            self.index.add(self.next, at, self.rule)
            self.index.add(self.next, at + 1, self.rule)  # it is in already
            self.waiting[self.next] = at

    @rule(gap=st.integers(1, 1 << 40))
    def begins_a_ledger(self, gap: int) -> None:
        self.next = Position(self.next.ledger_id + gap, 0)

    @rule(later=st.integers(0, 3000))
    def time_goes_on(self, later: int) -> None:
        self.now += later

    @rule(new=RULES)
    def the_rule_changes(self, new: DelayRule) -> None:
        self.rule = new

    @rule(count=st.integers(0, 5))
    def some_are_taken(self, count: int) -> None:
        found = self.index.first_due(count, self.now, self.rule)
        assert len(found) <= count
        assert found == sorted(found)
        for position in found:
            # Which rule was in force when it became due does not matter: one of them said so.
            assert position in self.waiting
            assert self.index.remove(position)
            del self.waiting[position]
        if len(found) < count:
            late = [at for at in self.waiting.values() if self.rule.is_due(at + 1000, self.now)]
            assert not late, "more than a bucket late"

    @rule(data=st.data())
    def one_is_acknowledged(self, data: st.DataObject) -> None:
        if self.waiting:
            position = data.draw(st.sampled_from(sorted(self.waiting)))
            assert self.index.remove(position)
            assert not self.index.remove(position)
            del self.waiting[position]

    @rule(data=st.data())
    def all_up_to_one_are(self, data: st.DataObject) -> None:
        known = sorted(self.waiting) or [self.next]
        through = data.draw(st.sampled_from(known))
        through = Position(through.ledger_id + data.draw(st.integers(-1, 1)), through.entry_id)
        self.index.drop_through(through)
        self.waiting = {each: at for each, at in self.waiting.items() if each > through}

    @rule(buckets=st.integers(1, 5))
    def it_is_swept(self, buckets: int) -> None:
        self.index.sweep(buckets)

    @rule()
    def a_rewind(self) -> None:
        self.index.clear()
        self.waiting.clear()

    @invariant()
    def it_is_whole(self) -> None:
        self.index.check_invariants()
        assert len(self.index) == len(self.waiting)
        assert all(position in self.index for position in self.waiting)
        assert self.next.next not in self.index


TestIndex = IndexMachine.TestCase


@given(
    st.lists(st.integers(0, 100_000), min_size=1, max_size=60),
    st.sampled_from((1, 100, 1000, 1024)),
    st.booleans(),
)
def test_each_is_due_within_a_tick_of_its_time(
    delays: list[int], tick_ms: int, strict: bool
) -> None:
    """Looked at when `next_ms` says: never before what the rule allows, never a tick late."""
    rule = DelayRule(tick_ms=tick_ms, strict=strict)
    index, now = DelayedIndex(), 1_700_000_000_000
    at = {Position(1, number): now + delay for number, delay in enumerate(delays)}
    for position, moment in at.items():
        if not rule.is_due(moment, now):
            index.add(position, moment, rule)
    while len(index):
        following = index.next_ms(rule)
        assert following is not None
        assert following > now or index.has_due(now, rule)
        now = max(now, following)
        found = all_due(index, now, rule)
        assert found == sorted(found)
        for position in found:
            early = at[position] - now
            assert early <= (0 if strict else tick_ms)
            assert -early < (tick_ms if strict else 1)
        if not found:
            now += 1


def test_what_comes_together_is_in_the_order_of_the_log() -> None:
    index = DelayedIndex()
    for number, at in enumerate((5000, 3000, 5001, 3001)):
        index.add(Position(1 + number // 2, number), at, STRICT)
    assert not index.has_due(2999, STRICT)
    assert index.first_due(10, 3072, STRICT) == [Position(1, 1), Position(2, 3)]
    assert index.first_due(1, 3072, STRICT) == [Position(1, 1)]
    positions = [Position(1, 0), Position(1, 1), Position(2, 2), Position(2, 3)]
    assert index.first_due(10, 6000, STRICT) == positions


def test_many_that_are_equally_late_are_known_as_such() -> None:
    rule = DelayRule(tick_ms=1000, fixed_delay_entries=3)
    index = DelayedIndex()
    for number, at in enumerate((10_000, 9500, 12_000)):
        index.add(Position(1, number), at, rule)
    assert index.is_fixed(rule)
    assert not index.is_fixed(DelayRule(fixed_delay_entries=0))
    index.add(Position(1, 3), 10_999, rule)  # more than a tick before the latest
    assert not index.is_fixed(rule)
    index.clear()
    for number, at in enumerate((10_000, 11_000)):
        index.add(Position(1, number), at, rule)
    assert not index.is_fixed(rule)
    index.add(Position(1, 2), 12_000, rule)
    assert index.is_fixed(rule)


def test_what_was_removed_is_not_due() -> None:
    index = DelayedIndex()
    for number in range(4):
        index.add(Position(1, number), 3000 + number // 3 * 5000, STRICT)
    assert index.remove(Position(1, 1))
    assert index.remove(Position(1, 3))
    assert index.first_due(10, 20_000, STRICT) == [Position(1, 0), Position(1, 2)]
    assert not index.has_due(2000, STRICT) or len(index) == 2


def test_what_was_removed_takes_no_memory_for_long() -> None:
    """As where messages live shorter than they wait: all are removed long before they are due."""
    index = DelayedIndex()
    for number in range(20_000):
        index.add(Position(1, number), 10**9 + 700 * number, STRICT)
        index.sweep(4)
        if number % 1000 == 999:
            index.drop_through(Position(1, number - 100))
    assert len(index) == 100
    assert len(index._buckets) < 2500
    assert len(index._times) < 5000
    index.check_invariants()


def test_a_bucket_of_many_gives_all_of_them() -> None:
    index = DelayedIndex()
    positions = [Position(1 + number // 90, number) for number in range(200)]
    for position in positions:
        index.add(position, 10_000, STRICT)
    index.drop_through(positions[49])
    index.sweep(10)
    index.check_invariants()
    assert index.first_due(500, 11_000, STRICT) == positions[50:]


def test_ledgers_out_of_order_are_refused() -> None:
    index = DelayedIndex()
    index.add(Position(7, 0), 3000, STRICT)
    with pytest.raises(InvariantBroken):
        index.add(Position(6, 0), 3000, STRICT)


def test_the_size_is_that_of_buckets_and_bitmaps() -> None:
    index = DelayedIndex()
    assert index.size_bytes == 0
    for number in range(1000):
        index.add(Position(1, number), 1_000_000, STRICT)
    together = index.size_bytes
    for number in range(1000):
        index.add(Position(2, number), 2_000_000 + 1024 * number, STRICT)
    assert 0 < together < 12_000 < index.size_bytes < 1_000_000


def test_a_policy_overrides_the_broker() -> None:
    broker = DelayRule(tick_ms=500, strict=True, fixed_delay_entries=9)
    assert broker.under(DelayedDeliveryPolicies(True)) == DelayRule(True, 500, True, 9)
    rule = broker.under(DelayedDeliveryPolicies(False, 64, 5))
    assert rule == DelayRule(False, 64, True, 9)
    assert rule.is_due(1 << 62, 0)
