"""The hash ring: golden values shared with every other client, and ranges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import InvalidLayout
from magnetar.model.hashing import (
    FULL_RING,
    HASH_MAX,
    HashRange,
    bucket_hash,
    key_hash,
    partition_of,
    segment_hash,
)

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


@pytest.mark.parametrize(("key", "expected"), GOLDEN.items())
def test_golden_values(key: str, expected: int) -> None:
    assert key_hash(key) == expected
    assert key_hash(key.encode()) == expected


def test_segment_is_the_high_half_and_bucket_the_low_half() -> None:
    assert segment_hash(0x5A771F53) == 0x5A77
    assert bucket_hash(0x5A771F53) == 0x1F53


def test_a_partition_ignores_the_sign_bit() -> None:
    assert partition_of(0xBD7718CB, 7) == 0x3D7718CB % 7


@pytest.mark.parametrize(("start", "end"), [(-1, 5), (5, 4), (0, HASH_MAX + 1)])
def test_a_range_lies_on_the_ring(start: int, end: int) -> None:
    with pytest.raises(InvalidLayout):
        HashRange(start, end)


def test_a_range_of_one_position_cannot_be_split() -> None:
    with pytest.raises(InvalidLayout, match="one position"):
        HashRange(7, 7).split(7)


def test_the_full_ring_is_halved_in_the_middle() -> None:
    lower, upper = FULL_RING.split(FULL_RING.midpoint)
    assert (str(lower), str(upper)) == ("0000-7fff", "8000-ffff")


@given(st.integers(0, HASH_MAX - 1), st.integers(1, HASH_MAX), st.data())
def test_the_halves_of_a_split_are_the_whole(start: int, size: int, data: st.DataObject) -> None:
    whole = HashRange(start, min(HASH_MAX, start + size))
    after = data.draw(st.integers(whole.start, whole.end - 1))
    lower, upper = whole.split(after)
    assert lower.size + upper.size == whole.size
    assert lower.is_before(upper)
    assert not lower.overlaps(upper)
    assert after in lower
    assert after + 1 in upper
    assert abs(HashRange(whole.start, whole.midpoint).size * 2 - whole.size) <= 1
