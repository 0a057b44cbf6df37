"""Legacy transactions of a stream: markers, and the record that spares a recovery the scan."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from magnetar.metadata.api import VALUE_BYTES_MAX
from magnetar.model.ids import Position
from magnetar.txn.ids import metadata_id
from magnetar.txn.legacy import ended_ids, stream_state
from magnetar.txn.legacy.markers import Trace, marker, trace_of
from magnetar.txn.legacy.stream_state import StreamRecord, StreamState
from magnetar.txn.records import State, encode
from magnetar.wire.messages import TxnId, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb

T1, T2 = TxnId(0, 1), TxnId(0, 2)


def at(entry: int) -> Position:
    return Position(1, entry)


# --- markers


def test_a_marker_says_which_transaction_ended_and_how() -> None:
    for txn in (TxnId(0, 0), TxnId(15, 2**62 - 1)):
        for state in ("COMMITTED", "ABORTED"):
            assert trace_of(marker(txn, state, 7)) == Trace(txn, state)


def test_messages_are_told_by_their_transaction() -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)
    # The bytes of the tag in the payload are no transaction.
    assert trace_of(encode_entry(metadata, b"\xb0\x01")) is None
    metadata.txnid_most_bits, metadata.txnid_least_bits = T1
    assert trace_of(encode_entry(metadata, b"")) == Trace(T1, None)
    assert trace_of(b"\x00\x00\x00\x09\xb0\x01") is None


# --- the state


def test_what_is_over_is_not_opened_again() -> None:
    state = StreamState()
    state.wrote(T1, at(0))
    assert not state.is_over(T1)
    state.marked(T1, at(1))
    assert state.is_over(T1)
    state.wrote(T1, at(2))
    assert not state.open
    assert state.last_marker == at(1)
    state.trimmed(at(1))
    assert state.last_marker == at(1)
    state.trimmed(at(2))
    assert state.last_marker is None


def test_the_low_watermark_of_a_coordinator_ends_its_own_alone() -> None:
    state = StreamState()
    other = TxnId(1, 1)
    for txn in (T1, T2, other):
        state.wrote(txn, at(0))
    assert state.note_low(0, 1)
    assert not state.note_low(0, 1)
    assert not state.note_low(0, 0)
    assert state.leftovers() == [T1]
    assert state.is_over(TxnId(0, 0))
    assert not state.is_over(T2)
    assert not state.is_over(other)


def test_ends_are_forgotten_when_the_low_watermark_has_passed_them() -> None:
    state = StreamState()
    for number in range(10):
        state.over(TxnId(0, number))
    assert len(state.record("s", 1, at(0)).ended) == 10
    state.note_low(0, 7)
    assert state.record("s", 1, at(0)).ended == ("0_8", "0_9")
    assert state.is_over(TxnId(0, 3))


def test_the_largest_record_can_be_stored() -> None:
    state = StreamState()
    for number in range(stream_state.OPEN_MAX):
        state.wrote(TxnId(15, 2**61 + number), Position(2**40, 2**30))
    for number in range(ended_ids.ENDED_MAX + 100):
        state.over(TxnId(15, 2**60 + number))
    record = state.record("persistent://t/n/" + "x" * 200, 1, at(0))
    assert len(encode(record)) < VALUE_BYTES_MAX
    assert len(record.ended) == ended_ids.ENDED_MAX


# --- the record and the stream


@dataclass
class Stream:
    """Entries in order, of which the last `flying` are not durable, and a live owner's state."""

    state: StreamState = field(default_factory=StreamState)
    entries: list[Trace | None] = field(default_factory=list)
    flying: list[tuple[int, Trace]] = field(default_factory=list)
    """Markers whose owner has not heard yet that they are durable."""

    @property
    def end(self) -> Position:
        return at(len(self.entries))

    def write(self, txn: TxnId) -> None:
        ending = {trace.txn for _, trace in self.flying}
        if not self.state.is_over(txn) and txn not in ending:
            self.state.wrote(txn, self.end)
            self.entries.append(Trace(txn, None))

    def finish(self, txn: TxnId, end: State) -> None:
        if txn in self.state.open:
            self.state.marking(txn, self.end)
            self.flying.append((len(self.entries), Trace(txn, end)))
            self.entries.append(Trace(txn, end))

    def hear(self, count: int) -> None:
        for _ in range(min(count, len(self.flying))):
            place, trace = self.flying.pop(0)
            if trace.txn in self.state.open:
                self.state.marked(trace.txn, at(place))

    def recovered(self, record: StreamRecord) -> StreamState:
        decoded = msgspec.json.decode(encode(record), type=StreamRecord)
        state = StreamState.of(decoded)
        for number in range(decoded.scanned_to[1], len(self.entries)):
            trace = self.entries[number]
            if trace is not None:
                state.scan(at(number), trace)
        return state


IDS = st.builds(TxnId, st.integers(0, 1), st.integers(0, 4))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), IDS),
        st.tuples(st.just("plain"), IDS),
        st.tuples(st.just("metadata"), IDS),
        st.tuples(st.just("commit"), IDS),
        st.tuples(st.just("abort"), IDS),
        st.tuples(st.just("hear"), IDS),
        st.tuples(st.just("record"), IDS),
    ),
    max_size=60,
)


def played(steps: list[tuple[str, TxnId]]) -> tuple[Stream, list[StreamRecord]]:
    stream = Stream()
    records = [stream.state.record("s", 1, stream.end)]
    for what, txn in steps:
        if what == "write":
            stream.write(txn)
        elif what == "plain":
            stream.entries.append(None)
        elif what == "metadata":
            stream.entries.append(Trace(metadata_id(*txn), None))
        elif what in ("commit", "abort"):
            stream.finish(txn, "COMMITTED" if what == "commit" else "ABORTED")
        elif what == "hear":
            stream.hear(1 + txn.least)
        else:
            records.append(stream.state.record("s", 1, stream.end))
    stream.hear(len(stream.flying))
    return stream, records


@given(STEPS)
def test_any_record_and_the_rest_of_the_stream_are_the_state(
    steps: list[tuple[str, TxnId]],
) -> None:
    stream, records = played(steps)
    everyone = [TxnId(most, least) for most in range(2) for least in range(5)]
    for record in records:
        found = stream.recovered(record)
        assert found.open.keys() == stream.state.open.keys()
        for txn, first in found.open.items():
            # Where it begins may be known too early, never too late.
            assert first <= stream.state.open[txn]
        assert found.last_marker == stream.state.last_marker
        for txn in everyone:
            assert found.is_over(txn) == stream.state.is_over(txn)


def test_without_the_floor_of_unheard_markers_a_record_loses_an_end() -> None:
    """Why `marking` is: a record taken between the marker and the news of it."""
    stream = Stream()
    stream.write(T1)
    stream.finish(T1, "COMMITTED")
    record = stream.state.record("s", 1, stream.end)
    assert not stream.recovered(record).open
    blind = msgspec.structs.replace(record, scanned_to=stream.end)
    assert stream.recovered(blind).open.keys() == {T1}


def test_a_record_that_ends_a_transaction_itself_needs_no_marker() -> None:
    stream = Stream()
    stream.write(T1)
    stream.write(T2)
    record = stream.state.record("s", 1, stream.end, T1)
    assert stream.recovered(record).open.keys() == {T2}
    # An attempt to append the marker may have come through: that is to be looked for.
    stream.state.marking(T2, stream.end)
    stream.entries.append(Trace(T2, "COMMITTED"))
    record = stream.state.record("s", 1, stream.end, T2)
    found = stream.recovered(record)
    assert found.last_marker is not None
    assert found.last_marker >= at(2)
