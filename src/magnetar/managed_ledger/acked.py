"""Pure: the set of individually acknowledged positions, compact even with a million holes.

Owns: `AckedSet`: for each chunk of 2^20 entry ids of a ledger a roaring bitmap of acknowledged
entries, and the batches of which only some messages are acknowledged.

Invariants:
1. A batch-index set is an integer whose set bits are the messages **still unacknowledged**; it is
   never 0 (that entry is then acknowledged as a whole), and merging two acknowledgements is AND.
2. A position is acknowledged as a whole, or has a batch-index set, or neither: never both.
3. A chunk that holds nothing does not exist.
4. `take_changed` names every chunk whose content is not a subset-by-dropping of what it was at the
   last call: dropping low positions does not count, because a reader of stored chunks drops
   everything up to its mark-delete position again.

Relies on: entry ids from 0 up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final, NamedTuple

from pyroaring import BitMap

from magnetar.errors import CorruptMetadata
from magnetar.model.ids import Position

# A chunk is what one more acknowledgement rewrites: 128 KiB of bitmap at the most (ADR 0007).
CHUNK_BITS: Final = 20
CHUNK_ENTRIES: Final = 1 << CHUNK_BITS
_OFFSET_MASK: Final = CHUNK_ENTRIES - 1
_NONE_SPARED: Final = BitMap()


class ChunkKey(NamedTuple):
    """Entries [number * 2^20, (number + 1) * 2^20) of a ledger."""

    ledger_id: int
    number: int


class StoredChunk(NamedTuple):
    """A chunk as it is stored: a portable roaring bitmap, and batch-index sets by offset."""

    bits: bytes
    batches: dict[int, bytes]


class AckedRange(NamedTuple):
    """Consecutive acknowledged entries, both ends included."""

    ledger_id: int
    first: int
    last: int


class _Chunk:
    __slots__ = ("batches", "bits", "partial")

    def __init__(self) -> None:
        self.bits = BitMap()
        self.batches: dict[int, int] = {}
        self.partial = BitMap()
        """The offsets of `batches`, in order: the lowest are dropped without a look at the rest."""

    def set_batch(self, offset: int, unacked: int) -> None:
        self.batches[offset] = unacked
        self.partial.add(offset)

    def forget_batch(self, offset: int) -> None:
        del self.batches[offset]
        self.partial.discard(offset)


class AckedSet:
    """Positions acknowledged one by one, wholly or in part."""

    def __init__(self) -> None:
        # `_order` has the keys ascending, to go through them and to drop from the front; `_changed`
        # those whose stored form is out of date.
        self._chunks: dict[ChunkKey, _Chunk] = {}
        self._order: list[ChunkKey] = []
        self._changed: set[ChunkKey] = set()
        self._count = 0

    # --- what is in it

    @property
    def count(self) -> int:
        """Entries acknowledged as a whole."""
        return self._count

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __contains__(self, position: Position) -> bool:
        ledger_id, entry_id = position
        # A plain pair is found as a `ChunkKey` is; this is asked for every entry.
        chunk = self._chunks.get((ledger_id, entry_id >> CHUNK_BITS))  # type: ignore[call-overload]
        return chunk is not None and (entry_id & _OFFSET_MASK) in chunk.bits

    def unacked_indexes(self, position: Position) -> int | None:
        """The batch-index set of a partly acknowledged entry."""
        ledger_id, entry_id = position
        chunk = self._chunks.get((ledger_id, entry_id >> CHUNK_BITS))  # type: ignore[call-overload]
        return None if chunk is None else chunk.batches.get(entry_id & _OFFSET_MASK)

    def run_end(self, position: Position) -> int | None:
        """The last entry of the acknowledged run that begins here, None if none does."""
        ledger_id, number = key = _key_of(position)
        offset = position.entry_id & _OFFSET_MASK
        end: int | None = None
        while (chunk := self._chunks.get(key)) is not None and offset in chunk.bits:
            last = _run_end(chunk.bits, offset)
            end = (number << CHUNK_BITS) + last
            # It ends within the chunk; at the very end of one, it may go on in the next.
            if last < _OFFSET_MASK:
                break
            number += 1
            offset = 0
            key = ChunkKey(ledger_id, number)
        return end

    def ranges(self) -> Iterator[AckedRange]:
        """Every acknowledged run, ascending."""
        # A run is held back until the next one is known: the end of a chunk may cut one in two.
        open_run: AckedRange | None = None
        for key in self._order:
            base = key.number << CHUNK_BITS
            for first, last in _runs(self._chunks[key].bits):
                run = AckedRange(key.ledger_id, base + first, base + last)
                if open_run is not None:
                    joins = (open_run.ledger_id, open_run.last + 1) == (run.ledger_id, run.first)
                    if joins:
                        run = open_run._replace(last=run.last)
                    else:
                        yield open_run
                open_run = run
        if open_run is not None:
            yield open_run

    def partial(self) -> Iterator[tuple[Position, int]]:
        """Every partly acknowledged entry with its batch-index set, ascending."""
        for key in self._order:
            base = key.number << CHUNK_BITS
            for offset, unacked in sorted(self._chunks[key].batches.items()):
                yield Position(key.ledger_id, base + offset), unacked

    # --- changes

    def add(self, position: Position) -> bool:
        """Acknowledge an entry as a whole; False: it was already."""
        key = _key_of(position)
        offset = position.entry_id & _OFFSET_MASK
        chunk = self._chunks.get(key) or self._new_chunk(key)
        if offset in chunk.bits:
            return False
        chunk.bits.add(offset)
        if offset in chunk.batches:
            chunk.forget_batch(offset)
        self._count += 1
        self._changed.add(key)
        return True

    def add_range(
        self, ledger_id: int, first: int, last: int, spared: BitMap = _NONE_SPARED
    ) -> bool:
        """Acknowledge the entries from `first` to `last`, but those in `spared` (entry ids).

        Both ends are included. False: nothing is new.
        """
        count = self._count
        while first <= last:
            key = ChunkKey(ledger_id, first >> CHUNK_BITS)
            base = key.number << CHUNK_BITS
            stop = min(last + 1, base + CHUNK_ENTRIES)
            wanted = (BitMap(range(first, stop)) - spared).shift(-base)
            # In the terms of the bitmaps: a run of any length, with any holes, is a few steps.
            first = stop
            chunk = self._chunks.get(key)
            if not wanted or (chunk is not None and wanted <= chunk.bits):
                continue
            chunk = chunk or self._new_chunk(key)
            before = len(chunk.bits)
            chunk.bits |= wanted
            self._count += len(chunk.bits) - before
            for offset in wanted & chunk.partial:
                chunk.forget_batch(offset)
            self._changed.add(key)
        return self._count > count

    def merge_batch(self, position: Position, unacked: int) -> bool:
        """Acknowledge the messages of a batch whose bits are clear; False: nothing is new."""
        # Acknowledged as a whole, so every message in it is (invariant 2).
        if position in self:
            return False
        # A single message, or all of a batch at once.
        if unacked == 0:
            return self.add(position)
        key = _key_of(position)
        offset = position.entry_id & _OFFSET_MASK
        chunk = self._chunks.get(key) or self._new_chunk(key)
        before = chunk.batches.get(offset)
        after = unacked if before is None else before & unacked
        if after == before:
            return False
        # Its last messages: the entry becomes whole, and its batch-index set goes (invariant 1).
        if after == 0:
            return self.add(position)
        chunk.set_batch(offset, after)
        self._changed.add(key)
        return True

    def drop_through(self, position: Position) -> None:
        """Forget everything at or below a position."""
        # Nothing is marked as changed: loading drops the same positions again (invariant 4).
        last = _key_of(position)
        below = bisect_left(self._order, last)
        for key in self._order[:below]:
            self._count -= len(self._chunks.pop(key).bits)
        del self._order[:below]
        chunk = self._chunks.get(last)
        if chunk is None:
            return
        stop = (position.entry_id & _OFFSET_MASK) + 1
        self._count -= chunk.bits.range_cardinality(0, stop)
        chunk.bits.remove_range(0, stop)
        while chunk.partial and (offset := chunk.partial.min()) < stop:
            chunk.forget_batch(offset)
        if not chunk.bits and not chunk.batches:
            del self._chunks[last]
            # All before it went above, so it is the first.
            del self._order[0]

    def clear(self) -> None:
        self._chunks.clear()
        self._order.clear()
        self._changed.clear()
        self._count = 0

    # --- chunks, for storing

    @property
    def chunk_keys(self) -> tuple[ChunkKey, ...]:
        """The chunks that exist, ascending."""
        return tuple(self._order)

    def take_changed(self) -> set[ChunkKey]:
        """The existing chunks that changed since the last call."""
        changed, self._changed = self._changed, set()
        return {key for key in changed if key in self._chunks}

    def give_back_changed(self, keys: set[ChunkKey]) -> None:
        """Count chunks as changed again that were taken but could not be stored."""
        self._changed |= keys

    def dump_chunk(self, key: ChunkKey) -> StoredChunk:
        chunk = self._chunks[key]
        # Consumers acknowledge mostly in runs, which are then stored by their ends.
        chunk.bits.run_optimize()
        batches = {
            offset: unacked.to_bytes((unacked.bit_length() + 7) // 8, "little")
            for offset, unacked in sorted(chunk.batches.items())
        }
        return StoredChunk(chunk.bits.serialize(), batches)

    def load_chunk(self, key: ChunkKey, stored: StoredChunk) -> None:
        """Put a stored chunk in; there must be none with that key yet."""
        chunk = _Chunk()
        try:
            chunk.bits = BitMap.deserialize(stored.bits)
        except (ValueError, IndexError) as error:
            raise CorruptMetadata(f"chunk {key} of a cursor holds no bitmap: {error}") from error
        for offset, data in stored.batches.items():
            chunk.set_batch(offset, int.from_bytes(data, "little"))
        # Before it counts: damage that passes for acknowledgements would lose messages.
        self._check_loaded(key, chunk)
        if chunk.bits or chunk.batches:
            self._chunks[key] = chunk
            insort(self._order, key)
            self._count += len(chunk.bits)

    def _check_loaded(self, key: ChunkKey, chunk: _Chunk) -> None:
        highest = max(chunk.bits.max() if chunk.bits else 0, max(chunk.batches, default=0))
        overlap = any(offset in chunk.bits for offset in chunk.batches)
        if key in self._chunks or highest >= CHUNK_ENTRIES or overlap:
            raise CorruptMetadata(f"chunk {key} of a cursor contradicts itself")
        if not all(chunk.batches.values()):
            raise CorruptMetadata(f"chunk {key} of a cursor holds an empty batch-index set")

    def _new_chunk(self, key: ChunkKey) -> _Chunk:
        chunk = self._chunks[key] = _Chunk()
        insort(self._order, key)
        return chunk


_NEW: Final = tuple.__new__


def _key_of(position: Position) -> ChunkKey:
    ledger_id, entry_id = position
    return _NEW(ChunkKey, (ledger_id, entry_id >> CHUNK_BITS))


def _run_end(bits: BitMap, start: int) -> int:
    """The last offset of the run of set bits that begins at `start` (which is set)."""
    low, step = start, 1
    while low + step < CHUNK_ENTRIES and bits.contains_range(low, low + step + 1):
        low += step
        step *= 2
    # Every bit up to `low` is set; one in (low, high] is not, or the chunk ends at `high`.
    high = min(low + step, CHUNK_ENTRIES)
    while high - low > 1:
        middle = (low + high) // 2
        if bits.contains_range(low, middle + 1):
            low = middle
        else:
            high = middle
    return low


def _runs(bits: BitMap) -> Iterator[tuple[int, int]]:
    at = 0
    while at < CHUNK_ENTRIES:
        try:
            first = bits.next_set_bit(at)
        except ValueError:
            return
        last = _run_end(bits, first)
        yield first, last
        at = last + 1
