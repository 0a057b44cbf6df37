"""Pure: which messages of a log are the last ones of their keys.

Owns: `LatestKeys`, filled by a first pass over the log, and `Survivors`, by which a second goes.

Invariants:
1. Of each key the last message survives and no other; if that one deletes the key, none does,
   unless deletions are to be kept. Messages without a key do not survive.
2. Entries that cannot be judged survive whole. So do the chunks of a message that is not complete
   yet: what completes it may still come. A chunked message counts when its last chunk is there, all
   of its chunks survive or none does; one of which a chunk is missing does not count.
3. Memory: at most `keys_max` keys, chunks and entries that survive whole, taken together. One more
   raises LimitExceeded.

Relies on: `note` being called in the order of the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Final

from magnetar.broker.compact.batches import SLICE_MESSAGES, Chunk, Opened
from magnetar.errors import LimitExceeded
from magnetar.model.ids import Position
from magnetar.model.position_set import PositionSet

# A message is one number: that of its entry, in the order in which they came, and its index in it.
_INDEX_BITS: Final = 32
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1

_NOTED_AT_ONCE: Final = 4 * SLICE_MESSAGES
"""Keys of a batch: noting one takes a quarter of the time of reading it."""


@dataclass(slots=True)
class Survivors:
    """The entries and messages that are left of a log."""

    entries: PositionSet = field(default_factory=PositionSet)
    """Every entry of which something is left."""
    indexes: dict[Position, list[int]] = field(default_factory=dict)
    """Of batches: which messages. The others survive whole."""


class LatestKeys:
    """The last message of each key, so far."""

    def __init__(self, keys_max: int, *, keeps_deletions: bool = False) -> None:
        self.messages = 0
        """How many with a key were there, doubles within one batch left out."""
        self._keys_max = keys_max
        self._keeps_deletions = keeps_deletions
        self._latest: dict[bytes, int] = {}
        # By entry: how many of its messages are the last ones of their keys, and where it stands.
        # Who has none any more is forgotten, so there are never more of them than keys.
        self._live: dict[int, int] = {}
        self._positions: dict[int, Position] = {}
        self._batches: set[int] = set()
        self._number = 0
        # By message: its chunks so far. By number of its last entry: those before that one.
        self._open_chunks: dict[str, list[Position]] = {}
        self._chunks: dict[int, list[Position]] = {}
        self._chunk_count = 0
        self._whole = PositionSet()
        self._whole_count = 0

    def __len__(self) -> int:
        """Count all that is bounded by `keys_max`."""
        return len(self._latest) + self._chunk_count + self._whole_count

    def keep(self, position: Position) -> None:
        """An entry that cannot be judged."""
        self._whole.add(position)
        self._whole_count += 1
        self._check()

    def note(self, position: Position, entry: Opened) -> None:
        """An entry that is no batch."""
        key, chunk = entry.key, entry.chunk
        if key is None:
            return
        if chunk is not None:
            self._note_chunk(position, key, chunk)
        else:
            number = self._begin(position, is_batch=False)
            self._note(number, {key: ~0 if entry.is_null else 0})
            self._end(number)

    def note_batch(self, position: Position, last: dict[bytes, int]) -> Generator[None, None, None]:
        """Note the keys of a batch, as `last_of_keys` found them, in slices."""
        number = self._begin(position, is_batch=True)
        # Nearly all batches are one slice, and are not taken apart.
        if len(last) <= _NOTED_AT_ONCE:
            self._note(number, last)
        else:
            keys = list(last)
            for start in range(0, len(keys), _NOTED_AT_ONCE):
                self._note(number, {key: last[key] for key in keys[start : start + _NOTED_AT_ONCE]})
                yield
        self._end(number)

    def survivors(self) -> Generator[None, None, Survivors]:
        """What is left, in slices; nothing may be noted afterwards."""
        found = Survivors(self._whole)
        batches, positions = self._batches, self._positions
        for count, value in enumerate(self._latest.values(), start=1):
            number = value >> _INDEX_BITS
            position = positions[number]
            found.entries.add(position)
            if number in batches:
                found.indexes.setdefault(position, []).append(value & _INDEX_MASK)
            if count % SLICE_MESSAGES == 0:
                yield
        # Behind them: chunks that survive with the last one of their message, and incomplete ones.
        for parts in (*self._chunks.values(), *self._open_chunks.values()):
            for position in parts:
                found.entries.add(position)
            yield
        return found

    # --- parts

    def _begin(self, position: Position, *, is_batch: bool) -> int:
        """The number of the next entry."""
        number = self._number
        self._number += 1
        self._live[number] = 0
        self._positions[number] = position
        if is_batch:
            self._batches.add(number)
        return number

    def _note(self, number: int, last: dict[bytes, int]) -> None:
        """What an entry says of some of its keys; it says something of each once."""
        self.messages += len(last)
        base = number << _INDEX_BITS
        latest = self._latest
        before = map(latest.get, last)
        gone = Counter([value >> _INDEX_BITS for value in before if value is not None])
        deleted = [] if self._keeps_deletions else [key for key, at in last.items() if at < 0]
        # In steps that C takes, for this is once per message.
        latest.update({key: base + (at if at >= 0 else ~at) for key, at in last.items()})
        for key in deleted:
            del latest[key]
        self._live[number] += len(last) - len(deleted)
        for entry, count in gone.items():
            self._drop(entry, count)
        self._check()

    def _end(self, number: int) -> None:
        """All of an entry is noted."""
        if not self._live[number]:
            self._drop(number, 0)

    def _note_chunk(self, position: Position, key: bytes, chunk: Chunk) -> None:
        # A message begins with its first chunk, also where it was sent once more.
        if chunk.number == 0:
            self._forget_chunks(chunk.message)
            self._open_chunks[chunk.message] = []
        parts = self._open_chunks.get(chunk.message)
        # A chunk that was sent again and is there already: consumers pass it over, too.
        if parts is None or chunk.number < len(parts):
            return
        # Behind a hole: no consumer can put it together.
        if chunk.number > len(parts):
            self._forget_chunks(chunk.message)
            return
        if chunk.number < chunk.of - 1:
            parts.append(position)
            self._chunk_count += 1
            self._check()
            return
        del self._open_chunks[chunk.message]
        # Chunks are never a deletion: an empty message is not cut.
        number = self._begin(position, is_batch=False)
        self._note(number, {key: 0})
        self._chunks[number] = parts

    def _forget_chunks(self, message: str) -> None:
        self._chunk_count -= len(self._open_chunks.pop(message, ()))

    def _drop(self, number: int, count: int) -> None:
        left = self._live[number] - count
        if left:
            self._live[number] = left
            return
        del self._live[number], self._positions[number]
        self._batches.discard(number)
        self._chunk_count -= len(self._chunks.pop(number, ()))

    def _check(self) -> None:
        if len(self) > self._keys_max:
            raise LimitExceeded(
                f"more than {self._keys_max} keys are to be compacted at once",
                hint="raise compaction_keys, or spread the keys over more partitions",
            )
