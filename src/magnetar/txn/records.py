"""The records of metadata-driven transactions (pure).

Owns: what is stored of a transaction, under which key, and by which indexes it is found.

| record | key | found by |
|---|---|---|
| header | `/txn/id/<txn>` | open ones by deadline, members by group, final ones by time |
| pin | `/txn/op/<txn>-w-<segment>` | segment; transaction |
| ack | `/txn/op/<txn>-a-<segment>:<subscription>-<epoch>-<number>` | that pair; transaction |
| aborted | `/txn/aborted/<segment>:<txn>` | segment and position |
| group | `/txn/group/<application>` | |

Invariants:
1. Keys are named, never drawn from a sequence: a repeated put is the same put, and a late delete
   cannot hit another's record.
2. Names are hashed where they are long, so a record holds the names that its key stands for; who
   finds a record by an index compares them (two names may share an index key, never a record).
3. A transaction has one pin per segment, whatever it publishes there; acknowledgements of one
   command share one record.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from magnetar.errors import CorruptMetadata
from magnetar.managed_ledger.names import encode_name
from magnetar.metadata.api import Index, Record
from magnetar.model.ids import Position
from magnetar.txn.ids import from_text, to_text
from magnetar.wire.messages import TxnId

HEADERS: Final = "/txn/id"
OPS: Final = "/txn/op"
ABORTED_RECORDS: Final = "/txn/aborted"
GROUPS: Final = "/txn/group"

# Each index is what one kind of reader scans: timeouts, the roll-forward of a group, GC, the
# recovery of a segment and of a subscription, operators who look at one transaction, and again
# the recovery of a segment.
BY_DEADLINE: Final = "txn-deadline"
BY_GROUP: Final = "txn-group"
BY_END: Final = "txn-end"
WRITES_BY_SEGMENT: Final = "txn-writes"
ACKS_BY_SUBSCRIPTION: Final = "txn-acks"
OPS_BY_TXN: Final = "txn-ops"
ABORTED_BY_POSITION: Final = "txn-aborted"

NEVER: Final = -1

# There is no COMMITTING or ABORTING, as Pulsar's coordinator has: the compare-and-set is the
# decision ('one decision'), and what follows is the participants' own.
State: TypeAlias = Literal["OPEN", "COMMITTED", "ABORTED"]
Body = TypeVar("Body", bound=msgspec.Struct)


class GroupMembership(msgspec.Struct, frozen=True, rename="camel"):
    """A transaction of a group: one attempt to write one part of one sequence."""

    application: str
    epoch: int
    sequence: int


class Header(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel", gc=False):
    """A transaction. Of a member of a group, the group's record goes before an OPEN here."""

    txn: str
    created_ms: int
    deadline_ms: int
    state: State = "OPEN"
    finalized_ms: int = NEVER
    owner: str = ""
    """Who began it; empty: nobody was identified."""
    group: GroupMembership | None = None
    client: str = ""
    """The address and the version of who began it; for people, no rule looks at it."""
    decided_by: str = ""
    """Who or what decided it (`transitions`); empty: a record from before this was kept."""

    @property
    def id(self) -> TxnId:
        return from_text(self.txn)

    @property
    def is_final(self) -> bool:
        return self.state != "OPEN"


class Pin(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """A transaction writes to a segment, at or above `bound`."""

    txn: str
    segment: str
    # The lower bound, not the position of an entry: what was appended after it may be the
    # transaction's, so nothing there is shown ('gate') or trimmed.
    ledger_id: int
    entry_id: int
    epoch: int
    """Of the owner that wrote or adopted it."""

    @property
    def bound(self) -> Position:
        return Position(self.ledger_id, self.entry_id)


class AckedEntry(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """An entry that a transaction acknowledges, or messages of its batch."""

    ledger_id: int
    entry_id: int
    # Left-out messages, not acknowledged ones: an entry that is acknowledged whole, the usual
    # case, needs no bits at all.
    unacked: str = ""
    """Hexadecimal, set bits: messages of the batch that it does not acknowledge; "": none."""

    @property
    def position(self) -> Position:
        return Position(self.ledger_id, self.entry_id)

    @property
    def unacked_bits(self) -> int:
        return int(self.unacked, 16) if self.unacked else 0


class AckOp(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The acknowledgements of one command of a transaction: an intent until it is decided."""

    txn: str
    segment: str
    subscription: str
    incarnation: int
    """Of the cursor: acknowledgements from before a seek do not count after it."""
    entries: tuple[AckedEntry, ...]
    cumulative: bool = False


class Aborted(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Entries of a transaction in a segment, up to this position, are not for consumers."""

    txn: str
    segment: str
    # The segment's end when the abort was carried out, at or above its last entry: an append in
    # flight then is covered, too ('fence').
    ledger_id: int
    entry_id: int
    first: tuple[int, int] | None = None
    """None of them stands below; None: a record from before this was kept."""

    @property
    def last(self) -> Position:
        return Position(self.ledger_id, self.entry_id)


class Retired(msgspec.Struct, frozen=True, array_like=True):
    """A generation, or one run of it, that must not come back."""

    generation: str
    run: str


class Group(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The decisions of one distributed writer."""

    application: str
    epoch: int
    generation: str
    run: str
    sequence: int = NEVER
    """The last one that this generation committed."""
    past: int = NEVER
    """The highest one that an earlier generation committed."""
    # Only of the last sequence, so that the record stays small: earlier ones stand in headers.
    decided: tuple[str, ...] = ()
    """The transactions of the commit that was the last."""
    note: str = ""
    """What the writer noted with it."""
    aborted: tuple[str, ...] = ()
    """Members with a later sequence that were aborted one by one."""
    retired: tuple[Retired, ...] = ()
    changed_ms: int = 0
    owner: str = ""


# --- keys and indexes


class OpKey(NamedTuple):
    """The key of an op record, and what it is found by."""

    key: str
    indexes: tuple[Index, ...]


def header_key(txn: TxnId) -> str:
    return f"{HEADERS}/{to_text(txn)}"


def key_of(header: Header) -> str:
    return f"{HEADERS}/{header.txn}"


def header_indexes(header: Header) -> tuple[Index, ...]:
    if header.is_final:
        # A final header leaves the deadline and group indexes with the same put that decides it:
        # timeouts and roll-forward never see it again, GC does.
        return (Index(BY_END, number(header.finalized_ms)),)
    deadline = Index(BY_DEADLINE, number(header.deadline_ms))
    if header.group is None:
        return (deadline,)
    return deadline, Index(BY_GROUP, encode_name(header.group.application))


def pin_key(txn: TxnId, segment: str) -> OpKey:
    name, encoded = to_text(txn), _encoded(segment)
    # By segment for recovery, which must find every pin of one segment; by transaction for
    # operators, who ask what one of them still holds.
    indexes = (Index(WRITES_BY_SEGMENT, encoded), Index(OPS_BY_TXN, name))
    return OpKey(f"{OPS}/{name}-w-{encoded}", indexes)


def ack_key(txn: TxnId, segment: str, subscription: str, epoch: int, serial: int) -> OpKey:
    name, pair = to_text(txn), subscription_index(segment, subscription)
    indexes = (Index(ACKS_BY_SUBSCRIPTION, pair), Index(OPS_BY_TXN, name))
    # Epoch and serial make the key unique: a repeated put of one owner is the same put, and two
    # owners never write the same record.
    return OpKey(f"{OPS}/{name}-a-{pair}-{epoch}-{serial}", indexes)


def subscription_index(segment: str, subscription: str) -> str:
    """Encode a segment and a subscription, which may both be long, as one part of an index key."""
    # Two pairs that meet in one index key do no harm: who finds records compares
    # both names (invariant 2).
    return _encoded(f"{segment}\n{subscription}")


# Asked for with each transaction, of the same few topics.
_encoded: Final = lru_cache(maxsize=8192)(encode_name)


def aborted_key(segment: str, txn: TxnId) -> str:
    return f"{ABORTED_RECORDS}/{encode_name(segment)}:{to_text(txn)}"


def aborted_index(segment: str, last: Position) -> Index:
    name = encode_name(segment)
    # Sorted by position behind the segment's name: one scan finds all records of a segment, in the
    # order in which trim makes them needless.
    return Index(ABORTED_BY_POSITION, f"{name}:{number(last.ledger_id)}:{number(last.entry_id)}")


def group_key(application: str) -> str:
    return f"{GROUPS}/{encode_name(application)}"


def number(value: int) -> str:
    """Sorted as text like the number."""
    # 20 digits hold every 64-bit number; NEVER (-1) sorts as 0.
    return f"{max(value, 0):020d}"


# --- forms

_encode: Final = msgspec.json.Encoder().encode


def encode(body: msgspec.Struct) -> bytes:
    return _encode(body)


def decode(record: Record, kind: type[Body]) -> Body:
    return decode_value(record.key, record.value, kind)


def decode_value(key: str, value: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptMetadata(f"{key}: {error}") from error
