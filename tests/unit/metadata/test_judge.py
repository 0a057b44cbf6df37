"""The verdicts on writes and the names of sequences."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.errors import BadVersion, LimitExceeded
from magnetar.metadata.api import ABSENT, Index
from magnetar.metadata.judge import (
    NO_SESSION,
    SEQUENCE_NUMBER_MAX,
    StoredRecord,
    in_range,
    judge_delete,
    judge_put,
    next_sequence,
    parse_sequence,
    sequence_bounds,
    sequence_key,
    sequence_prefixes,
    split_key,
    stat_of,
)

OLD = StoredRecord(b"old", 5, 100, 200, 3, NO_SESSION, (Index("i", "k"),))
numbers = st.lists(st.integers(0, SEQUENCE_NUMBER_MAX), min_size=1, max_size=3).map(tuple)
prefixes = st.text(st.sampled_from("a-0:é"), min_size=1, max_size=30)
pure = settings(derandomize=True, deadline=None)


def put(current: StoredRecord | None, expected: int | None, now_ms: int = 300) -> StoredRecord:
    return judge_put(
        "/k",
        current,
        value=b"new",
        expected=expected,
        indexes=(),
        session=NO_SESSION,
        version=9,
        now_ms=now_ms,
    )


@pytest.mark.parametrize(
    ("key", "parts"), [("/a", ("", "a")), ("/a/b", ("/a", "b")), ("/a/b/c", ("/a/b", "c"))]
)
def test_split_key(key: str, parts: tuple[str, str]) -> None:
    assert split_key(key) == parts


def test_in_range_is_half_open() -> None:
    assert [name for name in "abcd" if in_range(name, "b", "d")] == ["b", "c"]
    assert in_range("z", "", None)


@pytest.mark.parametrize("expected", [None, ABSENT])
def test_put_creates(expected: int | None) -> None:
    assert put(None, expected) == StoredRecord(b"new", 9, 300, 300, 0, NO_SESSION, ())


@pytest.mark.parametrize("expected", [None, 5])
def test_put_replaces(expected: int | None) -> None:
    assert put(OLD, expected) == StoredRecord(b"new", 9, 100, 300, 4, NO_SESSION, ())


def test_modified_never_goes_back_with_the_clock() -> None:
    assert put(OLD, None, now_ms=50).modified_ms == 200


@pytest.mark.parametrize(
    ("current", "expected", "actual"), [(OLD, ABSENT, 5), (OLD, 4, 5), (None, 5, None)]
)
def test_lost_compare_and_set(
    current: StoredRecord | None, expected: int, actual: int | None
) -> None:
    with pytest.raises(BadVersion) as put_error:
        put(current, expected)
    with pytest.raises(BadVersion) as delete_error:
        judge_delete("/k", current, expected)
    for caught in (put_error, delete_error):
        assert (caught.value.expected, caught.value.actual) == (expected, actual)


def test_delete() -> None:
    assert judge_delete("/k", OLD, None)
    assert judge_delete("/k", OLD, 5)
    assert not judge_delete("/k", None, None)
    assert not judge_delete("/k", None, ABSENT)


def test_stat_says_whose_an_ephemeral_record_is() -> None:
    ephemeral = msgspec.structs.replace(OLD, session=7)
    assert not stat_of("/k", OLD, 7).ephemeral
    assert not stat_of("/k", OLD, NO_SESSION).mine
    assert (stat_of("/k", ephemeral, 7).ephemeral, stat_of("/k", ephemeral, 7).mine) == (True, True)
    assert (stat_of("/k", ephemeral, 8).ephemeral, stat_of("/k", ephemeral, 8).mine) == (
        True,
        False,
    )


@pure
@given(prefix=prefixes, given_numbers=numbers)
def test_sequence_names_round_trip(prefix: str, given_numbers: tuple[int, ...]) -> None:
    name = sequence_key(prefix, given_numbers)
    low, high = sequence_bounds(prefix)
    assert in_range(name, low, high)
    assert parse_sequence(prefix, name, len(given_numbers)) == given_numbers
    assert parse_sequence(prefix, name) == given_numbers
    assert parse_sequence(prefix, name, len(given_numbers) + 1) is None
    assert prefix in sequence_prefixes(name)


@pure
@given(prefix=prefixes, name=st.text(st.sampled_from("a-0:é"), max_size=60))
def test_prefixes_and_parsing_agree(prefix: str, name: str) -> None:
    assert (parse_sequence(prefix, name) is not None) == (prefix in sequence_prefixes(name))


@pure
@given(first=numbers, second=numbers)
def test_names_sort_as_numbers(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    if len(first) == len(second):
        names = sequence_key("p", first).encode() < sequence_key("p", second).encode()
        assert names == (first < second)


@pytest.mark.parametrize(
    "name",
    [
        "p",
        "p-",
        "p-1",
        f"p-{1:019d}",
        f"p-{1:021d}",
        f"p-{1:020d}x",
        f"p_{1:020d}",
        f"p0-{1:020d}",
        f"q-{1:020d}",
        "p-" + "٣" * 20,
        f"p-{1:020d}-",
    ],
)
def test_what_is_not_of_a_sequence(name: str) -> None:
    assert parse_sequence("p", name) is None
    assert "p" not in sequence_prefixes(name)


def test_next_sequence() -> None:
    assert next_sequence(None, (1,)) == (1,)
    assert next_sequence((4, 2), (1, 0)) == (5, 2)
    assert next_sequence((4, 2), (3, 5)) == (7, 7)
    with pytest.raises(LimitExceeded):
        next_sequence((SEQUENCE_NUMBER_MAX,), (1,))


@pure
@given(st.text(max_size=5), st.text(max_size=5))
def test_code_points_sort_as_utf8(first: str, second: str) -> None:
    assert (first < second) == (first.encode() < second.encode())
