"""Routing: golden hashes, partitions, agreement with the layout, turns."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace

import mmh3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.message.routing import RoundRobin, Router, Routing, entry_bucket_hash
from magnetar.errors import NotAllowed
from magnetar.model.segments import SegmentLayout

GOLDEN = {
    "": 0x00000000,
    "k-0": 0x5A771F53,
    "k-1": 0xBD7718CB,
    "k-2": 0x4376D4E9,
    "hello": 0x248BFA47,
    "order-42": 0x4B11A18E,
    "café": 0x241C0F08,
    "a" * 37: 0xD6EEF753,
}


def _legacy(count: int) -> SegmentLayout:
    layout = SegmentLayout.create(count, now_ms=0)
    return SegmentLayout(
        0,
        count,
        {
            number: replace(segment, legacy_topic_name=f"persistent://t/n/x-partition-{number}")
            for number, segment in layout.segments.items()
        },
    )


def test_golden_keys_go_by_the_half_that_the_generation_uses() -> None:
    layout = SegmentLayout.create(4096, now_ms=0)
    ring, preview = Router(layout), Router(layout, Routing.PREVIEW)
    for key, hash32 in GOLDEN.items():
        assert ring.for_key(key).segment_id == hash32 >> 20
        assert preview.for_key(key).segment_id == (hash32 & 0xFFFF) >> 4
        assert entry_bucket_hash(key) == hash32 & 0xFFFF


@given(st.text(max_size=20), st.integers(1, 40))
def test_partitions_are_chosen_as_version_4_does(key: str, count: int) -> None:
    router = Router(_legacy(count))
    expected = (mmh3.hash(key.encode(), 0, signed=False) & 0x7FFFFFFF) % count
    assert router.is_legacy
    assert router.for_key(key).segment_id == expected
    assert router.for_key(key.encode()) == router.for_key(b64encode(key.encode()).decode())


@given(st.text(max_size=20), st.lists(st.integers(0, 2**31), max_size=8))
def test_a_key_goes_to_an_active_segment_whose_range_holds_it(key: str, choices: list[int]) -> None:
    layout = SegmentLayout.create(2, now_ms=0)
    for choice in choices:
        layout = layout.split(layout.active[choice % len(layout.active)].segment_id, now_ms=0)
    for routing in Routing:
        router = Router(layout, routing)
        found = router.for_key(key)
        assert found.is_active
        assert not router.is_legacy
        assert found == router.for_key(key.encode())
        half = 16 if routing is Routing.RING else 0
        position = mmh3.hash(key, 0, signed=False) >> half & 0xFFFF
        assert position in found.hash_range


def test_one_segment_of_its_own_makes_a_topic_scalable() -> None:
    old, layout = _legacy(2), SegmentLayout.create(2, now_ms=0)
    mixed = SegmentLayout(1, 2, {0: old.segments[0], 1: layout.segments[1]})
    assert not Router(mixed).is_legacy


def test_a_layout_without_active_segments_is_refused() -> None:
    with pytest.raises(NotAllowed, match="no active segment"):
        Router(SegmentLayout(3, 0, {}))


def test_keyless_messages_share_a_batch_and_then_move_on() -> None:
    turns = RoundRobin(start=5, window_s=1.0, messages_max=3)
    assert [turns.next(10.0) for _ in range(7)] == [6, 6, 6, 7, 7, 7, 8]
    assert [turns.next(10.5), turns.next(11.0), turns.next(11.5)] == [8, 9, 9]
    router = Router(SegmentLayout.create(3, now_ms=0))
    assert [router.for_turn(turn).segment_id for turn in range(5)] == [0, 1, 2, 0, 1]


@given(st.lists(st.floats(0, 0.4), min_size=60, max_size=60), st.integers(1, 5))
def test_turns_reach_every_segment_evenly(gaps: list[float], count: int) -> None:
    turns = RoundRobin(start=0, window_s=0.0, messages_max=1)
    now, taken = 0.0, [0] * count
    for gap in gaps:
        now += gap
        taken[turns.next(now) % count] += 1
    assert max(taken) - min(taken) <= 1


def test_the_ordering_key_goes_before_the_key() -> None:
    assert entry_bucket_hash("k-0", b"k-1") == GOLDEN["k-1"] & 0xFFFF
    assert entry_bucket_hash(None) == 0
