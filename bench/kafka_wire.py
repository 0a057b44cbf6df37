"""Requests and answers of Kafka's protocol, as far as a load generator needs them. *Pure*.

Versions below 9 or so have lengths of fixed size, the later ones ("flexible") have compact lengths
and a byte of tagged fields behind every structure. Of each request the version is taken that Kafka
4.2 still answers and that says what is needed: the later one only for the steps of a transaction,
where it saves two requests (the broker adds partitions and groups to a transaction by itself).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

PRODUCE: Final = 0
FETCH: Final = 1
LIST_OFFSETS: Final = 2
FIND_COORDINATOR: Final = 10
CREATE_TOPICS: Final = 19
INIT_PRODUCER_ID: Final = 22
END_TXN: Final = 26
TXN_OFFSET_COMMIT: Final = 28

NONE: Final = 0
NOT_YET: Final = frozenset({3, 5, 6, 14, 15, 16, 51})
"""Errors that go away: no leader, coordinator loading or moving, the last transaction ending."""

CORRELATION: Final = slice(8, 12)
"""Where the number of a request stands in its frame, its length included; an answer's is at 4."""

CLIENT: Final = "bench"
GROUP: Final = "bench"
TIMEOUT_MS: Final = 30_000
ACKS_ALL: Final = -1
FETCH_BYTES: Final = 1 << 20
"""Of one partition in one answer: what Kafka's consumer asks for unless told otherwise."""

_TAGS: Final = b"\0"
_TRANSACTIONAL: Final = 0x10
_BATCH: Final = struct.Struct(">qiibIhiqqqhii")
_BATCH_OVERHEAD: Final = 12
"""Base offset and length, which the length does not count."""

_CRC_AT: Final = 17
_LAST_DELTA_AT: Final = 23
_COUNT_AT: Final = 57


class Producer(NamedTuple):
    """Who writes in a transaction."""

    id: int
    epoch: int


ANYBODY: Final = Producer(-1, -1)


class Fetched(NamedTuple):
    """How many records an answer had, and where the next ones begin."""

    records: int
    next_offset: int


# --- requests


def produce(topic: str, partition: int, records: bytes) -> bytes:
    """Acknowledged by all replicas: with one node and synced logs, when it is on disk."""
    head = struct.pack(">hhii", -1, ACKS_ALL, TIMEOUT_MS, 1) + _string(topic)
    return _request(PRODUCE, 8, head + struct.pack(">iii", 1, partition, len(records)) + records)


def produce_in_transaction(name: str, topic: str, partition: int, records: bytes) -> bytes:
    head = _compact(name) + struct.pack(">hi", ACKS_ALL, TIMEOUT_MS)
    data = struct.pack(">i", partition) + _unsigned(len(records) + 1) + records + _TAGS
    return _flexible(PRODUCE, 12, head + b"\2" + _compact(topic) + b"\2" + data + _TAGS + _TAGS)


def commit_offset(name: str, producer: Producer, topic: str, partition: int, offset: int) -> bytes:
    """That an input was read, in a transaction; the group has no members."""
    head = _compact(name) + _compact(GROUP) + struct.pack(">qhi", *producer, -1) + _compact("")
    data = struct.pack(">iqi", partition, offset, -1) + _unsigned(0) + _TAGS
    body = head + _unsigned(0) + b"\2" + _compact(topic) + b"\2" + data + _TAGS + _TAGS
    return _flexible(TXN_OFFSET_COMMIT, 5, body)


def end_transaction(name: str, producer: Producer) -> bytes:
    return _flexible(END_TXN, 5, _compact(name) + struct.pack(">qhb", *producer, 1) + _TAGS)


def find_coordinator(name: str, kind: int) -> bytes:
    return _request(FIND_COORDINATOR, 2, _string(name) + struct.pack(">b", kind))


def init_producer(name: str) -> bytes:
    return _request(INIT_PRODUCER_ID, 1, _string(name) + struct.pack(">i", TIMEOUT_MS))


def create_topic(topic: str, partitions: int, settings: Sequence[tuple[str, str]]) -> bytes:
    configured = b"".join(_string(key) + _string(value) for key, value in settings)
    body = struct.pack(">i", 1) + _string(topic) + struct.pack(">ihi", partitions, 1, 0)
    body += struct.pack(">i", len(settings)) + configured + struct.pack(">ib", TIMEOUT_MS, 0)
    return _request(CREATE_TOPICS, 4, body)


def list_offset(topic: str, partition: int) -> bytes:
    body = struct.pack(">ii", -1, 1) + _string(topic) + struct.pack(">iiq", 1, partition, -1)
    return _request(LIST_OFFSETS, 1, body)


def fetch(topic: str, partition: int, offset: int) -> bytes:
    """What is there from an offset on; waits for the first byte."""
    head = struct.pack(">iiiibiii", -1, 500, 1, 50 * FETCH_BYTES, 0, 0, -1, 1) + _string(topic)
    part = struct.pack(">iiiqqi", 1, partition, -1, offset, -1, FETCH_BYTES)
    return _request(FETCH, 11, head + part + struct.pack(">i", 0) + _string(""))


# --- answers; the frames come without their lengths


def produce_error_at(topic: str) -> int:
    """Where the error of an answer to `produce` stands, in a frame with its length."""
    return 4 + 4 + 4 + 2 + len(topic) + 4 + 4


def error_of(api: int, answer: bytes) -> int:
    """The error of an answer that speaks of one topic, group or transaction."""
    if api in (PRODUCE, TXN_OFFSET_COMMIT):
        # Of transactions, so flexible: number, tags, for the second the throttle time; then the
        # topics, each name with its length, the partitions, and the index of the first.
        at = 5 + (4 if api == TXN_OFFSET_COMMIT else 0) + 1
        return _short(answer, at + answer[at] + 1 + 4)
    if api == END_TXN:
        return _short(answer, 9)
    if api == LIST_OFFSETS:
        return _short(answer, 8 + 2 + _short(answer, 8) + 8)
    if api == CREATE_TOPICS:
        return _short(answer, 12 + 2 + _short(answer, 12))
    return _short(answer, 8)


def producer_of(api: int, answer: bytes) -> Producer:
    """Who writes from now on, as INIT_PRODUCER_ID and END_TXN tell."""
    return Producer(*struct.unpack_from(">qh", answer, 11 if api == END_TXN else 10))


def fetched(answer: bytes, topic: str, offset: int) -> Fetched:
    """What an answer to `fetch` holds; a batch that is cut off at its end does not count."""
    at = 4 + 4 + 2 + 4 + 4 + 2 + len(topic) + 4 + 4
    error = _short(answer, at)
    if error:
        raise ConnectionError(f"refused: error {error}")
    (aborted,) = struct.unpack_from(">i", answer, at + 26)
    at += 30 + 16 * max(0, aborted) + 4
    (size,) = struct.unpack_from(">i", answer, at)
    at, end, records = at + 4, at + 4 + size, 0
    while end - at >= _BATCH.size:
        first, length = struct.unpack_from(">qi", answer, at)
        if at + _BATCH_OVERHEAD + length > end:
            break
        (last,) = struct.unpack_from(">i", answer, at + _LAST_DELTA_AT)
        (count,) = struct.unpack_from(">i", answer, at + _COUNT_AT)
        records, offset = records + count, first + last + 1
        at += _BATCH_OVERHEAD + length
    return Fetched(records, offset)


# --- records


def batch(payload: bytes, count: int, now_ms: int, producer: Producer = ANYBODY) -> bytes:
    """So many records without keys; of a transaction if somebody is named."""
    transactional = producer != ANYBODY
    records = b"".join(_record(number, payload) for number in range(count))
    made = bytearray(
        _BATCH.pack(
            *(0, _BATCH.size - _BATCH_OVERHEAD + len(records), -1, 2, 0),
            *(_TRANSACTIONAL if transactional else 0, count - 1, now_ms, now_ms),
            *(producer.id, producer.epoch, 0 if transactional else -1, count),
        )
        + records
    )
    struct.pack_into(">I", made, _CRC_AT, crc32c(bytes(made[_CRC_AT + 4 :])))
    return bytes(made)


def _record(number: int, payload: bytes) -> bytes:
    body = b"\0" + _signed(0) + _signed(number) + _signed(-1) + _signed(len(payload)) + payload
    body += _signed(0)
    return _signed(len(body)) + body


# --- pieces


def _request(api: int, version: int, body: bytes, tags: bytes = b"") -> bytes:
    head = struct.pack(">hhi", api, version, 0) + _string(CLIENT) + tags
    return struct.pack(">i", len(head) + len(body)) + head + body


def _flexible(api: int, version: int, body: bytes) -> bytes:
    return _request(api, version, body, _TAGS)


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _compact(text: str) -> bytes:
    return _unsigned(len(text) + 1) + text.encode()


def _unsigned(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _signed(value: int) -> bytes:
    return _unsigned(value << 1 if value >= 0 else (-value << 1) - 1)


def _short(data: bytes, at: int) -> int:
    (value,) = struct.unpack_from(">h", data, at)
    return int(value)
