"""Records and memory of the transaction model: immutable, ordered, hashable values (pure).

Owns: `State` and its parts. What is durable (headers, pins, aborted records, ledgers, ack ops, the
cursor, the group record) outlives everybody; `Owner` and `CursorOwner` are what one owner keeps in
memory, and go with it. A segment or subscription has several of them at a time after a take-over:
the last one is the present owner, the others are zombies that have not noticed yet.

Invariants:
1. Everything is built of tuples, strings and integers (no None), so any two states can be compared.
2. Transactions and segments are numbers from 0; ledgers are numbered by the epoch of their creator.
3. Fields marked ghost are the checker's own knowledge: no action's guard looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

# Ledger and entry, as in the store: tuples compare in the order of the log.
Position: TypeAlias = tuple[int, int]
# Below every entry: ledgers are numbered from 1, so (0, 0) is no position.
NOWHERE: Final[Position] = (0, 0)
ENTRY_MAX: Final = 99
EVERYTHING: Final[Position] = (ENTRY_MAX, ENTRY_MAX)

# Outcome of a transaction, as a record says or as somebody knows.
# The same empty text: a record that is not there, and something that nobody has read yet.
MISSING: Final = ""
UNKNOWN: Final = ""
OPEN: Final = "open"
COMMITTED: Final = "committed"
ABORTED: Final = "aborted"

# An entry that belongs to no transaction.
PLAIN: Final = -1


class Pin(NamedTuple):
    """Write op of a transaction in a segment. Equal value stands for equal version."""

    epoch: int
    bound: Position


NO_PIN: Final = Pin(0, NOWHERE)


class Ledger(NamedTuple):
    """Durable entries; nothing is appended once it is fenced."""

    # The epoch of its creator is its number, so positions of a later owner are always higher.
    number: int
    fenced: bool
    entries: tuple[int, ...]


class Work(NamedTuple):
    """The knowledge and work of one owner of a segment about one transaction."""

    stage: str = "idle"
    bound: Position = NOWHERE
    pin: Pin = NO_PIN
    # An append was submitted and is not durable yet.
    flying: bool = False
    # A first message waits for its pin.
    waiting: bool = False
    decision: str = UNKNOWN
    # The first half of reading a member's state: what the first of the two records said.
    peeked: str = UNKNOWN
    # The decision met this owner while it tracked nothing (ghost: it cannot act on it).
    told: bool = False
    # The pin outlived its header.
    late: bool = False


class Owner(NamedTuple):
    """An owner of a segment: its recovery, then its service."""

    # An owner whose epoch is below the segment's is a zombie; its ledger is 0 before recovery
    # has one, and after a seal.
    epoch: int
    ledger: int
    phase: str
    # Per transaction: is this phase of recovery still to be done?
    left: tuple[bool, ...]
    work: tuple[Work, ...]
    # Per transaction: last position of its aborted entries, as far as is known here.
    aborted: tuple[Position, ...]
    gate: bool
    # Dispatch: read up to here, and about to look again.
    seen: Position = NOWHERE
    awake: bool = False


class Segment(NamedTuple):
    """Durable records of a segment, and those who own or owned it."""

    epoch: int
    ledgers: tuple[Ledger, ...]
    sealed: bool
    pins: tuple[Pin, ...]
    aborted: tuple[Position, ...]
    owners: tuple[Owner, ...]


class AckOp(NamedTuple):
    """An ack intent: key (txn, epoch, number), value (incarnation, message)."""

    txn: int
    epoch: int
    number: int
    incarnation: int
    message: int


class Cursor(NamedTuple):
    """The durable cursor."""

    epoch: int
    # Counts seeks: an intent of an earlier one says nothing of this cursor.
    incarnation: int
    acked: tuple[int, ...]


class AckWork(NamedTuple):
    """The knowledge and work of one owner of a cursor about one transaction."""

    stage: str = "idle"
    pending: tuple[int, ...] = ()
    # Keys (epoch, number) of the ops that this owner knows.
    keys: tuple[tuple[int, int], ...] = ()
    # The ack whose command is not answered yet: number of its op, and message.
    asked: tuple[int, int] = (0, 0)
    command: str = "none"
    decision: str = UNKNOWN


class CursorOwner(NamedTuple):
    """An owner of a subscription: its recovery, then its service."""

    epoch: int
    phase: str
    left: tuple[bool, ...]
    incarnation: int
    acked: tuple[int, ...]
    work: tuple[AckWork, ...]
    # Snapshots of a cursor write in flight; empty: none is.
    flush: tuple[tuple[int, ...], ...]
    numbered: int


class Subscription(NamedTuple):
    """Durable records of a subscription, and those who own or owned it."""

    epoch: int
    cursor: Cursor
    ops: tuple[AckOp, ...]
    owners: tuple[CursorOwner, ...]


class Group(NamedTuple):
    """The group record."""

    # As the store has it, without what the model leaves out: generations, notes, retired runs.
    epoch: int
    sequence: int
    decided: tuple[int, ...]
    aborted: tuple[int, ...]


class Job(NamedTuple):
    """A coordinator's work on a group: what it wants, and what it has read."""

    kind: str
    txns: tuple[int, ...]
    epoch: int
    stage: str
    # Compared with the record when it writes: that is the compare-and-set.
    read: Group


class Budget(NamedTuple):
    """The faults and free choices that may still happen: what keeps a world finite."""

    loads: int = 0
    crashes: int = 0
    failures: int = 0
    plains: int = 0
    trims: int = 0
    seals: int = 0
    cursor_loads: int = 0
    cursor_crashes: int = 0
    seeks: int = 0
    opens: int = 0


class State(NamedTuple):
    """One state of the world."""

    headers: tuple[str, ...]
    # Ghost: the first outcome that the records told.
    outcomes: tuple[str, ...]
    # Per transaction: GC found no op left.
    collectable: tuple[bool, ...]
    # Per transaction and segment: messages that its client may still send.
    sends: tuple[tuple[int, ...], ...]
    # Per transaction: acks that its client may still ask for.
    acks: tuple[int, ...]
    # Per transaction: its client saw an error and will not commit.
    failed: tuple[bool, ...]
    # Ghost, per transaction: (incarnation, message) of intents that were ever durable.
    intents: tuple[tuple[tuple[int, int], ...], ...]
    # Ghost, per transaction: (incarnation, message) of acks answered with success.
    answered: tuple[tuple[tuple[int, int], ...], ...]
    segments: tuple[Segment, ...]
    subscription: Subscription
    group: Group
    jobs: tuple[Job, ...]
    # Per transaction: what a roll-forward has read and will copy to the header.
    copies: tuple[str, ...]
    budget: Budget


def put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """The tuple with one element changed."""
    return (*values[:index], value, *values[index + 1 :])


def with_segment(state: State, number: int, segment: Segment) -> State:
    return state._replace(segments=put(state.segments, number, segment))


def with_owner(state: State, number: int, at: int, owner: Owner) -> State:
    segment = state.segments[number]
    return with_segment(state, number, segment._replace(owners=put(segment.owners, at, owner)))


def without_owner(state: State, number: int, at: int) -> State:
    segment = state.segments[number]
    owners = (*segment.owners[:at], *segment.owners[at + 1 :])
    return with_segment(state, number, segment._replace(owners=owners))


def with_work(state: State, number: int, at: int, txn: int, work: Work) -> State:
    owner = state.segments[number].owners[at]
    return with_owner(state, number, at, owner._replace(work=put(owner.work, txn, work)))


def works(state: State) -> Iterator[tuple[int, int, int, Owner, Work]]:
    """Segment, place among its owners, transaction, owner, work."""
    for number, segment in enumerate(state.segments):
        for at, owner in enumerate(segment.owners):
            for txn, work in enumerate(owner.work):
                yield number, at, txn, owner, work


def ledger_of(segment: Segment, number: int) -> Ledger | None:
    return next((ledger for ledger in segment.ledgers if ledger.number == number), None)


def next_position(segment: Segment, owner: Owner) -> Position:
    ledger = ledger_of(segment, owner.ledger)
    # Without a ledger of its own (sealed, or still recovering) that is NOWHERE.
    return (owner.ledger, len(ledger.entries) if ledger else 0)


def entries(segment: Segment) -> Iterator[tuple[Position, int]]:
    """Position and transaction of every entry that is kept."""
    for ledger in segment.ledgers:
        for at, txn in enumerate(ledger.entries):
            yield (ledger.number, at), txn


def with_cursor_owner(state: State, at: int, owner: CursorOwner) -> State:
    subscription = state.subscription
    owners = put(subscription.owners, at, owner)
    return state._replace(subscription=subscription._replace(owners=owners))


def without_cursor_owner(state: State, at: int) -> State:
    """One owner stops; clients whose acks it had not answered see an error."""
    subscription = state.subscription
    failed = tuple(
        # Such a client never commits: that is the promise of clients on which
        # 'all or nothing' relies.
        failed or work.command != "none"
        for failed, work in zip(state.failed, subscription.owners[at].work, strict=True)
    )
    owners = (*subscription.owners[:at], *subscription.owners[at + 1 :])
    return state._replace(subscription=subscription._replace(owners=owners), failed=failed)


def with_ack_work(state: State, at: int, txn: int, work: AckWork) -> State:
    owner = state.subscription.owners[at]
    return with_cursor_owner(state, at, owner._replace(work=put(owner.work, txn, work)))


def ack_works(state: State) -> Iterator[tuple[int, int, CursorOwner, AckWork]]:
    """Place among the subscription's owners, transaction, owner, work."""
    for at, owner in enumerate(state.subscription.owners):
        for txn, work in enumerate(owner.work):
            yield at, txn, owner, work


def last_position(segment: Segment) -> Position:
    found = NOWHERE
    for ledger in segment.ledgers:
        if ledger.entries:
            found = (ledger.number, len(ledger.entries) - 1)
    return found
