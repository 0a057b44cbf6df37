"""Chunks: round trips in any interleaving, repetitions, gaps, limits."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.message.batch import Outgoing, OutgoingEntry, Stamp, open_entry, unpacked
from magnetar.client.message.chunks import COMPLETED_MAX, ChunkAssembler, Taken, chunk_entries
from magnetar.errors import InvalidValue
from magnetar.model.ids import MessageId
from magnetar.wire.compression import Compression

STAMP = Stamp("p", 0)
FAR = 1e9


def _chunks(payload: bytes, uuid: str, size: int = 3, stamp: Stamp = STAMP) -> list[OutgoingEntry]:
    message = Outgoing(payload=payload, sequence_id=7, key="k", properties={"a": "b"})
    return list(chunk_entries(message, stamp, uuid=uuid, chunk_bytes=size))


def _add(assembler: ChunkAssembler, entry: OutgoingEntry, number: int, now: float = 0.0) -> Taken:
    opened = open_entry(entry.headers_and_payload)
    return assembler.add(opened.metadata, opened.payload, MessageId(1, number), now)


@given(st.binary(max_size=300), st.integers(1, 60), st.sampled_from(list(Compression)))
def test_round_trip(payload: bytes, size: int, compression: Compression) -> None:
    assembler = ChunkAssembler()
    entries = _chunks(payload, "u", size, Stamp("p", 0, compression))
    if len(entries) == 1:
        opened = open_entry(entries[0].headers_and_payload)
        assert opened.payload == payload
        assert not opened.metadata.HasField("uuid")
        return
    results = [_add(assembler, entry, number) for number, entry in enumerate(entries)]
    assert all(taken == Taken() for taken in results[:-1])
    whole = results[-1].payload
    assert whole is not None
    assert unpacked(whole, open_entry(entries[0].headers_and_payload).metadata) == payload
    assert results[-1].ids == tuple(MessageId(1, number) for number in range(len(entries)))
    assert assembler.expired(FAR) == ()
    assert {entry.sequence_id for entry in entries} == {7}


@given(st.randoms(use_true_random=False), st.lists(st.binary(min_size=4, max_size=30), max_size=8))
def test_messages_of_many_producers_come_out_whole_whatever_is_repeated(
    random: Random, payloads: list[bytes]
) -> None:
    queues = [_chunks(payload, f"u{n}") for n, payload in enumerate(payloads)]
    expected, found, number = {f"u{n}": payload for n, payload in enumerate(payloads)}, {}, 0
    went_in, came_out = set(), []
    assembler = ChunkAssembler()
    while any(queues):
        queue = random.choice([queue for queue in queues if queue])
        entry = queue[0]
        if len(queue) == 1 or random.random() < 0.7:
            queue.pop(0)  # else its producer sends it again
        number += 1
        went_in.add(MessageId(1, number))
        taken = _add(assembler, entry, number)
        came_out += [*taken.ids, *taken.repeated, *taken.given_up]
        if taken.payload is not None:
            found[open_entry(entry.headers_and_payload).metadata.uuid] = taken.payload
    assert found == expected
    assert sorted(came_out) == sorted(went_in), "each exactly once"


def test_a_chunk_out_of_turn_ends_its_message() -> None:
    assembler = ChunkAssembler()
    first, second, third = _chunks(b"abcdefgh", "u")
    assert _add(assembler, second, 1).given_up == (MessageId(1, 1),)
    _add(assembler, first, 2)
    assert _add(assembler, third, 4).given_up == (MessageId(1, 2), MessageId(1, 4))
    assert assembler.expired(FAR) == ()


def test_a_chunk_that_the_broker_delivers_again_is_not_acknowledged() -> None:
    assembler = ChunkAssembler()
    first, second = _chunks(b"abcd", "u")
    _add(assembler, first, 1)
    assert _add(assembler, first, 1) == Taken()
    assert _add(assembler, first, 2) == Taken(repeated=(MessageId(1, 2),))
    assert _add(assembler, second, 3).ids == (MessageId(1, 1), MessageId(1, 3))


def test_a_chunk_behind_its_message_is_a_repetition_unless_the_broker_delivers_it_again() -> None:
    assembler = ChunkAssembler()
    first, second = _chunks(b"abcd", "u")
    _add(assembler, first, 1)
    _add(assembler, second, 2)
    assert _add(assembler, second, 3) == Taken(repeated=(MessageId(1, 3),))
    assembler.clear()
    assert _add(assembler, first, 1) == Taken()
    assert _add(assembler, second, 2).payload == b"abcd"
    for number in range(10, 10 + 2 * COMPLETED_MAX, 2):
        for offset, entry in enumerate(_chunks(b"abcd", f"u{number}")):
            _add(assembler, entry, number + offset)
    assert _add(assembler, second, 3).given_up == (MessageId(1, 3),), "it is forgotten"


def test_the_oldest_is_given_up_for_a_new_one() -> None:
    assembler = ChunkAssembler(messages_max=2)
    for number in range(3):
        taken = _add(assembler, _chunks(b"abcdef", f"u{number}")[0], number)
    assert taken.given_up == (MessageId(1, 0),)
    assert assembler.expired(FAR) == (MessageId(1, 1), MessageId(1, 2))
    small = ChunkAssembler(bytes_max=10)
    _add(small, _chunks(b"abcdef", "a")[0], 0)
    assert _add(small, _chunks(b"abcdefgh", "b")[0], 1).given_up == (MessageId(1, 0),)
    assert _add(small, _chunks(b"abcdefghijk", "c")[0], 2).given_up == (MessageId(1, 2),)


def test_what_waits_too_long_is_given_up() -> None:
    assembler = ChunkAssembler(expire_s=10)
    _add(assembler, _chunks(b"abcdef", "u")[0], 0, now=5.0)
    assert assembler.expired(14.9) == ()
    assert assembler.expired(15.0) == (MessageId(1, 0),)
    _add(assembler, _chunks(b"abcdef", "v")[0], 1, now=5.0)
    assembler.clear()
    assert assembler.expired(FAR) == ()


@given(
    st.integers(-2, 5), st.integers(-2, 5), st.integers(-5, 9), st.binary(max_size=6), st.booleans()
)
def test_absurd_chunks_never_stay(
    chunk_id: int, count: int, total: int, payload: bytes, begun: bool
) -> None:
    assembler = ChunkAssembler(bytes_max=8)
    metadata = open_entry(_chunks(b"abcdef", "u")[0].headers_and_payload).metadata
    if begun:
        assembler.add(metadata, b"abc", MessageId(1, 1), 0.0)
    metadata.chunk_id, metadata.num_chunks_from_msg = chunk_id, count
    metadata.total_chunk_msg_size = total
    assembler.add(metadata, payload, MessageId(1, 2), 0.0)
    assert len(assembler.expired(FAR)) <= 2


def test_chunks_have_a_size() -> None:
    with pytest.raises(InvalidValue):
        _chunks(b"abc", "u", 0)
