"""Layers over the database: merged scans against a naive model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from magnetar.metadata.api import Index
from magnetar.metadata.judge import NO_SESSION, StoredRecord, in_range, split_key
from magnetar.metadata.layers import (
    Layer,
    directory_states,
    index_entries,
    merge_index,
    merge_names,
    newest_state,
)
from magnetar.metadata.sqlite_rows import body_pieces, decode_body, encode_row

Row = TypeVar("Row")
State = StoredRecord | None

KEYS = [f"{parent}/{name}" for parent in ("", "/d", "/d/e") for name in ("a", "b", "b0", "é", "z")]
INDEX_KEYS = ["", "k", "k0", "m"]


def record(version: int, indexes: Sequence[Index] = ()) -> StoredRecord:
    return StoredRecord(b"%d" % version, version, 1, 1, 0, NO_SESSION, tuple(indexes))


INDEXES = st.lists(
    st.builds(Index, st.sampled_from(["i", "j"]), st.sampled_from(INDEX_KEYS)),
    max_size=3,
    unique=True,
)
RECORDS = st.builds(record, st.integers(1, 99), INDEXES)
DATABASES = st.dictionaries(st.sampled_from(KEYS), RECORDS)
CHANGES = st.lists(st.tuples(st.sampled_from(KEYS), st.one_of(st.none(), RECORDS)), max_size=12)
PAGE_SIZES = st.integers(1, 4)


def layer_of(changes: Sequence[tuple[str, State]]) -> Layer:
    layer = Layer()
    for key, state in changes:
        layer.set(key, state, encode_row(*split_key(key), state))
    return layer


def pages(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])


def truth(
    database: dict[str, StoredRecord], *changes: Sequence[tuple[str, State]]
) -> dict[str, StoredRecord]:
    """The database after the changes, oldest first."""
    now: dict[str, State] = {**database}
    for each in changes:
        now.update(each)
    return {key: state for key, state in now.items() if state is not None}


@given(
    DATABASES,
    CHANGES,
    CHANGES,
    PAGE_SIZES,
    st.sampled_from(["", "/d", "/d/e", "/none"]),
    st.sampled_from(["", "b", "b0", "y"]),
    st.sampled_from([None, "b", "b0", "é"]),
)
def test_a_merged_directory_is_what_it_would_be_after_the_changes(
    database: dict[str, StoredRecord],
    older: list[tuple[str, State]],
    newer: list[tuple[str, State]],
    size: int,
    parent: str,
    start: str,
    end: str | None,
) -> None:
    layers = layer_of(newer), layer_of(older)
    rows = _directory(database, parent, start, end)
    changed = directory_states(layers, parent, start, end)
    assert changed == sorted(changed)
    found = list(merge_names(pages(rows, size), changed))
    assert found == _directory(truth(database, older, newer), parent, start, end)


def _directory(
    records: dict[str, StoredRecord], parent: str, start: str, end: str | None
) -> list[tuple[str, StoredRecord]]:
    named = [(split_key(key), state) for key, state in records.items()]
    return sorted(
        (name, state)
        for (directory, name), state in named
        if directory == parent and in_range(name, start, end)
    )


@given(
    DATABASES,
    CHANGES,
    CHANGES,
    PAGE_SIZES,
    st.sampled_from(["i", "j", "none"]),
    st.sampled_from(INDEX_KEYS),
    st.sampled_from([None, *INDEX_KEYS]),
)
def test_a_merged_index_is_what_it_would_be_after_the_changes(
    database: dict[str, StoredRecord],
    older: list[tuple[str, State]],
    newer: list[tuple[str, State]],
    size: int,
    index: str,
    low: str,
    high: str | None,
) -> None:
    layers = layer_of(newer), layer_of(older)
    rows = _index(database, index, low, high)
    changed = index_entries(layers, index, low, high)
    superseded = frozenset(layers[0].states) | frozenset(layers[1].states)
    found = list(merge_index(pages(rows, size), changed, superseded))
    expected = _index(truth(database, older, newer), index, low, high)
    assert found == [(key, state) for _, key, state in expected]


def _index(
    records: dict[str, StoredRecord], index: str, low: str, high: str | None
) -> list[tuple[str, str, StoredRecord]]:
    found = [
        (entry.key, key, state)
        for key, state in records.items()
        for entry in state.indexes
        if entry.name == index and low <= entry.key and (high is None or entry.key <= high)
    ]
    return sorted(found, key=lambda each: each[:2])


@given(CHANGES, CHANGES, st.sampled_from(KEYS))
def test_the_newest_layer_that_knows_a_key_is_right(
    older: list[tuple[str, State]], newer: list[tuple[str, State]], key: str
) -> None:
    layers = layer_of(newer), layer_of(older)
    assert newest_state(layers, key) == truth({}, older, newer).get(key)
    assert len(layers[0]) == len({each for each, _ in newer})


@given(st.sampled_from(KEYS), st.one_of(st.none(), RECORDS))
def test_a_change_comes_back_from_its_bytes(key: str, state: State) -> None:
    row = encode_row(*split_key(key), state)
    assert decode_body(b"".join(body_pieces(row, state))) == (key, state, row)


@given(
    st.dictionaries(st.sampled_from(KEYS), RECORDS),
    st.lists(
        st.tuples(st.sampled_from(KEYS), st.one_of(st.none(), RECORDS), st.booleans()), max_size=20
    ),
)
def test_what_came_and_went_in_a_layer_leaves_nothing_below_uncovered(
    database: dict[str, StoredRecord], changes: list[tuple[str, State, bool]]
) -> None:
    """Changes as the engine tells a layer of them, with scans in between."""
    layer, present = Layer(), dict[str, State](database)
    untouched = set(KEYS) - set(database)
    for key, state, is_scanned in changes:
        row = encode_row(*split_key(key), state)
        if state is None:
            if present.get(key) is None:
                continue  # nothing to delete: no change
            layer.delete(key, row)
        elif present.get(key) is None:
            layer.create(key, state, row)
        else:
            layer.set(key, state, row)
        present[key] = state
        if is_scanned:
            for parent in ("", "/d", "/d/e"):
                found = {
                    f"{parent}/{name}": each
                    for name, each in directory_states([layer], parent, "", None)
                }
                for each in KEYS:
                    if split_key(each)[0] == parent:
                        shown = found[each] if each in found else database.get(each)
                        assert shown == present.get(each)
            for index in ("i", "j"):
                here = [key for _, key, _ in index_entries([layer], index, "", None)]
                assert len(here) >= len(set(here))
                for each in here:
                    assert layer.states[each] == present[each]
    for key in KEYS:
        shown = layer.states[key] if key in layer.states else database.get(key)
        assert shown == present.get(key)
    assert set(layer.rows) == set(layer.states)
    # What was nowhere before and is nowhere now costs the database nothing.
    assert not {key for key in untouched if present.get(key) is None} & set(layer.states)
