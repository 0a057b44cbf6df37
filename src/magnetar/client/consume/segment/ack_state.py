"""Pure: what of a segment the application has, what it acknowledged, and what the broker knows.

Owns: `IndividualAcks`, for subscriptions that take each message on its own; `CumulativeAcks`, for
those that take everything up to a message; `HandOffs`, the order in which messages of one segment
were handed out among those of others.

A message is arrived, then handed out (the application has it), then settled: acknowledged, or
given back to be delivered again.

Invariants:
1. What the application has, or has acknowledged, be it in a transaction that is not decided yet, is
   never handed to it again, whatever the broker delivers. What it gave back, or what a transaction
   that was aborted had acknowledged, is.
2. An acknowledgement is kept until the broker has confirmed it: a lost connection only puts it
   back to those that must be sent.
3. A batch-index set that is sent has the bits of all messages that were not acknowledged here, so
   that the broker, which intersects, never takes one of them for acknowledged.
4. A cumulative acknowledgement never goes back, and is sent only if it moved.
5. `HandOffs` never names a message that was handed out after the one asked for. Beyond its limit it
   forgets every second one of the older half: then it names an earlier message, which is safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from magnetar.model.ids import Position

# Of each segment; beyond it acknowledgements get coarser, not wrong (invariant 5).
HAND_OFFS_MAX: Final = 8192

_UNKNOWN_ROOM: Final = 1000
"""As many messages may follow one in its batch, if its id does not say."""

WHOLE: Final = -1
"""The index of a message that is an entry of its own."""


class AckItem(NamedTuple):
    """One entry of an ACK; of a batch, all messages but those set in `unacked`."""

    position: Position
    unacked: int = 0
    batch_size: int = 0


def all_of(batch_size: int) -> int:
    """The set of all messages of an entry."""
    return (1 << batch_size) - 1 if batch_size > 1 else 1


def size_from(index: int, size: int) -> int:
    """The size of a batch; where an id does not say it, one that is large enough.

    Bits beyond the end of a batch mean nothing to a broker.
    """
    return size if index < size else index + _UNKNOWN_ROOM


def bit_of(index: int) -> int:
    return 1 << index if index > 0 else 1


class _Entry:
    """An entry of which something is not settled."""

    __slots__ = ("confirmed", "held", "missed", "open", "pending", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.open = all_of(size)
        """Not acknowledged by the application."""
        self.confirmed = self.open
        """As far as the broker has said that it knows, these are not acknowledged."""
        self.held = 0
        """Handed out, and not settled."""
        self.pending = 0
        """Acknowledged in transactions that are not decided."""
        self.missed = 0
        """Delivered again meanwhile."""


class IndividualAcks:
    """The entries of one segment, each message on its own."""

    def __init__(self) -> None:
        self._entries: dict[Position, _Entry] = {}
        self._waiting: dict[Position, None] = {}
        self._sent: set[Position] = set()

    @property
    def waiting(self) -> int:
        """Entries with acknowledgements that are not sent."""
        return len(self._waiting)

    def arrived(self, position: Position, size: int, unacked: int = 0) -> int:
        """An entry was delivered: the set of its messages that are to be handed out.

        `unacked` is what the broker says is left of it; 0: everything.
        """
        left = all_of(size) & (unacked or ~0)
        entry = self._entries.get(position)
        if entry is None:
            return left
        # Known from before a lost connection: what the application has, or has acknowledged, is not
        # for it again (invariant 1).
        left &= entry.open & ~entry.held
        # A transaction that is not decided has it: if it is aborted, the delivery that is passed
        # over now must be asked for again.
        entry.missed |= left & entry.pending
        return left & ~entry.pending

    def admit(self, position: Position, size: int, unacked: int = 0) -> int:
        """Let an entry in: what is to be handed out of it is the application's from now on."""
        # The short way below is that of nearly every message: new, alone in its entry.
        if position in self._entries or unacked or size > 1:
            mask = self.arrived(position, size, unacked)
            if mask:
                self.handed_all(position, mask, size)
            return mask
        entry = self._entries[position] = _Entry(1)
        entry.held = 1
        return 1

    def handed(self, position: Position, index: int, size: int) -> None:
        """The application has it now."""
        self._entry(position, size).held |= bit_of(index)

    def handed_all(self, position: Position, mask: int, size: int) -> None:
        """Note that the application has those messages of an entry that are set in `mask`."""
        self._entry(position, size).held |= mask

    def held_among(self, position: Position, mask: int) -> int:
        """How many of the messages set in `mask` the application has."""
        entry = self._entries.get(position)
        return 0 if entry is None else (entry.held & mask).bit_count()

    def is_held(self, position: Position, index: int) -> bool:
        entry = self._entries.get(position)
        return entry is not None and bool(entry.held & bit_of(index))

    def ack(self, position: Position, index: int, size: int) -> bool:
        """The application is done with it; also of a message that another consumer handed out.

        Says whether the application had it.
        """
        entry = self._entries.get(position)
        if entry is None:
            # Of an id that was stored: nothing of its entry was delivered here.
            entry = self._entries[position] = _Entry(size_from(index, size))
        bits = all_of(entry.size) if index == WHOLE else bit_of(index)
        held = entry.held & bits
        entry.held ^= held
        entry.open ^= entry.open & bits
        self._waiting[position] = None
        return held != 0

    def ack_all(self, position: Position, mask: int, size: int) -> None:
        """Acknowledge those messages of an entry that are set in `mask`."""
        entry = self._entry(position, max(size, mask.bit_length()))
        entry.open &= ~mask
        entry.held &= ~mask
        self._waiting[position] = None

    def ack_in_txn(self, position: Position, mask: int, size: int) -> None:
        """A transaction acknowledges those messages of an entry that are set in `mask`."""
        entry = self._entry(position, max(size, mask.bit_length()))
        entry.held &= ~mask
        entry.pending |= mask

    def decided(self, position: Position, mask: int, *, committed: bool) -> bool:
        """The transaction has ended; True: what was delivered again meanwhile must come again."""
        entry = self._entries.get(position)
        if entry is None:
            return False
        missed = entry.missed & mask
        entry.pending &= ~mask
        entry.missed &= ~mask
        # The broker merged it with the decision: nothing is left to be sent.
        if committed:
            entry.open &= ~mask
            entry.confirmed &= ~mask
        self._tidy(position, entry)
        return not committed and missed > 0

    def give_back(self, position: Position, index: int) -> None:
        """The application does not have it any more: it is delivered again."""
        entry = self._entries.get(position)
        if entry is not None:
            entry.held &= ~bit_of(index)
            self._tidy(position, entry)

    def give_back_all(self, position: Position) -> None:
        """Give back every message of an entry."""
        entry = self._entries.get(position)
        if entry is not None:
            entry.held = 0
            self._tidy(position, entry)

    def ack_through(self, mark: SegmentMark) -> list[Position]:
        """Acknowledge what the application has up to a message; the entries it is done with."""
        done = []
        for position in [each for each in self._entries if each <= mark.position]:
            entry = self._entries[position]
            covered = entry.held
            # The mark stands in the middle of a batch: only those up to it.
            if position == mark.position and mark.place[1] < entry.size - 1:
                covered &= all_of(mark.batch_index + 1)
            if covered:
                entry.open &= ~covered
                entry.held &= ~covered
                self._waiting[position] = None
            if not entry.held:
                done.append(position)
        return done

    # --- the connection's side

    def take(self, limit: int) -> list[AckItem]:
        """What is to be sent now; it is in flight until `confirm` or `reconnected`."""
        positions = list(self._waiting)
        # Not all of them fit; the others keep their order.
        if limit < len(positions):
            positions = positions[:limit]
            for position in positions:
                del self._waiting[position]
        else:
            self._waiting.clear()
        self._sent.update(positions)
        items = []
        for position in positions:
            entry = self._entries[position]
            items.append(AckItem(position, entry.open, entry.size if entry.size > 1 else 0))
        return items

    def confirm(self, items: Iterable[AckItem]) -> None:
        """The broker has them."""
        for item in items:
            entry = self._entries.get(item.position)
            if entry is not None:
                # More may have been acknowledged since it was sent: then it waits once more, and is
                # kept.
                entry.confirmed &= item.unacked
                if entry.confirmed == entry.open:
                    self._sent.discard(item.position)
                self._tidy(item.position, entry)

    def reconnected(self) -> None:
        """What was in flight is sent again; what was not handed out comes again."""
        # Whether the broker had them, the lost connection did not say; an ACK can be repeated.
        self._waiting = {**dict.fromkeys(sorted(self._sent)), **self._waiting}
        self._sent.clear()
        for position, entry in list(self._entries.items()):
            self._tidy(position, entry)

    def forget(self) -> None:
        """Drop everything: after a seek nothing of it counts."""
        self._entries.clear()
        self._waiting.clear()
        self._sent.clear()

    def _entry(self, position: Position, size: int) -> _Entry:
        entry = self._entries.get(position)
        if entry is None:
            entry = self._entries[position] = _Entry(size)
        return entry

    def _tidy(self, position: Position, entry: _Entry) -> None:
        # What nobody has, and nobody has to be told, is forgotten: memory is that of what is open.
        is_known = position in self._waiting or position in self._sent
        if not entry.held and not entry.pending and not is_known:
            del self._entries[position]


class SegmentMark(NamedTuple):
    """A message within its segment: tuple order is the order of the segment."""

    position: Position
    batch_index: int = WHOLE
    batch_size: int = 0

    @property
    def place(self) -> tuple[Position, int]:
        """A key for comparisons, with the same message under an id without its index too."""
        ends_entry = self.batch_index == WHOLE or self.batch_index == self.batch_size - 1
        return (self.position, (1 << 31) if ends_entry else self.batch_index)


BEFORE_ALL: Final = SegmentMark(Position(-1, -1))


class CumulativeAcks:
    """The messages of one segment, in order."""

    def __init__(self, start: SegmentMark = BEFORE_ALL) -> None:
        self._acked = start
        self._handed = start
        self._sent = start
        self._confirmed = start
        self._open: deque[Position] = deque()
        """The entries that were handed out and are not settled to their end, in order."""

    @property
    def held_entries(self) -> int:
        """Entries of which the application has messages."""
        return len(self._open)

    @property
    def handed_through(self) -> SegmentMark:
        """The last message that the application has or had."""
        return self._handed

    @property
    def acked_through(self) -> SegmentMark:
        """The last message that is acknowledged, with all before it."""
        return self._acked

    @property
    def is_settled(self) -> bool:
        """Whether all that was handed out is acknowledged, and the broker has that."""
        return self._confirmed.place >= self._handed.place

    @property
    def has_news(self) -> bool:
        """There is something to send."""
        return self._acked.place > self._sent.place

    def arrived(self, position: Position, size: int, unacked: int = 0) -> int:
        """An entry was delivered: the set of its messages that are to be handed out."""
        left = all_of(size) & (unacked or ~0)
        # After a rewind `_handed` has gone back; a commit since then has moved `_acked`.
        known = max(self._handed, self._acked, key=_place)
        if position < known.position:
            return 0
        if position > known.position:
            return left
        # The entry in which the application stands: the rest of a batch, if there is one.
        if known.place[1] >= size - 1:
            return 0
        return left & ~all_of(known.batch_index + 1)

    def handed(self, mark: SegmentMark) -> None:
        self._handed = max(self._handed, mark, key=_place)
        if not self._open or self._open[-1] < mark.position:
            self._open.append(mark.position)

    def ack_through(self, mark: SegmentMark) -> bool:
        """The application is done with everything up to here; False: it was before."""
        if mark.place <= self._acked.place:
            return False
        self._acked = mark
        self.settle_through(mark)
        return True

    def settle_through(self, mark: SegmentMark) -> None:
        """Nothing up to here is the application's: it, or a transaction, has acknowledged it."""
        # In the middle of a batch the entry is still the application's.
        ends_entry = ack_item(mark).unacked == 0
        entries = self._open
        while entries and (
            entries[0] < mark.position or (ends_entry and entries[0] == mark.position)
        ):
            entries.popleft()

    def rewind(self) -> None:
        """Hand out again, from the first one, what is not acknowledged."""
        self._handed = self._acked
        self._open.clear()

    # --- the connection's side

    def take(self) -> AckItem | None:
        """What is to be sent now, if anything moved."""
        if not self.has_news:
            return None
        self._sent = self._acked
        return ack_item(self._acked)

    def confirm(self) -> None:
        """The broker has what was taken last."""
        self._confirmed = self._sent

    def confirmed_elsewhere(self, mark: SegmentMark) -> None:
        """The broker has an acknowledgement up to here, by another way."""
        self._confirmed = max(self._confirmed, mark, key=_place)
        self._sent = max(self._sent, mark, key=_place)
        self._acked = max(self._acked, mark, key=_place)
        self.settle_through(mark)

    def reconnected(self) -> None:
        """What was in flight is sent again."""
        self._sent = self._confirmed

    def started_anew(self) -> None:
        """The broker knows nothing: everything acknowledged is sent again."""
        self._sent = self._confirmed = BEFORE_ALL


def ack_item(mark: SegmentMark) -> AckItem:
    """The acknowledgement of everything up to a message."""
    if mark.batch_index == WHOLE or mark.batch_index == mark.batch_size - 1:
        return AckItem(mark.position, 0, mark.batch_size if mark.batch_size > 1 else 0)
    size = size_from(mark.batch_index, mark.batch_size)
    return AckItem(mark.position, all_of(size) & ~all_of(mark.batch_index + 1), size)


class HandOffs:
    """The turns at which messages of one segment were handed out, counted over all segments."""

    def __init__(self, limit: int = HAND_OFFS_MAX) -> None:
        self._limit = limit
        self._items: deque[tuple[int, SegmentMark]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, turn: int, mark: SegmentMark) -> None:
        """`turn` grows from call to call."""
        if len(self._items) >= self._limit:
            items = list(self._items)
            half = len(items) // 2
            # The last of each pair stays: an earlier one would be named for it otherwise.
            self._items = deque([*items[1:half:2], *items[half:]])
        self._items.append((turn, mark))

    def through(self, turn: int) -> SegmentMark | None:
        """The last message handed out up to this turn, and no longer acknowledged after this."""
        found = None
        while self._items and self._items[0][0] <= turn:
            found = self._items.popleft()[1]
        return found

    def last_before(self, turn: int) -> SegmentMark | None:
        """The last message handed out up to this turn; nothing changes."""
        found = None
        for at, mark in tuple(self._items):  # other threads ask too
            if at > turn:
                break
            found = mark
        return found

    def clear(self) -> None:
        self._items.clear()


def _place(mark: SegmentMark) -> tuple[Position, int]:
    return mark.place
