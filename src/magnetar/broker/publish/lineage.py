"""Pure: what a segment knows of the sequences that its parents stored.

Owns: `SequenceSpan`, `Piece`, `Lineage` (what a sealed segment hands to its children, and its
stored form), and by which name a producer of a segment counts for dedup.

A piece says of one producer name and one part of the ring: sequences up to `persisted` are stored,
or were never sent there, except those in `holes`.

Invariants:
1. The holes of a piece are disjoint, ascending, not empty, and end at or below `persisted`.
2. The pieces of a name are sorted. They may overlap (several parents without ranges of their own):
   then all of them have to agree.
3. What is not known for sure is never called stored, nor missing: `stored` is None.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from magnetar.broker.api import NO_SEQUENCE
from magnetar.errors import CorruptMetadata, FormatTooNew, InvalidLayout, InvariantBroken
from magnetar.model.hashing import HashRange
from magnetar.model.names import TopicName

# Stored with every snapshot of a segment that inherited something: other layouts need a version.
_VERSION: Final = 1
_HEADER: Final = struct.Struct(">BI")
_SIZE: Final = struct.Struct(">I")
_PIECE: Final = struct.Struct(">HHqI")
_SPAN: Final = struct.Struct(">qq")


class SequenceSpan(NamedTuple):
    """Sequences of one producer, both ends included."""

    first: int
    last: int
    needed: bool = True
    """Of what is not stored: whether its producer is told to send it again. Nobody need send again
    what an aborted transaction had stored; whoever does is welcome."""

    def to_bytes(self) -> bytes:
        """A sequence has no sign: the last one's tells whether it is needed."""
        return _SPAN.pack(self.first, self.last if self.needed else ~self.last)

    @classmethod
    def read(cls, data: bytes, offset: int) -> tuple[SequenceSpan, int]:
        """One in its stored form, and where it ends."""
        first, last = _SPAN.unpack_from(data, offset)
        span = cls(first, last) if last >= 0 else cls(first, ~last, needed=False)
        return span, offset + _SPAN.size


class Piece(NamedTuple):
    """The stored sequences of one producer in one part of the ring."""

    hash_range: HashRange
    persisted: int
    holes: tuple[SequenceSpan, ...] = ()

    def stored(self, sequence_id: int) -> bool:
        return sequence_id <= self.persisted and not within(sequence_id, self.holes)

    def check_invariants(self) -> None:
        before = NO_SEQUENCE
        for hole in self.holes:
            if not before < hole.first <= hole.last <= self.persisted:
                raise InvariantBroken(f"hole {hole} after {before}, persisted {self.persisted}")
            before = hole.last
        if self.persisted < NO_SEQUENCE:
            raise InvariantBroken(f"persisted {self.persisted}")


class Lineage(Mapping[str, tuple[Piece, ...]]):
    """Pieces by producer name. Immutable."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Mapping[str, Iterable[Piece]] | None = None) -> None:
        # One form for equal content, so that what a retry stores is byte for byte the same.
        ordered = {name: _joined(each) for name, each in (pieces or {}).items()}
        self._pieces = MappingProxyType({name: each for name, each in ordered.items() if each})

    def __getitem__(self, name: str) -> tuple[Piece, ...]:
        return self._pieces[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __repr__(self) -> str:
        return f"Lineage({dict(self._pieces)})"

    # --- changes: each returns another one

    def merged(self, other: Lineage) -> Lineage:
        """What both say, of parents of one child."""
        names = {**self, **other}
        return Lineage({name: (*self.get(name, ()), *other.get(name, ())) for name in names})

    def renamed(self, rename: Callable[[str], str]) -> Lineage:
        """Rename the producers; pieces of names that fall together are merged."""
        found: dict[str, tuple[Piece, ...]] = {}
        for name, pieces in self.items():
            found[rename(name)] = (*found.get(rename(name), ()), *pieces)
        return Lineage(found)

    def clipped(self, hash_range: HashRange) -> Lineage:
        """What is said of one part of the ring."""
        return Lineage({name: _clipped(pieces, hash_range) for name, pieces in self.items()})

    def covering(self, hash_range: HashRange) -> Lineage:
        """Clipped, and where nothing is said of a name: that nothing of it is stored there."""
        return Lineage(
            {
                name: (*pieces, *(Piece(gap, NO_SEQUENCE) for gap in _gaps(pieces, hash_range)))
                for name, pieces in self.clipped(hash_range).items()
            }
        )

    # --- the stored form

    def to_bytes(self) -> bytes:
        out = bytearray(_HEADER.pack(_VERSION, len(self)))
        for name, pieces in self.items():
            encoded = name.encode()
            out += _SIZE.pack(len(encoded)) + encoded + _SIZE.pack(len(pieces))
            for (start, end), persisted, holes in map(_parts, pieces):
                out += _PIECE.pack(start, end, persisted, len(holes))
                for hole in holes:
                    out += hole.to_bytes()
        return bytes(out)

    @classmethod
    def from_bytes(cls, data: bytes) -> Lineage:
        if data and data[0] > _VERSION:
            raise FormatTooNew(f"a lineage has version {data[0]}, not up to {_VERSION}")
        try:
            version, count = _HEADER.unpack_from(data)
            offset = _HEADER.size
            found: dict[str, list[Piece]] = {}
            for _ in range(count):
                offset = _read_name(data, offset, found)
        except (struct.error, UnicodeDecodeError, InvalidLayout, InvariantBroken) as error:
            raise CorruptMetadata(f"a lineage of {len(data)} bytes: {error}") from error
        lineage = cls(found)
        if version != _VERSION or offset != len(data) or len(lineage) != count:
            raise CorruptMetadata(f"a lineage of {len(data)} bytes does not add up")
        return lineage


NO_LINEAGE: Final = Lineage()


def stored(pieces: Iterable[Piece], sequence_id: int, key_hash: int | None) -> bool | None:
    """Whether a sequence is stored, of a key or (None) of any; None: they do not agree."""
    asked = list(pieces)
    if key_hash is not None:
        # One that does not belong here may have come from anywhere.
        asked = [each for each in asked if key_hash in each.hash_range] or asked
    answers = {each.stored(sequence_id) for each in asked}
    return answers.pop() if len(answers) == 1 else None


def dedup_name(topic: TopicName, producer: str) -> str:
    """The name under which a producer's sequences count.

    Clients add `-seg-<id>` to a producer's name on each segment; it is one producer all the same.
    """
    if topic.descriptor is None:
        return producer
    # A producer may be called just like the suffix: then the name stays.
    return producer.removesuffix(f"-seg-{topic.descriptor.segment_id}") or producer


def producer_names(topic: TopicName, name: str) -> tuple[str, ...]:
    """The names of the producers that count as `name`."""
    if topic.descriptor is None:
        return (name,)
    return name, f"{name}-seg-{topic.descriptor.segment_id}"


def within(sequence_id: int, spans: Iterable[SequenceSpan]) -> bool:
    return any(span.first <= sequence_id <= span.last for span in spans)


def _parts(piece: Piece) -> tuple[tuple[int, int], int, tuple[SequenceSpan, ...]]:
    return (piece.hash_range.start, piece.hash_range.end), piece.persisted, piece.holes


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Sorted, without repetitions, and neighbours that say the same are one."""
    found: list[Piece] = []
    # Merged segments bring pieces of both parents: where these say the same, one is enough.
    for piece in sorted(set(pieces), key=_parts):
        last = found[-1] if found else None
        if (
            last is not None
            and last.hash_range.is_before(piece.hash_range)
            and last[1:] == piece[1:]
        ):
            whole = HashRange(last.hash_range.start, piece.hash_range.end)
            found[-1] = last._replace(hash_range=whole)
        else:
            found.append(piece)
    return tuple(found)


def _clipped(pieces: Iterable[Piece], hash_range: HashRange) -> Iterator[Piece]:
    for piece in pieces:
        mine = piece.hash_range
        if mine.overlaps(hash_range):
            low, high = max(mine.start, hash_range.start), min(mine.end, hash_range.end)
            yield piece._replace(hash_range=HashRange(low, high))


def _gaps(pieces: Iterable[Piece], hash_range: HashRange) -> Iterator[HashRange]:
    """The parts of a range on which none of these pieces is, ascending by start."""
    free = hash_range.start
    for piece in pieces:
        if piece.hash_range.start > free:
            yield HashRange(free, piece.hash_range.start - 1)
        free = max(free, piece.hash_range.end + 1)
    if free <= hash_range.end:
        yield HashRange(free, hash_range.end)


def _read_name(data: bytes, offset: int, found: dict[str, list[Piece]]) -> int:
    (size,) = _SIZE.unpack_from(data, offset)
    offset += _SIZE.size
    name = data[offset : offset + size].decode()
    (count,) = _SIZE.unpack_from(data, offset + size)
    offset += size + _SIZE.size
    pieces = found[name] = []
    for _ in range(count):
        start, end, persisted, holes = _PIECE.unpack_from(data, offset)
        offset += _PIECE.size
        spans: list[SequenceSpan] = []
        for _ in range(holes):
            span, offset = SequenceSpan.read(data, offset)
            spans.append(span)
        piece = Piece(HashRange(start, end), persisted, tuple(spans))
        piece.check_invariants()
        pieces.append(piece)
    return offset
