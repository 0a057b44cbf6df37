"""Pure: who gets which entry of a subscription, and what to read next.

Owns: `DispatchState`: the consumers of one subscription, their permits, what each has
unacknowledged, the entries that wait for a consumer, and every choice between them.

The owner asks `next_read`, reads those entries, asks `plan` (new ones) or `plan_waiting` (positions
that were named by `next_read`), and hands out what the plan says. A position that waits but cannot
be read any more is dropped by `on_ack(None, position)`. The events in between (`on_...`) may come
at any time; a True answer means that there may be something to read now.

Invariants (`check_invariants`):
1. An entry goes only to a consumer with permits > 0 that is neither blocked nor without room; a
   batch is never split, so permits may end below 0 by less than one batch.
2. Exclusive, Failover: only the active consumer gets entries, in the order of the log.
3. Shared, Key_Shared: an entry that was read is at exactly one consumer, or waits, or is
   acknowledged, or is withheld (a transaction has acknowledged it, undecided). It leaves a
   consumer only by an ack, a redelivery request, the abort of such a transaction or the
   consumer's end; the request and the abort count as a redelivery.
4. Key_Shared: an entry overtakes no entry of its hash that waits, and (AUTO_SPLIT in order, entry
   buckets) goes to no consumer while another one has unacknowledged entries of its hash. All
   entries of a bucket have one hash.
5. A consumer is blocked when its unacknowledged messages reach their limit, until they fall to
   half of it; likewise all consumers together for the subscription's limit.
6. From a change that needs a rewind until `on_rewound`, nothing is planned: entries that were read
   before it will be read again.
7. What waits is bounded: reading ahead stops at `look_ahead_entries`; the rest came from consumers.

Relies on: new entries that come once each, in order, without acknowledged ones (the cursor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeVar

from magnetar.broker.dispatch.key_shared import AssignRefused, HashHolds, Moved, selector_for
from magnetar.broker.dispatch.members import (
    HASH_BITS,
    HASH_MASK,
    Candidate,
    Member,
    Members,
    choose_active,
)
from magnetar.broker.dispatch.plan import (
    DispatchLimits,
    DispatchPlan,
    EntryFacts,
    JoinRefused,
    MembershipChange,
    Read,
    Redelivery,
    RefusalKind,
)
from magnetar.broker.dispatch.redelivery import UNKEYED, RedeliveryCounts, ReplayQueue
from magnetar.broker.entries import UNPLACED, EntryView
from magnetar.errors import InvariantBroken
from magnetar.model.hashing import HashRange
from magnetar.model.ids import Position
from magnetar.model.subscriptions import KeySharedMode, KeySharedPolicy, SubscriptionType

# The weight of the newest plan: a few plans are enough to follow a producer that begins to batch,
# and one odd entry changes little.
_AVERAGE_WEIGHT: Final = 0.2
_DEFAULT_POLICY: Final = KeySharedPolicy()

E = TypeVar("E", bound=EntryFacts)


class DispatchState:
    """The choice for one subscription, for as long as it keeps its type."""

    def __init__(
        self,
        type_: SubscriptionType,
        limits: DispatchLimits,
        *,
        topic: str,
        partition: int | None = None,
        key_shared: KeySharedPolicy = _DEFAULT_POLICY,
        consistent_hashing: bool = True,
    ) -> None:
        self.type = type_
        self._limits = limits
        self._topic = topic
        self._partition = partition
        # Exclusive, Failover: entries are not tracked one by one. The mark-delete position says
        # what is acknowledged, and a rewind brings all the rest.
        self._single = type_.takes_cumulative_acks
        self._keyed = type_ is SubscriptionType.KEY_SHARED
        self._selector = selector_for(key_shared, consistent_hashing)
        bucketed = key_shared.entry_buckets
        self.delays = not self._single and not bucketed
        """Whether messages wait here for their time: no consumer counts on the order of all."""
        self._hash_of: Callable[[EntryFacts], int] = _bucket_hash if bucketed else _key_hash
        # Sticky ranges change hands only when their consumer is gone, with all it had: nothing is
        # left to drain. In the other modes a hash can move while its entries are unacknowledged.
        in_order = key_shared.mode is KeySharedMode.AUTO_SPLIT and not key_shared.out_of_order
        drains = bucketed or in_order
        self._holds = HashHolds() if self._keyed and drains else None
        self._members = Members(limits.unacked_per_consumer, limits.unacked_per_subscription)
        self._active: Member | None = None
        # Read once and at no consumer (Pulsar's redeliveryMessages): the cursor is past them, so
        # nothing but this queue remembers them until the next rewind.
        self._replay = ReplayQueue()
        self._counts = RedeliveryCounts()
        self._rewinding = False
        self.rewinds = 0
        """Grows with each: who looks away meanwhile finds out."""
        self._messages_per_entry = 1.0
        self._planned_through = UNPLACED
        """No entry behind it was handed out or waits."""
        self._stuck = False
        """Nothing that waits could be handed out, and nothing changed since (Key_Shared)."""

    # --- what it knows

    @property
    def members(self) -> Mapping[int, Member]:
        return MappingProxyType(self._members.by_key)

    @property
    def active(self) -> int | None:
        return None if self._active is None else self._active.key

    @property
    def unacked(self) -> int:
        """Unacknowledged messages at all consumers (Shared, Key_Shared)."""
        return self._members.unacked

    @property
    def blocked(self) -> bool:
        """Whether the subscription's limit on unacknowledged messages is reached."""
        return self._members.blocked

    @property
    def waiting(self) -> int:
        return len(self._replay)

    @property
    def look_ahead(self) -> int:
        """How many more entries may be read for the queue of those that wait."""
        return min(self._limits.look_ahead_entries - len(self._replay), self._limits.read_entries)

    @property
    def messages_per_entry(self) -> float:
        """An average of what was handed out lately."""
        return self._messages_per_entry

    def redelivery_count(self, position: Position) -> int:
        return self._counts.of(position)

    def ranges_of(self, key: int) -> list[HashRange]:
        """The hashes of a consumer (Key_Shared)."""
        return self._selector.ranges_of(key) if self._keyed else []

    def draining(self) -> dict[int, int]:
        """Hashes that wait for their former consumer: how many entries it still has."""
        return {} if self._holds is None else self._holds.draining(self._selector)

    # --- what to read

    def next_read(self) -> Read | None:
        """None: there is nothing to read before an event."""
        # Invariant 6: the cursor is about to move, and a read would come from where it was.
        if self._rewinding:
            return None
        if self._keyed:
            return self._next_keyed_read()
        if self._single:
            # Exclusive, Failover: standby consumers send FLOW too, but their permits count only
            # once they are active.
            active = self._active
            permits = active.permits if active is not None and active.can_take else 0
        else:
            permits = self._members.permits(self._enough())
        if permits <= 0:
            return None
        count = self._entries_for(permits)
        # Redelivery before new entries, as in Pulsar: what waits is older, and without this a busy
        # topic would keep it waiting for ever.
        if self._replay:
            return Read(self._replay.first(UNKEYED, count), 0)
        return Read([], count)

    def _next_keyed_read(self) -> Read | None:
        permits = self._members.permits(self._enough())
        if permits <= 0:
            return None
        # `_stuck` spares a search through all hashes per step; every event that may help clears it.
        if self._replay and not self._stuck:
            found = self._takeable()
            if found:
                return Read(found, 0)
            self._stuck = True
        # What waits is for consumers that are full or for draining hashes. The others go on
        # meanwhile, within bounds (invariant 7; Pulsar's keySharedLookAheadMsgInReplayThreshold).
        room = self._limits.look_ahead_entries - len(self._replay)
        return Read([], min(self._entries_for(permits), room)) if room > 0 else None

    def _takeable(self) -> list[Position]:
        """Positions that wait and have a consumer for them now, as many as are read at a time."""
        found: list[Position] = []
        budgets: dict[int, int] = {}
        for key_hash in self._replay.hashes:
            member = self._taker(key_hash)
            # No consumer for it now: it keeps its turn, and the hashes behind it are looked at.
            if member is None:
                continue
            # Several hashes may lead to one consumer: together they get no more than its permits.
            budget = budgets.get(member.key)
            if budget is None:
                budget = self._entries_for(member.permits)
            budget = min(budget, self._limits.read_entries - len(found))
            first = self._replay.first(key_hash, budget)
            budgets[member.key] = budget - len(first)
            found += first
            if len(found) >= self._limits.read_entries:
                break
        # In the order of the log the owner needs fewest reads, and a hash stays in order.
        found.sort()
        return found

    def _enough(self) -> float:
        """Permits beyond which no more is read at a time."""
        return self._limits.read_entries * self._messages_per_entry

    def _entries_for(self, permits: int) -> int:
        # At least one entry, however large batches are, and never more than permits: each entry
        # uses one or more.
        return min(int(permits / self._messages_per_entry) + 1, permits, self._limits.read_entries)

    # --- choices

    def plan(self, entries: Sequence[E]) -> DispatchPlan[E]:
        """Choose consumers for new entries. Those without one wait."""
        if self._rewinding:
            # Invariant 6: these were read before the rewind and come once more after it.
            return DispatchPlan([], 0, False)
        if entries:
            self._planned_through = max(self._planned_through, entries[-1].position)
        if self._keyed:
            return self._plan_keyed(entries)
        # What waits comes first: nothing new may overtake it.
        deliveries, taken = ([], 0) if self._replay else self._hand_out(entries)
        if taken < len(entries):
            # The cursor has passed them: what is not kept here would be lost until the next rewind.
            self._replay.add_all((entry.position, UNKEYED) for entry in entries[taken:])
        return DispatchPlan(deliveries, len(entries) - taken, taken == len(entries))

    def plan_waiting(self, entries: Sequence[E]) -> DispatchPlan[E]:
        """Choose consumers for entries that wait. Those acknowledged meanwhile are left out."""
        if self._rewinding:
            return DispatchPlan([], 0, False)
        # Others were acknowledged, or withheld by a transaction, while the read was under way.
        wanted = [entry for entry in entries if entry.position in self._replay]
        if self._keyed:
            return self._plan_waiting_keyed(wanted)
        deliveries, taken = self._hand_out(wanted)
        self._replay.remove_all(entry.position for entry in wanted[:taken])
        return DispatchPlan(deliveries, len(wanted) - taken, taken == len(wanted))

    def _hand_out(self, entries: Sequence[E]) -> tuple[list[tuple[int, Sequence[E]]], int]:
        """Deliveries in order, and how many entries they are."""
        # Exclusive, Failover: whatever is read belongs to the active consumer.
        if self._single:
            taken = self._give_active(entries)
            if taken == 0:
                return [], 0
            assert self._active is not None
            return [
                (self._active.key, entries if taken == len(entries) else entries[:taken])
            ], taken
        deliveries: list[tuple[int, Sequence[E]]] = []
        taken = 0
        # Shared: round robin in short turns, so that one consumer with many permits does not get a
        # whole read while its neighbours have none.
        while taken < len(entries):
            member = self._members.next_taker()
            if member is None:
                break
            turn = entries[taken : taken + self._limits.entries_per_turn]
            given = self._give_turn(member, turn)
            deliveries.append((member.key, turn if given == len(turn) else turn[:given]))
            taken += given
        return deliveries, taken

    def _give_active(self, entries: Sequence[E]) -> int:
        """Charge the active consumer for as many as it can take; nothing more is kept of them."""
        active = self._active
        if active is None or not active.can_take or not entries:
            return 0
        before = permits = active.permits
        taken = 0
        for entry in entries:
            # Acknowledgement at batch index level (PIP-54): only messages still open use permits.
            opened = entry.open_indexes
            permits -= entry.num_messages if opened is None else opened.bit_count()
            taken += 1
            # The entry that uses the permits up goes all the same: a batch is not split (invariant
            # 1).
            if permits <= 0:
                break
        active.permits = permits
        self._note_size(before - permits, taken)
        return taken

    def _give_turn(self, member: Member, entries: Sequence[E]) -> int:
        """Charge a consumer for as many as it can take, and note that it has them."""
        # The limits on unacknowledged messages count like permits: the first that is used up ends
        # the turn.
        budget = before = self._members.budget(member)
        pending = member.pending
        taken = 0
        for entry in entries:
            opened = entry.open_indexes
            messages = entry.num_messages if opened is None else opened.bit_count()
            pending[entry.position] = messages << HASH_BITS
            budget -= messages
            taken += 1
            if budget <= 0:
                break
        self._members.charge(member, before - budget)
        self._note_size(before - budget, taken)
        return taken

    def _plan_keyed(self, entries: Sequence[E]) -> DispatchPlan[E]:
        chosen: dict[int, list[E]] = {}
        held_back = 0
        hash_of, ring_position = self._hash_of, self._selector.ring_position
        waiting = self._replay.hashes
        for entry in entries:
            key_hash = ring_position(hash_of(entry))
            # Invariant 4: one of its hash waits already, and whoever could take this one would get
            # it before its predecessor.
            member = None if key_hash in waiting else self._taker(key_hash)
            if member is None:
                self._replay.add(entry.position, key_hash)
                held_back += 1
            else:
                self._give_keyed(member, entry, key_hash)
                chosen.setdefault(member.key, []).append(entry)
        return DispatchPlan([*chosen.items()], held_back, not self._members.blocked)

    def _plan_waiting_keyed(self, entries: Sequence[E]) -> DispatchPlan[E]:
        chosen: dict[int, list[E]] = {}
        served: set[int] = set()
        taken = 0
        for entry in entries:
            key_hash = self._selector.ring_position(self._hash_of(entry))
            # Not the first any more: an earlier one of its hash came back while this was read.
            is_first = self._replay.head(key_hash) == entry.position
            member = self._taker(key_hash) if is_first else None
            if member is not None:
                self._replay.remove(entry.position)
                self._give_keyed(member, entry, key_hash)
                chosen.setdefault(member.key, []).append(entry)
                served.add(key_hash)
                taken += 1
        for key_hash in sorted(served):
            self._replay.end_turn(key_hash)
        return DispatchPlan([*chosen.items()], len(entries) - taken, not self._members.blocked)

    def _taker(self, key_hash: int) -> Member | None:
        """The consumer that may get an entry of this hash now."""
        key = self._selector.select(key_hash)
        # No consumer has this hash (sticky ranges with a gap), or the subscription as a whole is
        # blocked.
        if key is None or self._members.blocked:
            return None
        member = self._members.by_key[key]
        # Its consumer cannot take more now, or a former one has yet to acknowledge entries of this
        # hash (draining, PIP-379).
        if not member.can_take or (self._holds and not self._holds.allows(key_hash, key)):
            return None
        return member

    def _give_keyed(self, member: Member, entry: EntryFacts, key_hash: int) -> None:
        opened = entry.open_indexes
        messages = entry.num_messages if opened is None else opened.bit_count()
        member.pending[entry.position] = messages << HASH_BITS | key_hash
        self._members.charge(member, messages)
        self._note_size(messages, 1)
        if self._holds is not None:
            self._holds.take(key_hash, member.key)

    def _note_size(self, messages: int, entries: int) -> None:
        """Follow how large batches are, so that not much more is read than can be handed out."""
        average = self._messages_per_entry
        self._messages_per_entry = average + (messages / entries - average) * _AVERAGE_WEIGHT

    # --- events: consumers

    def on_join(
        self, key: int, name: str, priority: int = 0, ranges: Sequence[HashRange] = ()
    ) -> MembershipChange | JoinRefused:
        """A consumer subscribed; it has no permits yet. `ranges` is what a sticky one asks for."""
        if key in self._members.by_key:
            raise InvariantBroken(f"consumer {key} joined twice")
        # A client that reconnects may come before its old connection is known to be dead: it gets
        # ConsumerBusy, which a reconnecting client takes for a reason to retry.
        if self.type is SubscriptionType.EXCLUSIVE and self._members:
            return JoinRefused(RefusalKind.BUSY, "an exclusive consumer is connected")
        moved: list[Moved] = []
        # The selector is asked first, because it can refuse: a refusal leaves no trace of the
        # consumer.
        if self._keyed:
            assigned = self._selector.join(key, name, ranges)
            if isinstance(assigned, AssignRefused):
                return JoinRefused(RefusalKind.ASSIGN, assigned.reason)
            moved = assigned
        self._members.add(Member(key, name, priority))
        self._stuck = False
        return self._changed(moved)

    def on_leave(self, key: int) -> MembershipChange:
        """A consumer is gone; what it had waits for another, uncounted."""
        member = self._members.by_key[key]
        # Before the ring is handed out anew: entries given back release their hashes, so the next
        # owners need not wait for a consumer that is gone.
        # With nobody left all is forgotten at once, below.
        if len(self._members.by_key) > 1:
            self._give_back_all(member)
        self._members.remove(key)
        moved = self._selector.leave(key) if self._keyed else []
        self._stuck = False
        return self._changed(moved)

    def _changed(self, moved: list[Moved]) -> MembershipChange:
        before = self._active
        # Asked at every change: a consumer that joins with a better priority becomes active at
        # once.
        if self._single:
            candidates = (
                Candidate(m.priority, m.name, m.key) for m in self._members.by_key.values()
            )
            key = choose_active(candidates, self._topic, self._partition)
            self._active = None if key is None else self._members.by_key[key]
        # A new active consumer begins behind the mark-delete position. With nobody left nothing is
        # remembered: membership makes a new state for whoever comes next.
        rewind = not self._members or (before is not None and before is not self._active)
        if rewind:
            self._forget()
        return MembershipChange(self.active, self._active is not before, rewind, moved)

    def on_rewound(self) -> None:
        """The cursor stands at the first unacknowledged entry: nothing is delivered or waits."""
        self._forget()
        self._rewinding = False

    def _forget(self) -> None:
        self._members.forget_pending()
        self._replay.clear()
        self._counts.clear()
        if self._holds is not None:
            self._holds.clear()
        self._rewinding = True
        self.rewinds += 1

    def on_flow(self, key: int, permits: int) -> bool:
        """A consumer wants so many messages more; an unknown one is ignored."""
        # FLOW may still be on its way when its consumer is already closed.
        member = self._members.by_key.get(key)
        if member is None or permits <= 0:
            return False
        member.permits += permits
        self._stuck = False
        return member.can_take

    def on_outbox(self, key: int, has_room: bool) -> bool:
        """Whether a consumer's connection takes more for now."""
        member = self._members.by_key.get(key)
        if member is None:
            return False
        member.has_room = has_room
        self._stuck = False
        return member.can_take

    # --- events: entries

    def on_ack(self, key: int | None, position: Position, remaining: int = 0) -> bool:
        """An entry was acknowledged but for `remaining` messages, by whichever consumer.

        Without a consumer: the entry expired, or cannot be read.
        """
        # Exclusive, Failover: nothing is pending here; only what waits to be delivered again
        # counts.
        if self._single:
            return not remaining and self._acked_waiting(position)
        member = None if key is None else self._members.by_key.get(key)
        packed = None if member is None else member.pending.get(position)
        # Clients may acknowledge what another consumer has: after a reconnect the ids are still
        # good.
        if packed is None:
            member = self._members.holder_of(position)
            if member is None:
                # At nobody: it was given back, and its ack arrived after all. Then it need not be
                # redelivered.
                return not remaining and self._acked_waiting(position)
            packed = member.pending[position]
        assert member is not None
        messages = packed >> HASH_BITS
        # Part of a batch (PIP-54): the consumer keeps the entry, and its hash, with fewer messages.
        if remaining:
            acked = max(messages - remaining, 0)
            member.pending[position] = packed - (acked << HASH_BITS)
            return self._discharge(member, acked)
        del member.pending[position]
        if self._counts:
            self._counts.forget(position)
        # The last unacknowledged entry of a hash frees it for the consumer that it has moved to.
        freed = self._holds is not None and self._release(packed & HASH_MASK)
        return self._discharge(member, messages) or freed

    def on_acks(self, key: int, positions: Sequence[Position]) -> bool:
        """Entries were acknowledged as a whole, by one consumer; as `on_ack` of each."""
        if self._single and not self._replay:
            return False
        member = self._members.by_key.get(key)
        others, woken = positions, False
        # Mostly nothing but what is pending has to be looked at: there is no hash that could be
        # free by it, and no count that goes with it.
        if member is not None and not self._single and self._holds is None and not self._counts:
            pending, others, messages = member.pending, [], 0
            for position in positions:
                packed = pending.pop(position, None)
                if packed is None:
                    others.append(position)
                else:
                    messages += packed >> HASH_BITS
            woken = self._discharge(member, messages)
        for position in others:
            woken = self.on_ack(key, position) or woken
        return woken

    def on_acked_through(self, position: Position) -> None:
        """Forget all entries up to a position: acked cumulatively, skipped or expired."""
        self._replay.drop_through(position)
        if self._single:
            return
        for member in self._members.by_key.values():
            self._acked_pending_through(member, position)
        self._counts.drop_through(position)
        self._stuck = False

    def _acked_pending_through(self, member: Member, position: Position) -> None:
        pending = member.pending
        if not pending:
            return
        # Mostly everything: then nothing has to be looked at one by one.
        if self._planned_through <= position:
            gone, messages = pending, member.unacked
            member.pending = {}
        else:
            gone = {each: packed for each, packed in pending.items() if each <= position}
            messages = sum([packed >> HASH_BITS for packed in gone.values()])
            member.pending = {each: n for each, n in pending.items() if each > position}
        if self._holds is not None:
            for packed in gone.values():
                self._holds.release(packed & HASH_MASK)
        self._discharge(member, messages)

    def on_redeliver(self, key: int, positions: Iterable[Position] | None = None) -> Redelivery:
        """A consumer asks again for entries that it has; None: for all of them."""
        member = self._members.by_key.get(key)
        # A standby has nothing; and a request of a former active consumer that comes late must not
        # rewind what its successor reads.
        if member is None or (self._single and member is not self._active):
            return Redelivery(0, False)
        # Exclusive, Failover: positions do not matter. As in Pulsar everything after the
        # mark-delete position comes again, which keeps the order.
        if self._single:
            self._forget()
            return Redelivery(0, True)
        # Ids that this consumer does not have (acknowledged or given back meanwhile) are ignored,
        # as in Pulsar.
        wanted = member.pending if positions is None else dict.fromkeys(positions)
        back = [position for position in wanted if position in member.pending]
        for position in back:
            self._counts.increase(position)
        self._give_back(member, back)
        return Redelivery(len(back), False)

    def on_due(self, positions: Iterable[Position]) -> None:
        """Entries whose time has come wait like those to be delivered again, uncounted (Shared).

        On Key_Shared they come to `plan`, for their place in the queue is under their hash.
        """
        self._replay.add_run(positions, UNKEYED)

    def on_withheld(self, position: Position) -> bool:
        """A transaction acknowledged all that is open of it: who has it keeps it; True: it waited.

        One that comes back from its consumer meanwhile waits; the owner drops it with `on_ack`.
        """
        return self._acked_waiting(position)

    def on_returned(self, positions: Iterable[Position]) -> list[Position]:
        """Entries are withheld no more, and not acknowledged: they wait (Shared, Key_Shared).

        Only those that were read since the last rewind. The answer: those at nobody whose hash is
        not known; they are for `on_returned_entry`.
        """
        unknown: list[Position] = []
        # Invariant 6: after the rewind they are read like all others that are open.
        if self._rewinding:
            return unknown
        # Gathered first: a queue of many takes a run at the cost of one.
        held: dict[int, list[Position]] = {}
        unheld: list[Position] = []
        for position in positions:
            # Its consumer had it all the time that it was withheld; now it goes back to the queue.
            member = self._members.holder_of(position)
            if member is not None:
                self._counts.increase(position)
                held.setdefault(member.key, []).append(position)
            # Its place in the queue is under its hash, and only the stored entry tells which that
            # is.
            elif position not in self._replay:
                if self._keyed:
                    unknown.append(position)
                else:
                    self._counts.increase(position)
                    unheld.append(position)
        for key, back in held.items():
            self._give_back(self._members.by_key[key], back)
        if unheld:
            self._replay.add_run(unheld, UNKEYED)
            self._stuck = False
        return unknown

    def on_returned_entry(self, entry: EntryFacts) -> None:
        """Return one withheld entry whose hash had to be read first (Key_Shared)."""
        # Looked up again: the entry was read meanwhile, and a consumer may have got it.
        if not self._rewinding and self._members.holder_of(entry.position) is None:
            self._return(entry.position, self._selector.ring_position(self._hash_of(entry)))

    def _return(self, position: Position, key_hash: int) -> None:
        if position not in self._replay:
            self._counts.increase(position)
            self._replay.add(position, key_hash)
            self._stuck = False

    def _give_back(self, member: Member, positions: list[Position]) -> None:
        """Take entries from a consumer: they wait for delivery again."""
        waiting: list[tuple[Position, int]] = []
        messages = 0
        for position in positions:
            packed = member.pending.pop(position)
            key_hash = packed & HASH_MASK
            messages += packed >> HASH_BITS
            waiting.append((position, key_hash))
            if self._holds is not None:
                self._holds.release(key_hash)
        self._replay.add_all(waiting)
        self._stuck = False
        self._discharge(member, messages)

    def _give_back_all(self, member: Member) -> None:
        """Take all that a consumer has, which may be tens of thousands: as runs."""
        pending, member.pending = member.pending, {}
        by_hash: dict[int, list[Position]] = {}
        if self._keyed:
            for position, packed in pending.items():
                by_hash.setdefault(packed & HASH_MASK, []).append(position)
        else:
            self._replay.add_run(pending, UNKEYED)
        for key_hash, positions in by_hash.items():
            self._replay.add_run(positions, key_hash)
            if self._holds is not None:
                self._holds.release_all(key_hash)
        self._discharge(member, member.unacked)

    def _acked_waiting(self, position: Position) -> bool:
        if self._replay and self._replay.remove(position):
            self._counts.forget(position)
            self._stuck = False
            return True
        return False

    def _release(self, key_hash: int) -> bool:
        assert self._holds is not None
        if not self._holds.release(key_hash):
            return False
        self._stuck = False
        # A hash that is free but that nothing waits for is no reason to wake dispatch.
        return key_hash in self._replay.hashes

    def limit_unacked(self, per_consumer: int, per_subscription: int) -> None:
        """Other limits of unacknowledged messages from now on."""
        self._members.limit_unacked(per_consumer, per_subscription)
        self._stuck = False

    def _discharge(self, member: Member, messages: int) -> bool:
        ended = self._members.discharge(member, messages)
        if ended:
            self._stuck = False
        return ended

    # --- checks

    def check_invariants(self) -> None:
        self._members.check_invariants()
        self._replay.check_invariants()
        pending = {
            position: (member.key, packed & HASH_MASK)
            for member in self._members.by_key.values()
            for position, packed in member.pending.items()
        }
        # Exclusive, Failover: a rewind replaces tracking, so nothing may pile up here.
        if self._single and (pending or len(self._counts)):
            raise InvariantBroken("a subscription with one active consumer tracks entries")
        both = [position for position in pending if position in self._replay]
        if both:
            raise InvariantBroken(f"{both} wait and are at a consumer")
        for position in self._counts.positions:
            if position not in pending and position not in self._replay:
                raise InvariantBroken(f"{position} has a redelivery count and is nowhere")
        # Invariant 4: holds are counted apart for speed, and must agree with what consumers have.
        if self._holds is not None:
            held: dict[int, tuple[int, int]] = {}
            for key, key_hash in pending.values():
                held[key_hash] = (key, held.get(key_hash, (key, 0))[1] + 1)
            if held != self._holds.holders():
                raise InvariantBroken("held hashes are not those of the entries at consumers")


def _key_hash(entry: EntryFacts) -> int:
    return entry.key_hash


def _bucket_hash(entry: EntryFacts) -> int:
    return EntryView(entry.position, entry.payload).bucket_hash
