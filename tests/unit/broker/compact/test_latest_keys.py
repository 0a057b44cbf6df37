"""Which messages survive: against a model that is a dict from key to message."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.compact.batches import Opened, last_of_keys
from magnetar.broker.compact.latest_keys import LatestKeys, Survivors
from magnetar.errors import LimitExceeded
from magnetar.model.ids import Position
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.broker.compact.test_batches import batch, done, found, outgoing


class Message(NamedTuple):
    key: str | None
    value: bytes


messages = st.builds(
    Message,
    st.one_of(st.none(), st.sampled_from("abcdef")),
    st.sampled_from([b"", b"v", b"w"]),
)
logs = st.lists(st.lists(messages, min_size=1, max_size=6))


def single(key: str | None, value: bytes = b"v") -> Opened:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0)
    if key is not None:
        metadata.partition_key = key
    return Opened(metadata, value)


def note(keys: LatestKeys, position: Position, entry: list[Message]) -> None:
    """One message is an entry of its own, several are a batch."""
    if len(entry) == 1:
        keys.note(position, single(*entry[0]))
        return
    made = batch([outgoing(n, each.key, each.value) for n, each in enumerate(entry)])
    done(keys.note_batch(position, done(last_of_keys(found(made)))))


def placed(survivors: Survivors, sizes: dict[Position, int]) -> set[tuple[Position, int]]:
    assert survivors.indexes.keys() <= set(survivors.entries)
    return {
        (position, index)
        for position in survivors.entries
        for index in survivors.indexes.get(position, range(sizes[position]))
    }


@given(logs, st.booleans())
def test_the_last_message_of_each_key_survives(log: list[list[Message]], keeps: bool) -> None:
    keys = LatestKeys(100, keeps_deletions=keeps)
    model: dict[str, tuple[Position, int]] = {}
    sizes = {}
    for number, entry in enumerate(log):
        position = Position(number // 3, number % 3)
        sizes[position] = len(entry)
        note(keys, position, entry)
        for index, (key, value) in enumerate(entry):
            if key is None:
                continue
            model.pop(key, None)
            if value or keeps:
                model[key] = position, index
    assert len(keys) == len(model)
    assert placed(done(keys.survivors()), sizes) == set(model.values())


def test_what_cannot_be_judged_survives_whole() -> None:
    keys = LatestKeys(100)
    keys.note(Position(1, 0), single("a"))
    keys.keep(Position(1, 1))
    keys.note(Position(1, 2), single("a"))
    survivors = done(keys.survivors())
    assert list(survivors.entries) == [Position(1, 1), Position(1, 2)]
    assert not survivors.indexes


def chunk(number: int, of: int, uuid: str = "u", key: str = "a") -> Opened:
    entry = single(key)
    entry.metadata.uuid = uuid
    entry.metadata.chunk_id, entry.metadata.num_chunks_from_msg = number, of
    return entry


def left_of(*entries: Opened) -> list[int]:
    keys = LatestKeys(100)
    for number, entry in enumerate(entries):
        keys.note(Position(1, number), entry)
    found = [position.entry_id for position in done(keys.survivors()).entries]
    assert len(keys) == len(found)
    return found


def test_chunks_of_a_message_survive_together() -> None:
    first, second, last = (chunk(number, 3) for number in range(3))
    assert left_of(single("a"), first, second, last) == [1, 2, 3]
    assert left_of(first, second, last, single("a")) == [3]
    assert left_of(first, second, last, single("a", b"")) == []
    # Between the chunks of others, and with one that was sent twice.
    other = [chunk(number, 2, "w", "b") for number in range(2)]
    assert left_of(first, other[0], second, second, other[1], last) == [0, 1, 2, 4, 5]
    assert left_of(first, second, first, second, last, last) == [2, 3, 4]


def test_an_unfinished_message_neither_counts_nor_goes() -> None:
    first, second, last = (chunk(number, 3) for number in range(3))
    assert left_of(single("a"), first, second) == [0, 1, 2]
    # Nobody can put together what has a hole.
    assert left_of(single("a"), first, last) == [0]
    assert left_of(single("a"), second, last) == [0]
    assert left_of(chunk(0, 2, key="a")._replace(metadata=pb.MessageMetadata())) == []


def test_there_is_a_most_of_keys() -> None:
    keys = LatestKeys(2)
    keys.note(Position(1, 0), single("a"))
    keys.note(Position(1, 1), single("b"))
    keys.note(Position(1, 2), single("a"))
    with pytest.raises(LimitExceeded, match="more than 2 keys"):
        keys.note(Position(1, 3), single("c"))
    keys = LatestKeys(1)
    keys.note(Position(1, 0), chunk(0, 3))
    with pytest.raises(LimitExceeded):
        keys.note(Position(1, 1), chunk(1, 3))
    keys = LatestKeys(1)
    keys.keep(Position(1, 0))
    with pytest.raises(LimitExceeded):
        keys.keep(Position(1, 1))


def test_many_keys_are_looked_at_in_slices() -> None:
    keys = LatestKeys(5000)
    for number in range(5000):
        keys.note(Position(1, number), single(f"k{number}"))
    assert len(list(keys.survivors())) == 10


def test_a_large_batch_is_noted_in_slices() -> None:
    keys = LatestKeys(5000)
    last = {b"%d" % number: number if number % 7 else ~number for number in range(5000)}
    for number in range(2):
        assert len(list(keys.note_batch(Position(1, number), last))) == 3
    survivors = done(keys.survivors())
    assert list(survivors.entries) == [Position(1, 1)]
    assert sorted(survivors.indexes[Position(1, 1)]) == [at for at in last.values() if at >= 0]
    done(keys.note_batch(Position(1, 2), dict.fromkeys(last, ~0)))
    assert not len(keys)
    with pytest.raises(LimitExceeded):
        done(LatestKeys(4999).note_batch(Position(1, 0), dict.fromkeys(last, 1)))
