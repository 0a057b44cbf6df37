"""The set of acknowledged positions, against a naive model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from magnetar.errors import CorruptMetadata
from magnetar.managed_ledger.acked import (
    CHUNK_ENTRIES,
    AckedRange,
    AckedSet,
    ChunkKey,
    StoredChunk,
)
from magnetar.model.ids import Position
from tests.examples import examples

# Entry ids around the beginning of a ledger and around the border of two chunks.
ENTRY_IDS = st.one_of(st.integers(0, 12), st.integers(CHUNK_ENTRIES - 6, CHUNK_ENTRIES + 6))
POSITIONS = st.builds(Position, st.integers(1, 3), ENTRY_IDS)
BATCHES = st.integers(0, 15)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), POSITIONS, st.just(0)),
        st.tuples(st.just("range"), POSITIONS, st.integers(0, 10)),
        st.tuples(st.just("batch"), POSITIONS, BATCHES),
        st.tuples(st.just("drop"), POSITIONS, st.just(0)),
        st.tuples(st.just("store"), POSITIONS, st.just(0)),
    ),
    max_size=40,
)


class Model:
    """The same with plain sets and dicts."""

    def __init__(self) -> None:
        self.acked: set[Position] = set()
        self.batches: dict[Position, int] = {}

    def add(self, position: Position) -> None:
        self.acked.add(position)
        self.batches.pop(position, None)

    def merge(self, position: Position, unacked: int) -> None:
        if position in self.acked:
            return
        left = self.batches.get(position, -1) & unacked
        if left == 0:
            self.add(position)
        else:
            self.batches[position] = left

    def drop(self, position: Position) -> None:
        self.acked = {each for each in self.acked if each > position}
        self.batches = {at: left for at, left in self.batches.items() if at > position}

    def ranges(self) -> list[AckedRange]:
        found: list[AckedRange] = []
        for ledger_id, entry_id in sorted(self.acked):
            if found and (found[-1].ledger_id, found[-1].last + 1) == (ledger_id, entry_id):
                found[-1] = found[-1]._replace(last=entry_id)
            else:
                found.append(AckedRange(ledger_id, entry_id, entry_id))
        return found


class Storage:
    """Stores only the chunks that the set calls changed, as a cursor does."""

    def __init__(self) -> None:
        self.chunks: dict[ChunkKey, StoredChunk] = {}

    def update(self, acked: AckedSet) -> None:
        for key in acked.take_changed():
            self.chunks[key] = acked.dump_chunk(key)
        self.chunks = {key: self.chunks[key] for key in acked.chunk_keys}

    def load(self, dropped: Position | None) -> AckedSet:
        loaded = AckedSet()
        for key, chunk in self.chunks.items():
            loaded.load_chunk(key, chunk)
        if dropped is not None:
            loaded.drop_through(dropped)
        return loaded


def content(acked: AckedSet) -> tuple[list[AckedRange], list[tuple[Position, int]], int]:
    return list(acked.ranges()), list(acked.partial()), acked.count


@settings(max_examples=examples(300))
@given(STEPS)
def test_behaves_as_the_model_and_survives_storing(
    steps: list[tuple[str, Position, int]],
) -> None:
    acked, model, storage = AckedSet(), Model(), Storage()
    dropped: Position | None = None
    for step, position, number in steps:
        if step == "add":
            assert acked.add(position) == (position not in model.acked)
            model.add(position)
        elif step == "range":
            acked.add_range(position.ledger_id, position.entry_id, position.entry_id + number)
            for entry_id in range(position.entry_id, position.entry_id + number + 1):
                model.add(Position(position.ledger_id, entry_id))
        elif step == "batch":
            acked.merge_batch(position, number)
            model.merge(position, number)
        elif step == "drop":
            acked.drop_through(position)
            model.drop(position)
            dropped = position if dropped is None else max(dropped, position)
        else:
            storage.update(acked)
        if dropped is not None:  # nothing comes back below a mark that moved
            acked.drop_through(dropped)
            model.drop(dropped)
        expected = (model.ranges(), sorted(model.batches.items()), len(model.acked))
        assert content(acked) == expected
        assert bool(acked) == bool(model.acked or model.batches)
    storage.update(acked)
    assert content(storage.load(dropped)) == content(acked)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(POSITIONS, st.integers(0, 9)), max_size=12), POSITIONS)
def test_run_end_is_the_last_of_consecutive_positions(
    ranges: list[tuple[Position, int]], start: Position
) -> None:
    acked, model = AckedSet(), Model()
    for position, length in ranges:
        acked.add_range(position.ledger_id, position.entry_id, position.entry_id + length)
        for entry_id in range(position.entry_id, position.entry_id + length + 1):
            model.add(Position(position.ledger_id, entry_id))
    expected = None
    entry_id = start.entry_id
    while Position(start.ledger_id, entry_id) in model.acked:
        expected = entry_id
        entry_id += 1
    assert acked.run_end(start) == expected
    assert (start in acked) == (expected is not None)


def test_long_runs_over_chunk_borders_are_one_range() -> None:
    acked = AckedSet()
    acked.add_range(7, 5, 3 * CHUNK_ENTRIES + 2)
    assert list(acked.ranges()) == [AckedRange(7, 5, 3 * CHUNK_ENTRIES + 2)]
    assert acked.run_end(Position(7, 5)) == 3 * CHUNK_ENTRIES + 2
    assert acked.run_end(Position(7, 4)) is None
    assert acked.count == 3 * CHUNK_ENTRIES - 2


def test_a_million_holes_are_compact_and_one_more_ack_changes_one_chunk() -> None:
    acked = AckedSet()
    holes = BitMap(range(1, CHUNK_ENTRIES, 2)).serialize()
    for number in range(2):
        acked.load_chunk(ChunkKey(1, number), StoredChunk(holes, {}))
    assert acked.count == CHUNK_ENTRIES
    assert acked.take_changed() == set()
    acked.add(Position(1, 4))
    assert acked.take_changed() == {ChunkKey(1, 0)}
    assert len(acked.dump_chunk(ChunkKey(1, 0)).bits) < 140_000


def test_batch_sets_merge_by_and_and_an_empty_one_is_a_whole_ack() -> None:
    acked = AckedSet()
    position = Position(1, 1)
    assert acked.merge_batch(position, 0b1110)
    assert acked.unacked_indexes(position) == 0b1110
    assert not acked.merge_batch(position, 0b1111)
    assert acked.merge_batch(position, 0b0111)
    assert acked.unacked_indexes(position) == 0b0110
    assert dict(acked.partial()) == {position: 0b0110}
    assert position not in acked
    assert acked.merge_batch(position, 0b1001)
    assert position in acked
    assert acked.unacked_indexes(position) is None
    assert not acked.merge_batch(position, 0b1)


def test_taken_changes_can_be_given_back() -> None:
    acked = AckedSet()
    acked.add(Position(1, 1))
    taken = acked.take_changed()
    acked.give_back_changed(taken)
    acked.add(Position(2, 1))
    assert acked.take_changed() == {ChunkKey(1, 0), ChunkKey(2, 0)}
    acked.clear()
    assert acked.take_changed() == set()


@pytest.mark.parametrize(
    "chunk",
    [
        StoredChunk(b"", {}),
        StoredChunk(b"no bitmap at all", {}),
        StoredChunk(BitMap([CHUNK_ENTRIES]).serialize(), {}),
        StoredChunk(BitMap([3]).serialize(), {3: b"\x01"}),
        StoredChunk(BitMap([3]).serialize(), {4: b"\x00"}),
    ],
)
def test_a_damaged_chunk_is_refused(chunk: StoredChunk) -> None:
    with pytest.raises(CorruptMetadata):
        AckedSet().load_chunk(ChunkKey(1, 0), chunk)
