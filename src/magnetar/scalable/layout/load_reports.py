"""Reports of the load of this broker's segments for auto-scale, and samples of their keys.

Owns: `LoadReporter`, which measures every loaded active segment at an interval and keeps its
`LoadRecord`; and `sample_positions`, which looks where on the ring a segment's load is.

Invariants:
1. A report costs the publish path nothing: it is the difference of counters that exist anyway.
2. A record is written only if the load moved (`autoscale.next_report`), and never for a segment
   that is sealed, or that this broker has unloaded: with its last write before the unload, a
   deletion of the topic's state leaves nothing behind.
3. Whoever serves a segment next goes on from what is stored.
4. A failed report is logged and made good at the next interval.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from magnetar.broker.entries import EntryView
from magnetar.broker.topic.nonpersistent import LoadedTopic
from magnetar.broker.topic.topic import Topic
from magnetar.errors import MagnetarError, NotAllowed
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.metadata.api import MetadataStore
from magnetar.model.hashing import HashRange, key_hash, segment_hash
from magnetar.model.ids import Position
from magnetar.model.names import SegmentDescriptor, TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.scalable.layout.autoscale import Rates, Sample, next_report, noise_of
from magnetar.scalable.records import LoadRecord, decode, encode, load_key
from magnetar.wire.messages import payload_offset
from magnetar.wire.pb import pulsar_pb2 as pb

SAMPLED_BYTES_MAX: Final = 1024 * 1024
"""Read for one look at a segment's keys."""

# Bounds the puts in flight of a broker with thousands of segments.
_REPORTS_AT_ONCE: Final = 64
# Keys of one batch are spread like any: some of them tell enough of the others.
_BATCH_KEYS_MAX: Final = 16
# Parsing a thousand entries in one turn would be felt by producers.
_ENTRIES_PER_TURN: Final = 64
_SIZE: Final = struct.Struct(">I")
_LOG: Final = logger(__name__)


# --- reports


@dataclass(slots=True)
class _Totals:
    """Counters of a segment at one moment."""

    messages_in: int
    bytes_in: int
    out: dict[str, tuple[int, int]]
    """Messages and bytes by subscription."""

    @classmethod
    def of(cls, topic: Topic) -> _Totals:
        out = {}
        for name, subscription in topic.subscriptions.items():
            stats = subscription.stats()
            out[name] = stats.msg_out_counter, stats.bytes_out_counter
        return cls(topic.messages_in, topic.bytes_in, out)

    def since(self, before: _Totals, seconds: float) -> Rates:
        """The rates between two moments; a subscription that began meanwhile began at 0."""
        messages_out = bytes_out = 0
        for name, (messages, size) in self.out.items():
            messages_then, size_then = before.out.get(name, (0, 0))
            # A subscription that was deleted and made anew counts from 0: all that it gave is new.
            same = messages >= messages_then and size >= size_then
            messages_out += messages - messages_then if same else messages
            bytes_out += size - size_then if same else size
        totals = (
            max(self.messages_in - before.messages_in, 0),
            max(self.bytes_in - before.bytes_in, 0),
            messages_out,
            bytes_out,
        )
        return Rates(*(total / seconds for total in totals))


@dataclass(slots=True)
class _Measured:
    """One loaded segment."""

    topic: Topic
    totals: _Totals
    at: float
    stored: LoadRecord | None = None
    """What the store holds, once it was read."""
    read: bool = False


class LoadedTopics(Protocol):
    """The part of `broker.topics.Topics` that is needed here."""

    @property
    def loaded(self) -> Mapping[TopicName, LoadedTopic]: ...


class LoadReporter(Service):
    """Reports the load of this broker's segments."""

    def __init__(
        self, topics: LoadedTopics, metadata: MetadataStore, *, clock: Clock, limits: Limits
    ) -> None:
        super().__init__("load reporter", stop_seconds=limits.close_seconds)
        self._topics = topics
        self._metadata = metadata
        self._clock = clock
        self._interval = limits.scalable_load_report_interval_seconds
        self._change_percent = limits.scalable_load_report_change_percent
        self._noise = noise_of(limits)
        self._measured: dict[int, _Measured] = {}
        """By identity of the topic: one that is loaded again counts from 0 again."""

    async def _start(self) -> None:
        self._begin()
        self.spawn(self._report_at_intervals(), "report")

    async def _report_at_intervals(self) -> None:
        while True:
            await self._clock.sleep(self._interval)
            await self.report()

    async def report(self) -> None:
        """Measure every segment, and write what moved."""
        self._begin()
        known = list(self._measured.values())
        for first in range(0, len(known), _REPORTS_AT_ONCE):
            some = known[first : first + _REPORTS_AT_ONCE]
            await asyncio.gather(*(self._report(each) for each in some))

    def _begin(self) -> None:
        """Forget segments that have gone, and begin to measure those that have come."""
        # By identity, for a topic that was unloaded and loaded again is
        # another one, with new counters.
        present = {id(each): each for each in self._topics.loaded.values() if _is_measured(each)}
        self._measured = {
            number: self._measured.get(number) or self._first(topic)
            for number, topic in present.items()
            if isinstance(topic, Topic)
        }

    def _first(self, topic: Topic) -> _Measured:
        return _Measured(topic, _Totals.of(topic), self._clock.monotonic())

    async def _report(self, measured: _Measured) -> None:
        try:
            await self._measure(measured)
        except MagnetarError as error:
            _LOG.warning("load-report-failed", topic=str(measured.topic.name), error=str(error))

    async def _measure(self, measured: _Measured) -> None:
        topic, segment = measured.topic, _descriptor(measured.topic)
        key = load_key(topic.name.scalable_topic(), segment.segment_id)
        # The former owner's report goes on to hold (invariant 3): a move does
        # not reset merge windows.
        if not measured.read:
            found = await self._metadata.get(key)
            measured.stored = None if found is None else decode(found, LoadRecord)
            measured.read = True
        now = self._clock.monotonic()
        # Checked after the await: sealed or unloaded meanwhile, nothing more
        # is written (invariant 2).
        if now <= measured.at or not self._is_ours(topic):
            return
        totals = _Totals.of(topic)
        # A producer that leaves is between two counters for a moment: the sum seems to fall.
        totals.messages_in = max(totals.messages_in, measured.totals.messages_in)
        totals.bytes_in = max(totals.bytes_in, measured.totals.bytes_in)
        rates = totals.since(measured.totals, now - measured.at)
        measured.totals, measured.at = totals, now
        record = next_report(
            measured.stored,
            segment.segment_id,
            rates,
            self._clock.now_ms(),
            change_percent=self._change_percent,
            noise=self._noise,
        )
        if record is not None:
            await self._metadata.put(key, encode(record))  # submitted before anything else happens
            measured.stored = record

    def _is_ours(self, topic: Topic) -> bool:
        return self._topics.loaded.get(topic.name) is topic and _is_measured(topic)


def _is_measured(topic: LoadedTopic) -> bool:
    return (
        isinstance(topic, Topic)
        and topic.name.descriptor is not None
        and not topic.terminated
        and not topic.closing
        and topic.lost is None
    )


def _descriptor(topic: Topic) -> SegmentDescriptor:
    if topic.name.descriptor is None:
        raise NotAllowed(f"{topic.name} is no segment")
    return topic.name.descriptor


# --- samples


async def sample_positions(topic: Topic, entries_max: int) -> list[Sample]:
    """Where on the ring the last messages of a segment are, for `autoscale.split_point`."""
    hash_range = _descriptor(topic).hash_range
    ledger = topic.ledger
    start = _near_end(ledger, entries_max)
    found: list[Sample] = []
    for number, entry in enumerate(await ledger.read(start, entries_max, SAMPLED_BYTES_MAX)):
        if number % _ENTRIES_PER_TURN == _ENTRIES_PER_TURN - 1:
            await asyncio.sleep(0)  # producers and consumers go on meanwhile
        view = EntryView.of(entry)
        if not view.is_marker:
            found += _samples(view, hash_range)
    return found


def _near_end(ledger: ManagedLedger, entries: int) -> Position:
    """The position of the last but `entries` entry, or the first one."""
    for span in reversed(ledger.ledger_spans):
        # Counted back over ledgers, without reading them.
        if span.entries >= entries:
            return Position(span.ledger_id, span.entries - entries)
        entries -= span.entries
    return ledger.first_position()


def _samples(view: EntryView, hash_range: HashRange) -> Iterator[Sample]:
    """The keys of an entry; each stands for its share of the entry's messages."""
    keys = [*_batch_keys(view)] if view.is_batch else []
    # Not a batch, or one that only its consumer can read: the entry's own key, if it has one.
    if not keys:
        keys = [view.metadata.partition_key if view.metadata.HasField("partition_key") else None]
    share = 1 / len(keys)
    for number, key in enumerate(keys):
        position = None if key is None else segment_hash(key_hash(key))
        if position is None or position not in hash_range:
            # Its producer chose the segment without a key, and spreads such messages over all
            # segments: after a split each part gets its share, wherever the point is.
            spread = key_hash(f"{view.producer_name}-{view.sequence_id}-{number}")
            position = hash_range.start + spread % hash_range.size
        yield Sample(position, view.num_messages * share, len(view.payload) * share)


def _batch_keys(view: EntryView) -> Iterator[str | None]:
    """The keys of the first messages of a batch; none if the broker cannot read it."""
    metadata, data = view.metadata, view.payload
    # Compressed or encrypted: a broker has no business inside.
    if metadata.compression != pb.NONE or metadata.encryption_keys:
        return
    offset = payload_offset(data)
    for _ in range(min(view.num_messages, _BATCH_KEYS_MAX)):
        body = offset + _SIZE.size
        # Fewer messages than it says: what was found so far is good enough for a sample.
        if body > len(data):
            return
        (size,) = _SIZE.unpack_from(data, offset)
        single = pb.SingleMessageMetadata()
        try:
            single.ParseFromString(data[body : body + size])
        except DecodeError:
            return  # what the client sent as a batch is none
        yield single.partition_key if single.HasField("partition_key") else None
        offset = body + size + max(single.payload_size, 0)
