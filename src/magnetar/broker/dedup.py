"""Pure: which sends of a topic are stored already, by producer name and sequence id.

Owns: `Dedup`: per producer name the highest pushed and the highest persisted sequence, what is in
flight between the two, and the holes that failed appends left; its stored form.

A send covers the sequences from its own id to its highest (of a batch; else the same). Of a chunked
message only the last chunk counts: the others share its sequence, and are stored unjudged.

Invariants (`check_invariants`):
1. persisted <= pushed. With nothing in flight the two are equal.
2. A sequence at or below `persisted` is in the log, was skipped by its producer, or is in a hole:
   an append that failed while a later one of the same producer reached the log. So DUPLICATE never
   answers for something that is not stored, and a hole can be filled: its resend is STORE.
3. Holes are disjoint, ascending, not empty, and lie below `pushed`.
4. What is decided STORE is settled (`persisted` or `failed`) once, in the order of the decisions
   about its name.
5. Only names without a producer are ever forgotten.

Relies on: the caller, which settles every append even after its producer has gone, and stores a
snapshot before it serves a topic on which `has_holes` (a log alone does not show holes).
"""

from __future__ import annotations

import struct
from collections import deque
from enum import Enum
from typing import Final, NamedTuple

from magnetar.errors import CorruptMetadata, FormatTooNew, InvariantBroken
from magnetar.model.ids import Position

NO_SEQUENCE: Final = -1

_VERSION: Final = 1
_HEADER: Final = struct.Struct(">BqqI")
_NAME_SIZE: Final = struct.Struct(">I")
_PRODUCER: Final = struct.Struct(">qI")
_HOLE: Final = struct.Struct(">qq")


class Verdict(Enum):
    """What to do with a send."""

    STORE = "store"
    DUPLICATE = "duplicate"
    """It is stored: answer a receipt with position (-1, -1)."""
    UNKNOWN = "unknown"
    """It was pushed, and whether it will be stored is not known yet: answer an error."""


class Span(NamedTuple):
    """Sequences of one producer, both ends included."""

    first: int
    last: int


class _Producer:
    __slots__ = ("filling", "holes", "in_flight", "persisted", "pushed")

    def __init__(self, persisted: int) -> None:
        self.pushed = persisted
        self.persisted = persisted
        self.in_flight: deque[Span] = deque()
        self.holes: list[Span] = []
        self.filling: list[Span] = []
        """Those in flight again that were holes."""


class Dedup:
    """The sequences of one topic. Times are the caller's, in any unit that only grows."""

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._producers: dict[str, _Producer] = {}
        self._absent: dict[str, float] = {}
        """Names without a producer, by when it left: the longest absent first."""

    # --- sends

    def decide(
        self,
        name: str,
        sequence_id: int,
        highest_sequence_id: int = NO_SEQUENCE,
        *,
        is_last_chunk: bool = True,
    ) -> Verdict:
        """Judge a send. After STORE it counts as pushed, and the caller owes its settlement."""
        if not is_last_chunk:
            return Verdict.STORE
        producer = self._producers.get(name)
        if producer is None:
            producer = self._producers[name] = _Producer(NO_SEQUENCE)
        sent = Span(sequence_id, max(sequence_id, highest_sequence_id))
        if sequence_id > producer.pushed:
            producer.pushed = sent.last
        elif _within(sequence_id, producer.holes):
            producer.holes = _without(producer.holes, sent)
            producer.filling.append(sent)
        elif sequence_id > producer.persisted or _within(sequence_id, producer.filling):
            return Verdict.UNKNOWN
        else:
            return Verdict.DUPLICATE
        producer.in_flight.append(sent)
        return Verdict.STORE

    def persisted(self, name: str, sequence_id: int, *, is_last_chunk: bool = True) -> None:
        """The append of a send that was decided STORE is durable."""
        if is_last_chunk:
            producer, sent = self._settled(name, sequence_id)
            if sent.last > producer.persisted:
                producer.persisted = sent.last

    def failed(self, name: str, sequence_id: int, *, is_last_chunk: bool = True) -> None:
        """The append of a send that was decided STORE failed: forget that it was pushed."""
        if not is_last_chunk:
            return
        producer, sent = self._settled(name, sequence_id)
        highest_in_flight = max((each.last for each in producer.in_flight), default=NO_SEQUENCE)
        producer.pushed = max(highest_in_flight, producer.persisted)
        # Above everything pushed there is no hole: a resend is new by its number alone.
        holes = sorted([*_without(producer.holes, sent), sent])
        pushed = producer.pushed
        producer.holes = [Span(low, min(high, pushed)) for low, high in holes if low <= pushed]

    def last_sequence_id(self, name: str) -> int:
        """Up to where a producer need not send again; -1 if it never sent."""
        producer = self._producers.get(name)
        if producer is None:
            return NO_SEQUENCE
        return producer.holes[0].first - 1 if producer.holes else producer.pushed

    @property
    def has_holes(self) -> bool:
        return any(producer.holes for producer in self._producers.values())

    # --- names

    def producer_joined(self, name: str) -> None:
        self._absent.pop(name, None)

    def producer_left(self, name: str, now: float) -> None:
        if name in self._producers:
            self._absent.pop(name, None)
            self._absent[name] = now

    def forget_idle(self, now: float, idle: float) -> list[str]:
        """Drop the names absent for at least `idle`, and the longest absent above the limit."""
        forgotten: list[str] = []
        for name, since in self._absent.items():
            surplus = len(self._producers) - len(forgotten) > self._names_max
            if since > now - idle and not surplus:
                break
            if not self._producers[name].in_flight:
                forgotten.append(name)
        for name in forgotten:
            del self._absent[name], self._producers[name]
        return forgotten

    def __len__(self) -> int:
        return len(self._producers)

    # --- the stored form

    def snapshot(self, position: Position) -> bytes:
        """What is persisted, for a log that is covered up to `position` at least."""
        out = bytearray(_HEADER.pack(_VERSION, *position, len(self._producers)))
        for name, producer in self._producers.items():
            encoded = name.encode()
            out += _NAME_SIZE.pack(len(encoded)) + encoded
            persisted = producer.persisted
            missing = sorted([*producer.holes, *producer.filling])
            holes = [Span(low, min(high, persisted)) for low, high in missing if low <= persisted]
            out += _PRODUCER.pack(persisted, len(holes))
            for hole in holes:
                out += _HOLE.pack(*hole)
        return bytes(out)

    @classmethod
    def restore(cls, data: bytes, names_max: int, now: float) -> tuple[Dedup, Position]:
        """State of a snapshot, and behind which position to replay. All names are absent."""
        if data and data[0] > _VERSION:
            raise FormatTooNew(f"a dedup snapshot has version {data[0]}, not up to {_VERSION}")
        dedup = cls(names_max)
        try:
            version, ledger_id, entry_id, count = _HEADER.unpack_from(data)
            offset = _HEADER.size
            for _ in range(count):
                offset = dedup._restore_producer(data, offset, now)
            dedup.check_invariants()
        except (struct.error, UnicodeDecodeError, InvariantBroken) as error:
            raise CorruptMetadata(f"a dedup snapshot of {len(data)} bytes: {error}") from error
        if version != _VERSION or offset != len(data) or len(dedup) != count:
            raise CorruptMetadata(f"a dedup snapshot of {len(data)} bytes does not add up")
        return dedup, Position(ledger_id, entry_id)

    def _restore_producer(self, data: bytes, offset: int, now: float) -> int:
        (size,) = _NAME_SIZE.unpack_from(data, offset)
        offset += _NAME_SIZE.size
        name = data[offset : offset + size].decode()
        offset += size
        persisted, holes = _PRODUCER.unpack_from(data, offset)
        offset += _PRODUCER.size
        producer = self._producers[name] = _Producer(persisted)
        for _ in range(holes):
            producer.holes.append(Span(*_HOLE.unpack_from(data, offset)))
            offset += _HOLE.size
        self._absent[name] = now
        return offset

    def replay(
        self,
        name: str,
        sequence_id: int,
        highest_sequence_id: int = NO_SEQUENCE,
        *,
        now: float,
        is_last_chunk: bool = True,
    ) -> None:
        """An entry of the log behind the snapshot; in log order, before anything is decided."""
        if not is_last_chunk:
            return
        producer = self._producers.get(name)
        if producer is None:
            producer = self._producers[name] = _Producer(NO_SEQUENCE)
        highest = max(sequence_id, highest_sequence_id)
        producer.holes = _without(producer.holes, Span(sequence_id, highest))
        producer.pushed = producer.persisted = max(producer.persisted, highest)
        self._absent.pop(name, None)
        self._absent[name] = now

    # --- parts

    def check_invariants(self) -> None:
        for name, producer in self._producers.items():
            pushed, persisted = producer.pushed, producer.persisted
            if persisted > pushed or (not producer.in_flight and persisted != pushed):
                raise InvariantBroken(f"{name}: persisted {persisted}, pushed {pushed}")
            before = NO_SEQUENCE
            for hole in producer.holes:
                if not before < hole.first <= hole.last or hole.first > pushed:
                    raise InvariantBroken(f"{name}: hole {hole} after {before}, pushed {pushed}")
                before = hole.last
        if not self._absent.keys() <= self._producers.keys():
            raise InvariantBroken("an absent producer has no sequences")

    def _settled(self, name: str, sequence_id: int) -> tuple[_Producer, Span]:
        producer = self._producers.get(name)
        if producer is None or not producer.in_flight:
            raise InvariantBroken(f"{name}: nothing is in flight, settled {sequence_id}")
        sent = producer.in_flight.popleft()
        if sent.first != sequence_id:
            raise InvariantBroken(f"{name}: settled {sequence_id}, the next one is {sent.first}")
        if sent in producer.filling:
            producer.filling.remove(sent)
        return producer, sent


def _within(sequence_id: int, spans: list[Span]) -> bool:
    return any(span.first <= sequence_id <= span.last for span in spans)


def _without(spans: list[Span], gone: Span) -> list[Span]:
    """What is left of ascending spans without these sequences."""
    rest: list[Span] = []
    for span in spans:
        lower = Span(span.first, min(span.last, gone.first - 1))
        upper = Span(max(span.first, gone.last + 1), span.last)
        rest += [each for each in (lower, upper) if each.first <= each.last]
    return rest
