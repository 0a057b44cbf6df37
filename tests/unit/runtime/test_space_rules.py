"""When publishes are refused, and what the reserve should have: for any disk, over any time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.runtime.limits import Limits
from magnetar.runtime.space_rules import HOLD_S, SpaceRules, SpaceSeen

MIB = 1 << 20
GIB = 1 << 30

TOTALS = st.sampled_from([0, 16 * MIB, 48 * MIB, 2 * GIB, 20 * GIB, 4096 * GIB])
RULES = SpaceRules(Limits())


def settled(rules: SpaceRules, room: int, total: int, reserved: int, now: float) -> tuple[int, int]:
    """Look until nothing changes, with a reserve that takes what it wants; (looks, reserve)."""
    for looks in range(10):
        seen = SpaceSeen(free=max(0, room - reserved), total=total, reserved=reserved, now=now)
        before = rules.is_refusing
        after = rules.judge(seen)
        wanted = min(rules.wanted_reserve(seen), room)
        if (before, reserved) == (after, wanted):
            return looks, reserved
        reserved = wanted
    raise AssertionError("it goes to and fro")


@given(total=TOTALS, share=st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_same_disk_is_always_judged_alike(total: int, share: list[float]) -> None:
    rules, reserved = SpaceRules(Limits()), 0
    floor, reserve = rules.floor(total), rules.reserve(total)
    for now, part in enumerate(share):
        # Shares near the floor are the interesting ones.
        room = int((2 * floor + reserve) * part)
        before = rules.is_refusing
        looks, reserved = settled(rules, room, total, reserved, float(now))
        assert looks <= 2
        left = room - reserve
        assert reserved <= reserve
        if not total:
            assert (rules.is_refusing, reserved) == (False, 0)
        elif left < floor:
            assert rules.is_refusing
        elif left >= floor + floor // 4:
            assert not rules.is_refusing
            assert reserved == reserve
        else:
            assert rules.is_refusing == before, "between the two nothing changes"


@given(total=TOTALS, free=st.integers(0, 4096 * GIB), reserved=st.integers(0, 32 * MIB))
def test_what_is_left_is_the_same_with_and_without_the_reserve(
    total: int, free: int, reserved: int
) -> None:
    reserved = min(reserved, RULES.reserve(total))
    held = SpaceSeen(free=free, total=total, reserved=reserved)
    given_up = SpaceSeen(free=free + reserved, total=total, reserved=0)
    assert RULES.left(held) == RULES.left(given_up)


@pytest.mark.parametrize(
    ("total", "floor", "reserve"),
    [
        (48 * MIB, 48 * MIB * 5 // 100, 48 * MIB * 5 // 100),
        (4 * GIB, 4 * GIB * 5 // 100, 32 * MIB),
        (4096 * GIB, GIB, 32 * MIB),
        (0, 0, 0),
    ],
)
def test_a_small_disk_has_a_small_floor_and_a_large_one_no_huge_one(
    total: int, floor: int, reserve: int
) -> None:
    assert (RULES.floor(total), RULES.reserve(total)) == (floor, reserve)


def test_what_the_journal_will_write_once_more_counts_as_taken() -> None:
    rules = SpaceRules(Limits())
    whole = rules.reserve(48 * MIB)
    seen = SpaceSeen(free=3 * MIB, total=48 * MIB, reserved=whole)
    assert not rules.judge(seen)
    assert rules.judge(SpaceSeen(free=3 * MIB, total=48 * MIB, reserved=whole, unsettled=MIB))


@pytest.mark.parametrize("total", [0, 48 * MIB])
def test_a_write_that_found_no_space_counts_for_a_while(total: int) -> None:
    """The disk has a quota: it says that there is enough."""
    rules = SpaceRules(Limits())

    def refuses(now: float, *, has_failed: bool = False) -> bool:
        reserved = rules.reserve(total)
        seen = SpaceSeen(
            free=40 * MIB, total=total, reserved=reserved, has_failed=has_failed, now=now
        )
        return rules.judge(seen)

    assert not refuses(0.0)
    assert refuses(1.0, has_failed=True)
    assert refuses(0.9 + HOLD_S)
    assert not refuses(1.0 + HOLD_S)


def test_a_failure_that_the_disk_explains_ends_with_its_reason() -> None:
    rules = SpaceRules(Limits())
    total = 48 * MIB
    whole = rules.reserve(total)
    full = SpaceSeen(free=0, total=total, reserved=0, has_failed=True, now=1.0)
    assert rules.judge(full)
    assert not rules.judge(SpaceSeen(free=40 * MIB, total=total, reserved=whole, now=1.1))


def test_what_is_left_of_the_reserve_is_kept_until_there_is_room() -> None:
    rules = SpaceRules(Limits())
    total = 48 * MIB
    floor, whole = rules.floor(total), rules.reserve(total)
    nearly = floor // 4 - 1 + whole - MIB
    seen = SpaceSeen(free=nearly, total=total, reserved=MIB)
    assert rules.wanted_reserve(seen) == MIB
    assert rules.wanted_reserve(SpaceSeen(free=nearly + 1, total=total, reserved=MIB)) == whole
