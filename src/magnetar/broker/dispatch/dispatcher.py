"""Dispatch: the one coroutine per subscription that reads entries and hands them to consumers.

Owns: `Dispatcher`, its loop, and the reading that dispatch needs.

Invariants:
1. It waits on one level-triggered Signal and uses no CPU while there is nothing to do: a step that
   changed nothing is followed by a wait for the next advance.
2. What a read brought is judged by the state of the moment at which it came back: consumers may
   have gone, the cursor may have been rewound or reset. The cursor never returns entries from
   before a rewind; entries that come back while nobody is connected are read again later.
3. Nothing above the topic's `max_read_position` is handed out, and what is not visible is
   acknowledged instead of delivered.
4. Memory: at most `subscription_read_entries` and `subscription_read_bytes` per step (one entry
   comes whatever its size).
5. A consumer that reads compacted gets the topic's compacted view first, as it is at each step, and
   what the log has behind the view's horizon then. Others pay a look at an option for it.
6. A read that fails stops dispatch, with a metric and an error in the log, until an operator's or
   client's action (seek, skip, a first consumer) gives it a new start. It never spins.
7. With rates (`throttle`) it reads only in a turn under them, and no more than that turn has room
   for; also for consumers that are caught up. Without them nothing is asked but whether there are.

Relies on: the topic to advance `wake` when entries became durable, when `max_read_position` moved,
and when it was terminated.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from magnetar.broker.api import Delivery
from magnetar.broker.compact.batches import survivors_of
from magnetar.broker.compact.compacted_ledger import CompactedLedger
from magnetar.broker.dispatch.delay_rule import DelayRule
from magnetar.broker.dispatch.delays import Delays
from magnetar.broker.dispatch.dispatch_state import DispatchState
from magnetar.broker.dispatch.dispatch_throttle import (
    DispatchThrottle,
    DispatchTurn,
    ThrottleCounts,
)
from magnetar.broker.dispatch.membership import JoinedTopic, Membership
from magnetar.broker.dispatch.plan import Read
from magnetar.broker.entries import (
    UNPLACED,
    EntryView,
    may_be_batch,
    may_be_delayed,
    may_have_batches,
    may_have_delays,
)
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.errors import LedgerMissing, MagnetarError
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.model.batch_indexes import words_of
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import DISPATCHED_ENTRIES, SUBSCRIPTION_FAILURES
from magnetar.runtime.signal import Signal
from magnetar.runtime.slices import SlicePace
from magnetar.txn.legacy.markers import is_txn_marker

_LOG: Final = logger(__name__)


class ReadWindow(NamedTuple):
    """The part of a topic that consumers may see at one moment; it never becomes less."""

    end: Position
    """The maxReadPosition: nothing behind it may be delivered."""
    hidden_through: Position | None
    """Behind it, and up to `end`, every entry is for consumers; None: there is nothing hidden."""


class ReadableTopic(JoinedTopic, Protocol):
    """The part of a topic that a subscription needs."""

    @property
    def ledger(self) -> ManagedLedger: ...

    @property
    def compacted(self) -> CompactedLedger | None:
        """The compacted view; None: there is none."""
        ...

    def max_read_position(self) -> Position:
        """The last position that may be delivered."""
        ...

    def read_window(self) -> ReadWindow:
        """The `max_read_position`, and up to where entries must be looked at one by one."""
        ...

    def is_visible(self, entry: Entry) -> bool:
        """Whether an entry up to `max_read_position` is for consumers."""
        ...

    def delay_rule(self) -> DelayRule:
        """The rule for messages with a time of delivery."""
        ...


class Uncommitted:
    """A topic as a subscription sees it that reads what is not committed: all durable messages.

    A topic has no subscriptions before its transactions are recovered, so neither is there this.
    """

    def __init__(self, topic: ReadableTopic) -> None:
        self._topic = topic

    @property
    def name(self) -> TopicName:
        return self._topic.name

    @property
    def policies(self) -> TopicPolicies:
        return self._topic.policies

    @property
    def consumers(self) -> int:
        return self._topic.consumers

    @property
    def ledger(self) -> ManagedLedger:
        return self._topic.ledger

    @property
    def compacted(self) -> CompactedLedger | None:
        return self._topic.compacted

    def max_read_position(self) -> Position:
        return self._topic.ledger.last_position()

    def read_window(self) -> ReadWindow:
        # Markers of legacy transactions may stand anywhere: every entry is looked at.
        end = self._topic.ledger.last_position()
        return ReadWindow(end, end)

    def is_visible(self, entry: Entry) -> bool:
        return not is_txn_marker(entry.payload)

    def delay_rule(self) -> DelayRule:
        return self._topic.delay_rule()


class ReadingCursor(Protocol):
    """The part of a cursor that dispatch needs; what is withheld counts as acknowledged here."""

    @property
    def name(self) -> str: ...

    read_position: Position

    def backlog(self) -> int: ...

    def is_acked(self, position: Position) -> bool: ...

    def unacked_indexes(self, position: Position) -> int | None: ...

    def ack(self, position: Position, unacked: int = 0) -> bool: ...

    async def read(self, entries_max: int, bytes_max: int) -> list[Entry]: ...

    def rewind(self) -> None: ...


class Unsent(Delivery):
    """A delivery as the choice sees it, before it has a consumer."""

    __slots__ = ()

    open_indexes: ClassVar[int | None] = None
    """`num_messages` counts the open messages alone: there is nothing to take off."""

    @property
    def key_hash(self) -> int:
        """Asked for on Key_Shared only."""
        return EntryView(self.position, self.payload).key_hash


class Dispatcher:
    """Reads and hands out for one subscription."""

    def __init__(
        self,
        topic: ReadableTopic,
        cursor: ReadingCursor,
        membership: Membership,
        *,
        wake: Signal,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._topic = topic
        self._cursor = cursor
        self._membership = membership
        self._wake = wake
        self._clock = clock
        self._limits = limits
        self._bytes_max = limits.subscription_read_bytes
        self.throttle: DispatchThrottle | None = None
        """The rates that hold; None: there are none."""
        self._turn: DispatchTurn | None = None
        self.throttle_counts: ThrottleCounts | None = None
        """None: it never had rates."""
        self._delays: Delays | None = None
        # Failover: set while a new active consumer waits for the former one's acknowledgements.
        self._rewind_at: float | None = None
        self._pace = SlicePace()
        self._handled = 0
        """Entries that the last step handed out, or found due."""
        # Aborted entries beside them: a consumer that asks for one message may pass over very many
        # before it, each read on its own.
        self._passing = SlicePace()
        self._passed_over = 0
        self.failure: MagnetarError | None = None
        """Why nothing is dispatched any more, if so."""

    # --- what others ask of it

    @property
    def delayed(self) -> int:
        """How many entries wait for their time."""
        return 0 if self._delays is None else len(self._delays)

    @property
    def delayed_bytes(self) -> int:
        """What it takes of memory to know them."""
        return 0 if self._delays is None else self._delays.size_bytes

    def is_delayed(self, position: Position) -> bool:
        """Whether an entry waits for its time, and so comes by itself."""
        return self._delays is not None and position in self._delays

    def drop_delayed(self, through: Position | None = None) -> None:
        """Nothing waits any more, or nothing up to a position: it is acknowledged."""
        if self._delays is not None and through is None:
            self._delays.clear()
        elif self._delays is not None and through is not None:
            self._delays.drop_through(through)

    def rewind(self) -> None:
        """Deliver all that is unacknowledged again, from the first on."""
        self._rewind_at = None
        # Whoever rewinds gives dispatch a new start (invariant 6).
        self.failure = None
        self._cursor.rewind()
        self.drop_delayed()
        if self._membership.state is not None:
            self._membership.state.on_rewound()
            self.take_back()
        self._wake.advance()

    def rewind_after(self, seconds: float) -> None:
        """Rewind after a while; until then nothing is handed out."""
        self._rewind_at = self._clock.monotonic() + seconds
        self.take_back()
        self._wake.advance()

    def rewind_soon(self) -> None:
        """Rewind at once, or when a rewind is due anyhow."""
        if self._rewind_at is None:
            self.rewind()

    def take_back(self) -> None:
        """Empty the outboxes: what is in them will be read again."""
        for consumer in self._membership.consumers:
            consumer.drop_outbox()

    def limit_rates(self, throttle: DispatchThrottle | None) -> None:
        """Wait for these rates from now on; None: for none."""
        before, self.throttle = self.throttle, throttle
        if throttle is not None:
            counts = self.throttle_counts = self.throttle_counts or throttle.counts
            throttle.counts = counts
        if before is not None:
            before.leave(self._wake)
        if before is not None or throttle is not None:
            self._wake.advance()

    def resume(self) -> None:
        """What stopped dispatch may be over."""
        self.failure = None
        self._wake.advance()

    # --- the loop

    async def run(self) -> None:
        """Dispatch for ever."""
        while True:
            # Before the look: whatever happens during the step ends the wait below at once.
            seen = self._wake.version
            if self._rewind_at is not None:
                left = self._rewind_at - self._clock.monotonic()
                if left > 0:
                    await self._wait(seen, left)
                    continue
                self.rewind()
            try:
                progressed = self.failure is None and await self._step()
            except MagnetarError as error:
                # No retry: the next round finds the failure, and waits (invariant 6).
                self._fail(error)
                continue
            finally:
                if self._turn is not None:
                    self._end_turn(self._turn)
            if not progressed:
                await self._idle(seen)
                continue
            # What is in memory is read without a turn for others: they get one between two reads.
            await self._pace.after(self._handled)
            await self._passing.after(self._passed_over)

    async def _idle(self, seen: int) -> None:
        left = None if self._delays is None else self._delays.seconds_left()
        if left is None:
            await self._wake.past(seen)
        else:
            await self._wait(seen, left)

    async def _wait(self, seen: int, seconds: float) -> None:
        await self._wake.past_within(seen, seconds)

    async def _step(self) -> bool:
        """One read and what follows from it; False: nothing to do before the next advance."""
        self._tell_end()
        state = self._membership.state
        wanted = None if state is None else state.next_read()
        # No consumer with permits that is not blocked: what changes that advances `wake`.
        if wanted is None:
            return False
        if self.throttle is not None and state is not None:
            wanted = self._in_turn(self.throttle, state, wanted)
            if wanted is None:
                return False
        new_entries, delays = wanted.new_entries, self._delays
        if delays is not None and state is not None and state.delays:
            if await self._serve_due(state, delays):
                return True
            if delays.is_full and not wanted.waiting:
                return False
            # What waits takes no permits: a few of them must not make many small reads.
            if delays.is_run and self._turn is None:
                new_entries = max(new_entries, state.look_ahead)
        # Redeliveries first: nothing new may overtake them.
        if wanted.waiting:
            return await self._serve_waiting(wanted.waiting)
        return await self._serve_new(new_entries)

    def _in_turn(
        self, throttle: DispatchThrottle, state: DispatchState, wanted: Read
    ) -> Read | None:
        """The part of a read that the rates have room for; None: they have none now."""
        # Nobody waits for a rate, nor counts as waiting, without anything to read.
        is_at_end = self._cursor.read_position > self._topic.read_window().end
        has_due = self._delays is not None and self._delays.has_due
        # Behind the end of a log that was trimmed, the compacted view may still have something.
        has_more = has_due or self._compacted_view() is not None
        if is_at_end and not wanted.waiting and not has_more:
            return None
        entries = len(wanted.waiting) or wanted.new_entries
        size = self._limits.subscription_read_bytes
        turn = throttle.begin(self._wake, entries, size, state.messages_per_entry)
        if turn is None:
            return None
        self._turn, self._bytes_max = turn, turn.bytes
        return Read(wanted.waiting[: turn.entries], min(wanted.new_entries, turn.entries))

    def _end_turn(self, turn: DispatchTurn) -> None:
        self._turn, self._bytes_max = None, self._limits.subscription_read_bytes
        turn.end()

    def _tell_end(self) -> None:
        # A terminated topic, or a segment that was split: there its clients go on to the children.
        if not self._topic.ledger.sealed or self._cursor.backlog():
            return
        # What was trimmed is no backlog, and may stand in the compacted view all the same.
        if self._compacted_view() is None:
            for consumer in self._membership.consumers:
                consumer.tell_end()

    def _fail(self, error: MagnetarError) -> None:
        self.failure = error
        SUBSCRIPTION_FAILURES.inc()
        _LOG.error(
            "dispatch-stopped",
            error,
            topic=str(self._topic.name),
            subscription=self._cursor.name,
            position=str(self._cursor.read_position),
        )

    # --- new entries

    async def _serve_new(self, entries_max: int) -> bool:
        view = self._compacted_view()
        if view is not None:
            return await self._serve_compacted(view, entries_max)
        cursor, window = self._cursor, self._topic.read_window()
        # At the end, or behind an open transaction: the next move wakes it ('no poll, no spin').
        if cursor.read_position > window.end:
            return False
        entries = await cursor.read(entries_max, self._bytes_max)
        # Taken after the read (invariant 2): the last consumer may have gone meanwhile.
        state = self._membership.state
        # A window only grows, so the one from before the read still holds: what was decided then
        # is decided now. It is asked for anew where the read has gone beyond it.
        if entries and entries[-1].position > window.end:
            window = self._topic.read_window()
            readable = [entry for entry in entries if entry.position <= window.end]
            if len(readable) < len(entries):
                # Invariant 3: the rest waits for the maxReadPosition, and is read again then.
                cursor.read_position = entries[len(readable)].position
                entries = readable
        if not entries or state is None:
            return False
        visible = self._visible(entries, window)
        if state.delays:
            visible = self._undelayed(visible)
        self._passed_over = len(entries) - len(visible)
        self._hand_out(state, visible, are_new=True)
        return True

    def _visible(self, entries: list[Entry], window: ReadWindow) -> list[Entry]:
        """The entries that are for consumers; the others count as acknowledged."""
        hidden = window.hidden_through
        # Nearly always: what is hidden stands below, and no entry is parsed.
        if hidden is None or entries[0].position > hidden:
            return entries
        is_visible = self._topic.is_visible
        visible = [entry for entry in entries if is_visible(entry)]
        if len(visible) < len(entries):
            shown = {entry.position for entry in visible}
            for entry in entries:
                if entry.position not in shown:
                    # Or markers and aborted entries would hold the mark-delete position.
                    self._cursor.ack(entry.position)
            if self._topic.ledger.sealed:
                self._wake.advance()  # the end may have been reached
        return visible

    # --- compacted entries

    def _compacted_view(self) -> CompactedLedger | None:
        """Where the next entries are if not in the log (invariant 5)."""
        active = self._membership.active
        if active is None or not active.options.read_compacted:
            return None
        view = self._topic.compacted
        return view if view is not None and self._cursor.read_position <= view.horizon else None

    async def _serve_compacted(self, view: CompactedLedger, entries_max: int) -> bool:
        """Serve new entries from the view: what stands there was decided long ago."""
        cursor = self._cursor
        start = cursor.read_position
        try:
            entries = await view.read(start, entries_max, self._bytes_max)
        except LedgerMissing:
            # Replaced by a later view, and deleted: that one goes on from the same position.
            if self._topic.compacted is not view:
                return True
            raise
        state = self._membership.state
        # Rewound or reset meanwhile, or nobody is there any more: as for any read (invariant 2).
        if cursor.read_position != start or state is None:
            return state is not None
        # Behind the last one nothing up to the horizon is left.
        cursor.read_position = entries[-1].position.next if entries else view.horizon.next
        opened = [each for each in entries if not cursor.is_acked(each.position)]
        self._passed_over = 1 + len(entries) - len(opened)
        self._hand_out(state, opened, are_new=True, compacted=True)
        return True

    # --- entries with a time of delivery

    def _undelayed(self, entries: list[Entry]) -> list[Entry]:
        """The entries that are to be delivered now; the others wait for their time."""
        # Nearly always: no entry is parsed.
        if not may_have_delays([entry.payload for entry in entries]):
            if self._delays is not None:
                self._delays.is_run = False
            return entries
        marked = [entry for entry in entries if may_be_delayed(entry.payload)]
        if self._delays is None:
            self._delays = Delays(self._topic.delay_rule, self._clock, self._limits)
        return self._delays.sift(entries, marked)

    async def _serve_due(self, state: DispatchState, delays: Delays) -> bool:
        """Bring those whose time has come before new ones; False: there are none, or no room."""
        room = state.look_ahead if self._turn is None else self._turn.entries
        positions = delays.first_due(max(min(room, state.look_ahead), 0))
        if not positions:
            return False
        present = self._drop_gone(positions)
        if len(present) < len(positions):
            delays.remove_all(set(positions).difference(present))
        self._handled = len(positions)
        # Case 1, Shared: they join those that wait for redelivery, in the order of the log.
        if state.type is not SubscriptionType.KEY_SHARED:
            delays.remove_all(present)
            state.on_due(present)
            return True
        # Case 2, Key_Shared: the stored entry tells the key. They stay known until they are read,
        # for the read may fail; and a rewind meanwhile has taken them away.
        entries = await self._read_all(present)
        now = self._membership.state
        if now is not None:
            due = [each for each in entries if delays.remove(each.position)]
            opened = [each for each in due if not self._cursor.is_acked(each.position)]
            self._hand_out(now, opened, are_new=True)
        return bool(entries) or len(present) < len(positions)

    # --- entries that wait

    async def _serve_waiting(self, positions: list[Position]) -> bool:
        seen = self._wake.version
        present = self._drop_gone(positions)
        self._passed_over = len(positions) - len(present)
        entries = await self._read_all(present)
        state = self._membership.state
        if state is None:
            return False
        handed_out = self._hand_out(state, entries, are_new=False)
        # Nothing handed out and nothing changed: the same step would only repeat itself.
        return handed_out or len(present) < len(positions) or self._wake.version > seen

    def _drop_gone(self, positions: list[Position]) -> list[Position]:
        """Drop positions that were acknowledged or trimmed: they wait no more."""
        state = self._membership.state
        assert state is not None
        present = []
        for position in positions:
            gone = self._topic.ledger.next_valid(position) != position
            if gone or self._cursor.is_acked(position):
                state.on_ack(None, position)
            else:
                present.append(position)
        return present

    async def _read_all(self, positions: list[Position]) -> list[Entry]:
        """Read these entries in as few reads as possible; fewer of them if they are many bytes."""
        found: list[Entry] = []
        room = self._bytes_max
        for first, count in _runs(positions):
            at, last = first, Position(first.ledger_id, first.entry_id + count - 1)
            # A file gives a page at a time: without the rest all positions would be judged again.
            while at <= last:
                part = await self._topic.ledger.read(at, last.entry_id - at.entry_id + 1, room)
                # One at a trimmed position brings the next that exist, perhaps beyond the run.
                part = [entry for entry in part if entry.position <= last]
                size = sum([len(entry.payload) for entry in part])
                # A read brings one entry whatever its size: left for the next step if others are
                # there.
                if not part or (found and size > room):
                    return found
                found += part
                room -= size
                if room <= 0:
                    return found
                at = part[-1].position.next
        return found

    # --- handing out

    def _hand_out(
        self,
        state: DispatchState,
        entries: list[Entry],
        *,
        are_new: bool,
        compacted: bool = False,
    ) -> bool:
        self._handled = len(entries)
        unsent = self._judged(entries, state, are_new, compacted)
        plan = state.plan(unsent) if are_new else state.plan_waiting(unsent)
        if not plan.deliveries:
            return False
        # A consumer may have several turns; it and its session are told once.
        by_key: dict[int, list[Unsent]] = {}
        for key, given in plan.deliveries:
            by_key.setdefault(key, []).extend(given)
        for key, turns in by_key.items():
            consumer = self._membership.get(key)
            consumer.offer(turns)
            if not are_new:
                consumer.redelivered += sum([each.redelivery_count > 0 for each in turns])
        DISPATCHED_ENTRIES.inc(sum(map(len, by_key.values())))
        if self._turn is not None:
            self._turn.hand_out(by_key.values())
        return True

    def _judged(
        self, entries: list[Entry], state: DispatchState, are_new: bool, compacted: bool
    ) -> list[Unsent]:
        """Entries with their numbers of messages; those that wait with their redelivery counts."""
        active = self._membership.active
        epoch = None if active is None else active.epoch
        payloads = [each.payload for each in entries]
        # As below, without a line of Python per entry: most backlogs are single messages.
        if are_new and not may_have_batches(payloads):
            positions = [each.position for each in entries]
            same = repeat(1), repeat(0), repeat(()), repeat(epoch)
            return list(map(_new, repeat(Unsent), zip(positions, payloads, *same, strict=False)))
        judged: list[Unsent] = []
        for position, payload in entries:
            messages = messages_in(payload)
            # Of a batch acknowledged in part only the rest costs permits; its client is told.
            open_indexes = self._cursor.unacked_indexes(position) if messages > 1 else None
            if compacted:
                # Not all clients look at the mark of what was compacted out; at this they do.
                open_indexes = _surviving(payload, messages, open_indexes)
                if open_indexes == 0:
                    continue
            ack_set: tuple[int, ...] = ()
            if open_indexes is not None:
                messages, ack_set = open_indexes.bit_count(), words_of(open_indexes)
            count = 0 if are_new else state.redelivery_count(position)
            # Faster than the call of a named tuple: this is once per entry.
            fields = (position, payload, messages, count, ack_set, epoch)
            judged.append(_new(Unsent, fields))
        return judged


_new: Final[Any] = tuple.__new__


def messages_in(payload: bytes) -> int:
    """How many messages an entry holds, without parsing most of those that hold one."""
    return EntryView(UNPLACED, payload).num_messages if may_be_batch(payload) else 1


def _surviving(payload: bytes, messages: int, open_indexes: int | None) -> int | None:
    """The open messages of a batch that were not compacted out."""
    survivors = survivors_of(payload, messages)
    if survivors is None or open_indexes is None:
        return open_indexes if survivors is None else survivors
    return survivors & open_indexes


def _runs(positions: list[Position]) -> Iterator[tuple[Position, int]]:
    """Consecutive positions of one ledger: the first, and how many."""
    at = 0
    while at < len(positions):
        first = positions[at]
        count = 1
        while at + count < len(positions):
            if positions[at + count] != (first.ledger_id, first.entry_id + count):
                break
            count += 1
        yield first, count
        at += count
