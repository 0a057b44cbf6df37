"""Pure: the consumers of a subscription: permits, unacknowledged entries, blocks and turns.

Owns: `Member` (one consumer), `Members` (all of them, and the sums), and `choose_active`, the
consumer that a Failover subscription delivers to.

Invariants (`check_invariants`):
1. A member's unacked messages are those of its pending entries; the sum over all is `unacked`.
2. An entry is pending at one member at most.
3. A member is blocked when its unacked messages reach their limit, until they fall to half of it;
   all together likewise. Between half and whole the flag stays what it was.
4. Turns: the lowest priority number in which somebody can take; round robin within it.
5. The active consumer of a Failover subscription has the lowest priority number, and depends on the
   consumers' names and on the topic alone: after a restart the same one is chosen. A partition
   takes the consumer at (partition modulo their number) in the order of names, so that the
   partitions of a topic are spread evenly; other topics are spread by a hash ring.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, NamedTuple

from magnetar.errors import InvariantBroken
from magnetar.model.hashing import key_hash
from magnetar.model.ids import Position

# A ring position (0..65535) shares one int with the number of open messages.
HASH_BITS: Final = 16
HASH_MASK: Final = (1 << HASH_BITS) - 1

# No limit is a limit that is never reached: no case of its own in hot paths.
_UNLIMITED: Final = 1 << 62


class Member:
    """A consumer as dispatch sees it."""

    __slots__ = ("blocked", "has_room", "key", "name", "pending", "permits", "priority", "unacked")

    def __init__(self, key: int, name: str, priority: int) -> None:
        self.key = key
        self.name = name
        self.priority = priority
        # Pulsar's availablePermits and unackedMessages; `blocked` is blockedConsumerOnUnackedMsgs.
        self.permits = 0
        self.unacked = 0
        self.blocked = False
        # Whether its outbox takes more: a peer that does not read stops its own deliveries only.
        self.has_room = True
        self.pending: dict[Position, int] = {}
        """Unacknowledged entries: (open messages << HASH_BITS | hash). One small int each, because
        there are up to hundreds of thousands of them."""

    @property
    def can_take(self) -> bool:
        return self.permits > 0 and self.has_room and not self.blocked


class _Level:
    """Members of one priority, and whose turn it is."""

    __slots__ = ("members", "priority", "turn")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.members: list[Member] = []
        self.turn = 0


class Members:
    """All consumers of a subscription. A limit of 0 means none."""

    def __init__(self, unacked_per_consumer: int, unacked_per_subscription: int) -> None:
        self.by_key: dict[int, Member] = {}
        self.unacked = 0
        self.blocked = False
        self._levels: list[_Level] = []
        self.limit_unacked(unacked_per_consumer, unacked_per_subscription)

    def __bool__(self) -> bool:
        return bool(self.by_key)

    # --- who

    def add(self, member: Member) -> None:
        if member.key in self.by_key:
            raise InvariantBroken(f"consumer {member.key} joined twice")
        self.by_key[member.key] = member
        level = next((each for each in self._levels if each.priority == member.priority), None)
        if level is None:
            level = _Level(member.priority)
            self._levels.append(level)
            self._levels.sort(key=lambda each: each.priority)
        level.members.append(member)

    def remove(self, key: int) -> None:
        """Forget a member that has nothing pending."""
        member = self.by_key.pop(key)
        # Few priorities exist at a time, so a search is enough.
        level = next(each for each in self._levels if each.priority == member.priority)
        index = level.members.index(member)
        del level.members[index]
        if not level.members:
            self._levels.remove(level)
        else:
            # Who stood behind the one that left moves up: without this the round robin would skip
            # one.
            level.turn = (level.turn - (index < level.turn)) % len(level.members)

    def holder_of(self, position: Position) -> Member | None:
        """The consumer at which this entry is pending."""
        for member in self.by_key.values():
            if position in member.pending:
                return member
        return None

    # --- who can take

    def next_taker(self) -> Member | None:
        """The consumer whose turn it is; None: nobody can take."""
        if self.blocked:
            return None
        # Lower numbers first: the next level gets entries only when nobody in this one can take.
        for level in self._levels:
            members = level.members
            turn, count = level.turn, len(level.members)
            for step in range(turn, turn + count):
                member = members[step % count]
                if member.can_take:
                    # The turn is remembered within the level, so that every call goes on where the
                    # last ended.
                    level.turn = (step + 1) % count
                    return member
        return None

    def permits(self, enough: float) -> int:
        """Permits of all consumers that can take; counting stops at `enough`."""
        total = 0
        # Counting all of thousands of consumers at every step would cost more than the read itself.
        if not self.blocked:
            for member in self.by_key.values():
                if member.can_take:
                    total += member.permits
                    if total >= enough:
                        break
        return total

    def budget(self, member: Member) -> int:
        """How many messages this one can take before something stops it."""
        return min(
            member.permits, self._unacked_max - member.unacked, self._total_max - self.unacked
        )

    # --- what they have

    def limit_unacked(self, per_consumer: int, per_subscription: int) -> None:
        """Other limits from now on; who is above one is blocked, who is far below goes on."""
        self._unacked_max = per_consumer or _UNLIMITED
        self._total_max = per_subscription or _UNLIMITED
        for member in self.by_key.values():
            member.blocked = _is_blocked(member.blocked, member.unacked, self._unacked_max)
        self.blocked = _is_blocked(self.blocked, self.unacked, self._total_max)

    def charge(self, member: Member, messages: int) -> None:
        """Messages went to a member."""
        member.permits -= messages
        member.unacked += messages
        self.unacked += messages
        if member.unacked >= self._unacked_max:
            member.blocked = True
        if self.unacked >= self._total_max:
            self.blocked = True

    def discharge(self, member: Member, messages: int) -> bool:
        """Take messages off a member's unacknowledged ones; True: that ended a block."""
        member.unacked -= messages
        self.unacked -= messages
        ended = False
        # Half, as in Pulsar: with the whole limit a consumer would be blocked and unblocked by
        # every single ack.
        if member.blocked and member.unacked <= self._unacked_max // 2:
            member.blocked = False
            ended = True
        if self.blocked and self.unacked <= self._total_max // 2:
            self.blocked = False
            ended = True
        return ended

    def forget_pending(self) -> None:
        """Forget what members have unacknowledged; permits stay."""
        for member in self.by_key.values():
            # Permits stay: the client has not got these messages, or gets them again, and sends no
            # new FLOW for them.
            member.pending.clear()
            member.unacked = 0
            member.blocked = False
        self.unacked = 0
        self.blocked = False

    def check_invariants(self) -> None:
        seen: set[Position] = set()
        total = 0
        for member in self.by_key.values():
            messages = sum(packed >> HASH_BITS for packed in member.pending.values())
            if messages != member.unacked or not seen.isdisjoint(member.pending):
                raise InvariantBroken(f"{member.name}: {member.unacked} unacked, not {messages}")
            seen.update(member.pending)
            total += messages
            _check_block(member.name, member.blocked, messages, self._unacked_max)
        if total != self.unacked:
            raise InvariantBroken(f"{total} messages are unacknowledged, counted {self.unacked}")
        _check_block("subscription", self.blocked, total, self._total_max)
        # Invariant 4: whoever is in no level never has a turn.
        levels = [member for level in self._levels for member in level.members]
        if sorted(each.key for each in levels) != sorted(self.by_key):
            raise InvariantBroken("members and levels differ")


def _is_blocked(was_blocked: bool, unacked: int, limit: int) -> bool:
    # Invariant 3: between half and whole the flag stays what it was.
    return unacked >= limit or (was_blocked and unacked > limit // 2)


def _check_block(name: str, blocked: bool, unacked: int, limit: int) -> None:
    if (unacked >= limit and not blocked) or (unacked <= limit // 2 and blocked):
        raise InvariantBroken(f"{name}: blocked is {blocked} at {unacked} of {limit} unacked")


# As Pulsar's CONSUMER_CONSISTENT_HASH_REPLICAS; fewer points would spread topics unevenly.
POINTS_PER_CONSUMER: Final = 100

_POSITIVE: Final = 0x7FFF_FFFF


class Candidate(NamedTuple):
    """A consumer as the choice sees it; `key` tells those of equal names apart."""

    priority: int
    name: str
    key: int


def choose_active(candidates: Iterable[Candidate], topic: str, partition: int | None) -> int | None:
    """The key of the active consumer; None if there is no consumer."""
    ordered = sorted(candidates)
    if not ordered:
        return None
    eligible = [each for each in ordered if each.priority == ordered[0].priority]
    # Partition n goes to consumer n modulo their number: a client with one consumer per partition
    # gets an even share, as AbstractDispatcherSingleActiveConsumer does it.
    if partition is not None:
        return eligible[partition % len(eligible)].key
    if len(eligible) == 1:
        return eligible[0].key
    # Not partitioned: topics are spread over the consumers by a ring, so that those of one name do
    # not all become active for every topic.
    ring: dict[int, int] = {}
    for candidate in eligible:
        for point in range(POINTS_PER_CONSUMER):
            ring[key_hash(f"{candidate.name}{point}") & _POSITIVE] = candidate.key
    points = sorted(ring)
    index = bisect_left(points, key_hash(topic) & _POSITIVE)
    return ring[points[index % len(points)]]
