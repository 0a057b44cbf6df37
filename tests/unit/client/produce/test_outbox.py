"""Messages on their way to one segment: their order and their numbers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.message.batch import messages_in, open_entry
from magnetar.client.produce.outbox import (
    UNNUMBERED,
    Outbox,
    Pending,
    PendingSend,
    SequenceIds,
)
from magnetar.client.produce.settings import ProducerSettings
from magnetar.errors import MessageTooLarge, RemoteProtocolError
from magnetar.model.hashing import FULL_RING
from magnetar.model.segments import Segment, bucket_splits
from magnetar.runtime.clock import SystemClock
from tests.unit.client.encryption.test_encryption import made


class Sender:
    """An outbox, and the futures of its messages."""

    def __init__(self, *, is_regular: bool = False, **settings: object) -> None:
        self.numbers = SequenceIds(0)
        self.loop = asyncio.new_event_loop()
        self.outbox = Outbox(
            Segment(0, FULL_RING, legacy_topic_name="persistent://public/default/t")
            if is_regular
            else Segment(0, FULL_RING, entry_bucket_splits=bucket_splits(4)),
            ProducerSettings(**settings),  # type: ignore[arg-type]
            producer_name="p-seg-0",
            sequences=self.numbers,
            clock=SystemClock(),
            chance=Random(0),
        )

    def message(self, key: str | None, payload: bytes, number: int = UNNUMBERED) -> Pending:
        return Pending(
            payload=payload,
            key=key,
            sequence_id=number,
            receipt=self.loop.create_future(),
            due_at=0,
            own_size=len(payload) + len(key or ""),
            is_numbered_by_application=number != UNNUMBERED,
        )

    def close(self) -> None:
        self.loop.close()


def test_encrypted_chunks_are_no_larger_than_the_broker_takes() -> None:
    sender = Sender(chunking=True)
    sender.outbox._cipher = made("a", "b")
    sender.outbox.entry_bytes_max = 2000
    sender.outbox.add(sender.message("k", bytes(10_000)))
    sizes = [len(each.entry.headers_and_payload) for each in sender.outbox.send_some(100_000)]
    assert len(sizes) > 1
    assert max(sizes) <= 2000
    sender.close()


def by_key(outbounds: list[PendingSend]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = defaultdict(list)
    for outbound in outbounds:
        for each in outbound.messages:
            assert isinstance(each.key, str)
            found[each.key].append(each.payload)
    return found


@given(st.integers(0, 2**32))
def test_numbers_grow_from_entry_to_entry_and_keys_keep_their_order(seed: int) -> None:
    chance = Random(seed)
    sender = Sender(batch_messages=chance.randrange(1, 20), batching=chance.random() < 0.8)
    sent: list[PendingSend] = []
    expected: dict[str, list[bytes]] = defaultdict(list)
    last_own = 0
    for number in range(chance.randrange(1, 80)):
        key, payload = f"k{chance.randrange(6)}", b"%d" % number
        own = UNNUMBERED
        if chance.random() < 0.3:
            own = last_own = last_own + 1000 + chance.randrange(3)
        sender.outbox.add(sender.message(key, payload, own))
        if own != UNNUMBERED:
            sender.numbers.go_behind(own)
        expected[key].append(payload)
        if chance.random() < 0.2:
            sender.outbox.close_batches()
        if chance.random() < 0.3:
            sent += sender.outbox.send_some(chance.randrange(1, 500))
    sender.outbox.close_batches()
    sent += sender.outbox.send_some(1 << 30)
    numbers = [each.sequence_id for outbound in sent for each in outbound.messages]
    assert numbers == sorted(set(numbers)), f"seed {seed}"
    assert by_key(sent) == expected
    for outbound in sent:
        opened = open_entry(outbound.entry.headers_and_payload)
        if opened.is_batch:
            assert [each.metadata.sequence_id for each in messages_in(opened)] == [
                each.sequence_id for each in outbound.messages
            ]
        assert outbound.entry.sequence_id == outbound.messages[0].sequence_id
    sender.close()


def test_what_was_sent_is_sent_again_first_and_with_the_same_bytes() -> None:
    sender = Sender(batching=False)
    for number in range(5):
        sender.outbox.add(sender.message("k", b"%d" % number))
    first = sender.outbox.send_some(1 << 20)
    assert sender.outbox.answered(0) is first[0]
    sender.outbox.add(sender.message("k", b"new"))
    first[2].messages[0].is_settled = True  # given up meanwhile
    sender.outbox.requeue(in_doubt=True)
    again = sender.outbox.send_some(1 << 20)
    assert again[:3] == [first[1], first[3], first[4]]
    assert again[3].messages[0].payload == b"new"
    assert sender.outbox.answered(99) is None
    with pytest.raises(RemoteProtocolError):
        sender.outbox.answered(3)
    sender.close()


def test_what_leaves_keeps_its_number_only_if_it_may_be_stored() -> None:
    sender = Sender()
    for number in range(3):
        sender.outbox.add(sender.message("k", b"%d" % number))
    sender.outbox.close_batches()
    sender.outbox.send_some(1)
    sender.outbox.add(sender.message("k", b"3"))
    sender.outbox.close_batches()
    sender.outbox.add(sender.message("k", b"4"))
    sender.outbox.add(sender.message("k", b"5", number=77))
    left = sender.outbox.left()
    assert [(each.payload, each.sequence_id, each.may_be_stored) for each in left] == [
        (b"0", 0, True), (b"1", 1, True), (b"2", 2, True),
        (b"3", -1, False), (b"4", -1, False), (b"5", 77, False),
    ]  # fmt: skip
    successor = Sender()
    for each in left:
        successor.outbox.add(each)
    successor.outbox.close_batches()
    sent = successor.outbox.send_some(1 << 20)
    assert [len(each.messages) for each in sent[:3]] == [1, 1, 1], "each travels alone"
    assert by_key(sent)["k"] == [b"%d" % number for number in range(6)]
    sender.close()
    successor.close()


def test_a_message_without_a_key_says_where_it_belongs_when_it_is_sent_again() -> None:
    sender = Sender()
    message = sender.message(None, b"x")
    message.place, message.may_be_stored, message.sequence_id = 0x8000, True, 5
    sender.outbox.add(message)
    (outbound,) = sender.outbox.send_some(1)
    opened = open_entry(outbound.entry.headers_and_payload)
    assert (opened.metadata.ring_position, opened.payload, opened.is_batch) == (0x8000, b"x", False)
    sender.close()


def test_messages_that_are_too_large() -> None:
    sender = Sender()
    sender.outbox.entry_bytes_max = 2000
    with pytest.raises(MessageTooLarge, match="the broker takes 2000"):
        sender.outbox.add(sender.message("k", bytes(3000)))
    sender.outbox.add(sender.message("k", b"small"))
    cutting = Sender(chunking=True)
    cutting.outbox.entry_bytes_max = 2000
    cutting.outbox.add(cutting.message("k", bytes(3000)))
    sent = cutting.outbox.send_some(1 << 20)
    assert [(each.is_chunk, each.is_whole) for each in sent] == [(True, False), (True, True)]
    assert all(len(each.entry.headers_and_payload) <= 2000 for each in sent)
    assert len(cutting.outbox.left()) == 1, "one message, however many chunks"
    wordy = cutting.message("k", bytes(3000))
    wordy.properties = {"long": "x" * 2000}
    with pytest.raises(MessageTooLarge, match="no room"):
        cutting.outbox.add(wordy)
    sender.close()
    cutting.close()


def test_batches_by_key_keep_the_order_of_the_applications_ids() -> None:
    """A broker takes an entry that begins below what it has for a repetition, all of it."""
    sender = Sender(is_regular=True, batch_by_key=True)
    for number in range(6):
        sender.outbox.add(sender.message(f"k{number % 2}", b"%d" % number, number))
    sender.outbox.close_batches()
    ends = -1
    for outbound in sender.outbox.send_some(1 << 30):
        entry = outbound.entry
        assert entry.sequence_id > ends
        ends = entry.highest_sequence_id or entry.sequence_id
    assert ends == 5
    sender.close()
