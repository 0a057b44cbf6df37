"""A subscription's life as a state machine: random events against a plain model of the log."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from magnetar.broker.dispatch.dispatch_state import DispatchState
from magnetar.broker.dispatch.plan import DispatchLimits, JoinRefused, MembershipChange, RefusalKind
from magnetar.model.hashing import HashRange
from magnetar.model.ids import Position
from magnetar.model.subscriptions import KeySharedMode, KeySharedPolicy, SubscriptionType
from magnetar.wire.messages import encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb

LIMITS = DispatchLimits(
    read_entries=4,
    entries_per_turn=2,
    look_ahead_entries=6,
    unacked_per_consumer=6,
    unacked_per_subscription=10,
)
STICKY_SLOTS = (HashRange(0, 9_999), HashRange(10_000, 39_999), HashRange(40_000, 65_535))
BUCKETS = ((0, 9_999), (10_000, 29_999), (30_000, 65_535))
KEY_HASHES = (7, 12_345, 23_456, 45_678, 65_000)
LEDGER_ENTRIES = 5


@dataclass(frozen=True)
class Entry:
    position: Position
    num_messages: int = 1
    key_hash: int = 1
    open_indexes: int | None = None
    payload: bytes = b""

    @property
    def messages(self) -> int:
        return self.num_messages if self.open_indexes is None else self.open_indexes.bit_count()


@dataclass
class Stored:
    """An entry of the log, and where it is."""

    messages: int
    key_hash: int
    open: int
    owner: int | None = None
    redeliveries: int = 0

    @property
    def acked(self) -> bool:
        return self.open == 0


@dataclass
class Client:
    priority: int
    permits: int = 0
    has_room: bool = True
    slot: HashRange | None = None


class DispatchMachine(RuleBasedStateMachine):
    """Reads take time: anything can happen between asking for entries and planning them."""

    type = SubscriptionType.SHARED
    policy = KeySharedPolicy()
    slots: Sequence[HashRange] = ()
    """What sticky consumers ask for, one each."""
    consistent_hashing = False

    @initialize()
    def open(self) -> None:
        self.state = DispatchState(
            self.type,
            LIMITS,
            topic="persistent://t/n/x",
            key_shared=self.policy,
            consistent_hashing=self.consistent_hashing,
        )
        self.log: list[Stored] = []
        self.clients: dict[int, Client] = {}
        self.next_key = 0
        self.cursor = 0
        self.last_delivered = -1
        self.rewind_due = False
        self.reading: tuple[bool, list[Entry]] | None = None
        for slot in STICKY_SLOTS[:2]:
            if self.type is not SubscriptionType.EXCLUSIVE or not self.clients:
                self.add_client(0, slot if self.slots else None, refused=False)
        for key, client in self.clients.items():
            client.permits += 3
            self.state.on_flow(key, 3)

    # --- helpers

    @property
    def single(self) -> bool:
        return self.type.takes_cumulative_acks

    @property
    def keyed(self) -> bool:
        return self.type is SubscriptionType.KEY_SHARED

    def unacked(self, key: int | None = None) -> int:
        return sum(
            bin(each.open).count("1")
            for each in self.log
            if each.owner is not None and key in (None, each.owner) and not self.single
        )

    def owned(self) -> list[int]:
        return [index for index, each in enumerate(self.log) if each.owner is not None]

    def ranges_of(self, slot: HashRange | None) -> Sequence[HashRange]:
        return () if slot is None else (slot,)

    def group_of(self, key_hash: int) -> int:
        """Hashes of one group are kept in order together."""
        return key_hash

    def payload_of(self, key_hash: int) -> bytes:
        return b""

    def entry(self, index: int) -> Entry:
        stored = self.log[index]
        partial = stored.open.bit_count() < stored.messages
        return Entry(
            position_of(index),
            stored.messages,
            stored.key_hash,
            stored.open if partial else None,
            self.payload_of(stored.key_hash),
        )

    def ended(self, rewind: bool) -> None:
        if rewind:
            self.rewind_due = True
            for each in self.log:
                each.owner = None
                each.redeliveries = 0

    # --- rules

    @rule(
        keys=st.lists(st.sampled_from(KEY_HASHES), min_size=1, max_size=6),
        messages=st.sampled_from((1, 1, 1, 3)),
    )
    def publish(self, keys: list[int], messages: int) -> None:
        for key in keys:
            self.log.append(Stored(messages, key, (1 << messages) - 1))

    @precondition(lambda self: self.reading is None)
    @rule(keys=st.lists(st.sampled_from(KEY_HASHES[:3]), max_size=6), rounds=st.integers(1, 4))
    def dispatch(self, keys: list[int], rounds: int) -> None:
        """Publish and hand out without anything in between."""
        for key in keys:
            self.log.append(Stored(1, key, 1))
        for _ in range(rounds):
            self.begin_read()
            if self.reading is not None:
                self.finish_read()

    @rule(priority=st.integers(0, 1), data=st.data())
    def join(self, priority: int, data: st.DataObject) -> None:
        taken = [client.slot for client in self.clients.values()]
        slot = data.draw(st.sampled_from(self.slots)) if self.slots else None
        self.add_client(priority, slot, refused=slot is not None and slot in taken)

    def add_client(self, priority: int, slot: HashRange | None, refused: bool) -> None:
        key, self.next_key = self.next_key, self.next_key + 1
        change = self.state.on_join(key, name_of(key), priority, self.ranges_of(slot))
        if self.type is SubscriptionType.EXCLUSIVE and self.clients:
            assert isinstance(change, JoinRefused)
            assert change.kind is RefusalKind.BUSY
        elif refused:
            assert isinstance(change, JoinRefused)
            assert change.kind is RefusalKind.ASSIGN
        else:
            assert isinstance(change, MembershipChange)
            self.clients[key] = Client(priority, slot=slot)
            self.ended(change.rewind)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.clients)))
        del self.clients[key]
        for each in self.log:
            if each.owner == key:
                each.owner = None
        change = self.state.on_leave(key)
        assert change.rewind or self.clients
        self.ended(change.rewind)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), permits=st.integers(1, 8))
    def flow(self, data: st.DataObject, permits: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.clients)))
        self.clients[key].permits += permits
        self.state.on_flow(key, permits)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def turn_outbox(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.clients)))
        client = self.clients[key]
        client.has_room = not client.has_room
        self.state.on_outbox(key, client.has_room)

    @precondition(lambda self: self.rewind_due)
    @rule()
    def rewind(self) -> None:
        self.cursor = 0
        self.last_delivered = -1
        self.rewind_due = False
        self.state.on_rewound()
        if self.reading is not None and not self.reading[0]:
            self.reading = None  # the cursor drops what it read before the rewind

    @precondition(lambda self: self.reading is None)
    @rule()
    def begin_read(self) -> None:
        read = self.state.next_read()
        if read is None:
            return
        assert not self.rewind_due
        if read.waiting:
            indexes = [index_of(position) for position in read.waiting]
            assert indexes == sorted(indexes)
            self.reading = (True, [self.entry(index) for index in indexes])
            return
        found: list[int] = []
        while self.cursor < len(self.log) and len(found) < read.new_entries:
            if not self.log[self.cursor].acked:
                found.append(self.cursor)
            self.cursor += 1
        self.reading = (False, [self.entry(index) for index in found])

    @precondition(lambda self: self.reading is not None)
    @rule()
    def finish_read(self) -> None:
        assert self.reading is not None
        waiting, entries = self.reading
        self.reading = None
        if waiting:
            plan = self.state.plan_waiting(entries)
        else:
            # As the cursor does: what was acknowledged during the read is left out.
            plan = self.state.plan([e for e in entries if not self.log[index_of(e.position)].acked])
        assert not (self.rewind_due and plan.deliveries)
        for key, delivered in plan.deliveries:
            self.check_priority(key)
            for entry in delivered:
                self.deliver(key, entry)

    @rule(data=st.data(), partly=st.booleans())
    def ack(self, data: st.DataObject, partly: bool) -> None:
        indexes = [i for i, each in enumerate(self.log) if not each.acked and i < self.cursor]
        if not indexes or not self.clients:
            return
        index = data.draw(st.sampled_from(indexes))
        stored = self.log[index]
        owner = stored.owner
        other = data.draw(st.sampled_from(sorted(self.clients)))
        stored.open = stored.open & (stored.open - 1) if partly else 0
        if stored.acked:
            stored.owner = None
            stored.redeliveries = 0
        remaining = stored.open.bit_count()
        self.state.on_ack(other if owner is None else owner, position_of(index), remaining)

    @precondition(lambda self: not self.single and self.owned())
    @rule(data=st.data(), every=st.booleans())
    def redeliver(self, data: st.DataObject, every: bool) -> None:
        key = self.log[data.draw(st.sampled_from(self.owned()))].owner
        assert key is not None
        mine = [index for index in self.owned() if self.log[index].owner == key]
        chosen = mine if every else data.draw(st.lists(st.sampled_from(self.owned()), unique=True))
        asked = None if every else [position_of(index) for index in chosen]
        back = [index for index in chosen if index in mine]
        assert self.state.on_redeliver(key, asked) == (len(back), False)
        for index in back:
            self.log[index].owner = None
            self.log[index].redeliveries += 1

    @precondition(lambda self: self.single and self.clients)
    @rule()
    def redeliver_from_the_mark(self) -> None:
        key = self.state.active
        assert key is not None
        assert self.state.on_redeliver(key).rewind
        self.ended(True)

    @precondition(lambda self: self.reading is None and self.clients)
    @rule(data=st.data(), event=st.sampled_from(("flow", "ack", "redeliver", "leave", "join")))
    def race(self, data: st.DataObject, event: str) -> None:
        """Something happens while entries are read."""
        self.log += [Stored(1, key, 1) for key in KEY_HASHES[:2]]
        self.begin_read()
        if event == "flow":
            self.flow(data, 4)
        elif event == "ack":
            self.ack(data, partly=False)
        elif event == "leave":
            self.leave(data)
        elif event == "join":
            self.join(0, data)
        elif self.owned():
            self.redeliver(data, every=False)
        if self.reading is not None:
            self.finish_read()

    @precondition(lambda self: self.log)
    @rule(data=st.data())
    def ack_through(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, min(len(self.log) - 1, 4)))
        for each in self.log[: index + 1]:
            each.open, each.owner, each.redeliveries = 0, None, 0
        self.state.on_acked_through(position_of(index))

    # --- what must hold

    def check_priority(self, key: int) -> None:
        if self.type is not SubscriptionType.SHARED:
            return
        for other, client in self.clients.items():
            if client.priority < self.clients[key].priority:
                assert not self.state.members[other].can_take

    def deliver(self, key: int, entry: Entry) -> None:
        index = index_of(entry.position)
        stored, client = self.log[index], self.clients[key]
        assert not stored.acked or not entry.open_indexes
        assert client.permits > 0, "a permit was used twice"
        assert client.has_room
        assert stored.owner is None, f"{entry} went to {stored.owner} and {key}"
        client.permits -= entry.messages
        if self.single:
            assert key == self.state.active
            assert index > self.last_delivered, "out of order"
            self.last_delivered = index
            return
        assert not stored.acked
        assert self.unacked(key) < LIMITS.unacked_per_consumer
        assert self.unacked() < LIMITS.unacked_per_subscription
        assert self.state.redelivery_count(entry.position) == stored.redeliveries
        if self.keyed:
            self.check_order(key, index)
        stored.owner = key

    def check_order(self, key: int, index: int) -> None:
        group = self.group_of(self.log[index].key_hash)
        for at, each in enumerate(self.log):
            if self.group_of(each.key_hash) == group:
                assert each.owner in (None, key), "a key is at two consumers"
                overtaken = at < index and not each.acked and each.owner is None
                assert not overtaken, "overtook an entry of its key"

    @invariant()
    def state_is_sound(self) -> None:
        if not hasattr(self, "state"):
            return
        self.state.check_invariants()
        for key, client in self.clients.items():
            member = self.state.members[key]
            assert member.permits == client.permits
            owned = {position_of(i) for i in self.owned() if self.log[i].owner == key}
            assert self.single or set(member.pending) == owned
        assert self.state.waiting <= len([each for each in self.log if not each.acked])
        if self.rewind_due:
            assert self.state.next_read() is None
        elif not self.keyed:
            members = self.state.members
            takers = [
                m for key, m in members.items() if not self.single or key == self.state.active
            ]
            can_take = any(member.can_take for member in takers) and not self.state.blocked
            assert (self.state.next_read() is not None) == can_take

    def teardown(self) -> None:
        """With permits and acks everything arrives in the end, each entry once more."""
        if not hasattr(self, "state"):
            return
        if self.reading is not None:
            self.finish_read()
        for slot in self.slots or (None,):
            taken = [client.slot for client in self.clients.values()]
            if slot not in taken and (slot is not None or not self.clients):
                self.add_client(0, slot, refused=False)
        for key, client in self.clients.items():
            client.permits += 1000
            client.has_room = True
            self.state.on_flow(key, 1000)
            self.state.on_outbox(key, True)
        for _ in range(3 * len(self.log) + 3):
            if self.rewind_due:
                self.rewind()
            self.begin_read()
            if self.reading is not None:
                self.finish_read()
            for index in self.owned():
                self.acknowledge(index)
            if self.single:
                for index in range(self.last_delivered + 1):
                    self.log[index].open = 0
            self.state_is_sound()
        assert all(each.acked for each in self.log), "starved"

    def acknowledge(self, index: int) -> None:
        stored = self.log[index]
        self.state.on_ack(stored.owner, position_of(index))
        stored.open, stored.owner, stored.redeliveries = 0, None, 0


def position_of(index: int) -> Position:
    return Position(*divmod(index, LEDGER_ENTRIES))


def name_of(key: int) -> str:
    return f"c{key % 3}"


@lru_cache
def stamped(key_hash: int) -> bytes:
    """An entry whose producer says where it stands on the ring of entry buckets."""
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=0, publish_time=0, entry_hash_min=key_hash
    )
    return encode_entry(metadata, b"")


def index_of(position: Position) -> int:
    return position.ledger_id * LEDGER_ENTRIES + position.entry_id


class ExclusiveMachine(DispatchMachine):
    type = SubscriptionType.EXCLUSIVE


class FailoverMachine(DispatchMachine):
    type = SubscriptionType.FAILOVER


class KeySharedMachine(DispatchMachine):
    type = SubscriptionType.KEY_SHARED


class ConsistentHashingMachine(KeySharedMachine):
    consistent_hashing = True


class StickyMachine(KeySharedMachine):
    policy = KeySharedPolicy(KeySharedMode.STICKY, STICKY_SLOTS)
    slots = STICKY_SLOTS


class BucketMachine(KeySharedMachine):
    policy = KeySharedPolicy.bucketed(BUCKETS)

    def ranges_of(self, slot: HashRange | None) -> Sequence[HashRange]:
        return self.policy.ranges

    def group_of(self, key_hash: int) -> int:
        return bisect_left([end for _, end in BUCKETS], key_hash)

    def payload_of(self, key_hash: int) -> bytes:
        return stamped(key_hash)

    def check_order(self, key: int, index: int) -> None:
        super().check_order(key, index)
        bucket, count = self.group_of(self.log[index].key_hash), len(BUCKETS)
        sharers = sorted(self.clients, key=lambda each: (name_of(each), each))
        rank = sharers.index(key)
        first, end = (each * count // len(sharers) for each in (rank, rank + 1))
        assert first <= bucket < end, f"bucket {bucket} is not of {key}, {rank} of {sharers}"
