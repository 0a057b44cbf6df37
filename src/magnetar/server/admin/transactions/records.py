"""Transactions as their records, or their coordinators, tell of them, for the admin interface.

Owns: what requests about them ask for; the readings (open transactions, the op records of one, its
aborted records) and their JSON.

Invariants:
1. A look changes nothing and waits for nothing but the metadata store, or for a log that is just
   being opened. Of legacy transactions a broker knows those that it coordinates.
2. Whatever is read is bounded; an answer that is not complete says so (`truncated`).
3. A topic is named only to who may list it.
4. Members that Java's tools know have their meaning there; what we add stands beside them. Their
   `timeoutAt` is how long a transaction may take, not when it must be over: that is `deadline`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from aiohttp import web

from magnetar.errors import InvalidArgument, RequestError, ServiceNotReady, TransactionNotFound
from magnetar.metadata.api import Record
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.server.admin.exchange import AdminServer, part_of, server_of, whole_number
from magnetar.server.authority import ANYBODY, Action
from magnetar.txn import transitions
from magnetar.txn.coordinator.coordinators import Coordinators
from magnetar.txn.coordinator_partitions import PARTITIONS
from magnetar.txn.ids import from_text, is_metadata, to_text
from magnetar.txn.legacy.coordinator_entries import LegacyState
from magnetar.txn.legacy.coordinator_state import OUTCOMES, LegacyTransaction, header_of
from magnetar.txn.records import (
    ABORTED_RECORDS,
    BY_DEADLINE,
    NEVER,
    OPS,
    OPS_BY_TXN,
    Aborted,
    AckedEntry,
    AckOp,
    Group,
    Header,
    Pin,
    decode,
)
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId

Json = dict[str, Any]

SCANNED_MAX: Final = 20_000
"""Records that one request looks at to find those that it shows."""

OPS_MAX: Final = 1000
"""Op records of one transaction that its story shows; a list shows what the first few say."""

OPS_IN_LIST_MAX: Final = 50

NAMES_MAX: Final = 20
"""Producers, and consumers, of the client of one transaction that are named."""


# A page that a person reads; scripts may ask for ten times as much.
LIMIT: Final = 100
LIMIT_MAX: Final = 1000


# --- what requests ask for


def coordinators_of(request: web.Request) -> Coordinators:
    context = server_of(request).context
    if not context.has_transactions:
        raise ServiceNotReady("transactions are not enabled on this server")
    return context.coordinators


def txn_of(request: web.Request) -> TxnId:
    # Two numbers in the path, as Java's tools write an id.
    return from_text(f"{part_of(request, 'most')}_{part_of(request, 'least')}")


def operator_text(request: web.Request) -> str:
    """The operator who asks, as it is kept with a decision."""
    return f"{transitions.BY_OPERATOR} {request.remote or ''}".rstrip()


def limit_of(request: web.Request) -> int:
    limit = whole_number(request.query.get("limit", str(LIMIT)), "the limit", least=1)
    if limit > LIMIT_MAX:
        raise InvalidArgument(f"the limit must be at most {LIMIT_MAX}, not {limit}")
    return limit


# --- records


class Dated(NamedTuple):
    """A record's times, with the record."""

    created_ms: int
    changed_ms: int
    """The same, unless it was put again."""


def dated(record: Record) -> Dated:
    return Dated(record.stat.created_ms, record.stat.modified_ms)


@dataclass(slots=True)
class Ops:
    """The operations of a transaction, as far as its op records still say."""

    pins: list[tuple[Dated, Pin]] = field(default_factory=list)
    acks: list[tuple[Dated, AckOp]] = field(default_factory=list)
    truncated: bool = False
    added_topics: list[str] = field(default_factory=list)
    """Of a legacy transaction, which has no op records: what its coordinator knows."""
    added_subscriptions: list[tuple[str, str]] = field(default_factory=list)

    @property
    def segments(self) -> list[str]:
        return sorted({pin.segment for _, pin in self.pins} | set(self.added_topics))

    @property
    def subscriptions(self) -> list[tuple[str, str]]:
        acked = {(ack.segment, ack.subscription) for _, ack in self.acks}
        return sorted(acked | set(self.added_subscriptions))


class Found(NamedTuple):
    """A transaction and its state, which for a member of a group its group knows."""

    header: Header
    state: LegacyState


class OpenOnes(NamedTuple):
    """Open transactions, and legacy ones that are ending, oldest first."""

    found: list[Found]
    total: int
    """Of those that were asked for, as far as was looked."""
    truncated: bool


class TransactionRecords:
    """The readings of one request."""

    def __init__(self, server: AdminServer) -> None:
        self._metadata = server.metadata
        self._store = TxnStore(server.metadata)
        self._authority = server.context.authority
        self._context = server.context

    # Asked per topic: a transaction may touch some that the reader may list, and some not.
    def may_list(self, topic: str) -> bool:
        try:
            self._authority.authorise(ANYBODY, Action.LIST, TopicName.parse(topic))
        except RequestError:
            return False
        return True

    # --- headers

    async def header(self, txn: TxnId) -> Found:
        # A legacy id: no record, only the log of its coordinator knows it.
        if not is_metadata(txn):
            known = await self.legacy(txn)
            return Found(header_of(txn, known), known.state)
        # Two readings: of a member of a group, the group's record has the state.
        state = await self._store.state(txn)
        header = await self._store.header(txn)
        if header is None or state is None:
            raise _unknown(txn)
        return Found(header, state)

    async def find(self, txn: TxnId) -> Found | None:
        """None: there is none, or another broker coordinates it."""
        try:
            return await self.header(txn)
        except (TransactionNotFound, ServiceNotReady):
            return None

    async def legacy(self, txn: TxnId) -> LegacyTransaction:
        """A legacy transaction, which its coordinator alone knows."""
        check_here(self._context.coordinators, txn)
        known = await self._context.coordinators.legacy.find(txn)
        if known is None:
            raise _unknown(txn)
        return known

    async def group(self, application: str) -> Group | None:
        return await self._store.group(application)

    async def open_ones(self, limit: int, wanted: Callable[[Header], bool]) -> OpenOnes:
        """The oldest of those that are wanted."""
        headers, complete = await self._scan_open(wanted)
        found = [Found(header, "OPEN") for header in headers]
        found += [each for each in self._legacy_live() if wanted(each.header)]
        # Oldest first, with the id to break ties, so that a repeated request gives the same order.
        found.sort(key=lambda each: (each.header.created_ms, each.header.txn))
        return OpenOnes(found[:limit], len(found), not complete or len(found) > limit)

    def _legacy_live(self) -> Iterator[Found]:
        """Live legacy transactions of the coordinators that are led here."""
        for own in self._context.coordinators.legacy.here():
            for known in own.live():
                yield Found(header_of(TxnId(own.partition, known.number), known), known.state)

    async def open_counts(self) -> Counter[int]:
        """How many are open by coordinator, wherever those are led."""
        found, _ = await self._scan_open(lambda _: True)
        return Counter(each.id.most for each in found)

    async def _scan_open(self, wanted: Callable[[Header], bool]) -> tuple[list[Header], bool]:
        """Open transactions that are wanted, and whether all were looked at."""
        found: list[Header] = []
        groups: dict[str, Group | None] = {}
        scanned = 0
        # The index of headers that are not final: open ones, and members whose group may have
        # decided.
        async with aclosing(self._metadata.scan_index(BY_DEADLINE)) as records:
            async for record in records:
                scanned += 1
                if scanned > SCANNED_MAX:
                    return found, False
                header = decode(record, Header)
                if wanted(header) and await self._is_open(header, groups):
                    found.append(header)
        return found, True

    # A member of a group is decided by its group: each group is read once per request.
    async def _is_open(self, header: Header, groups: dict[str, Group | None]) -> bool:
        if header.group is None:
            return not header.is_final
        application = header.group.application
        if application not in groups:
            groups[application] = await self._store.group(application)
        return transitions.state_of(header, groups[application]) == "OPEN"

    # --- who they are

    def clients(self, header: Header, ops: Ops) -> Json:
        """Name the producers and consumers of its client on the topics where it takes part."""
        # By the connection that began it: looked up now, among those of topics that are loaded
        # here; of one that is gone nothing is left to name.
        address = header.client.partition(" ")[0]
        names: dict[str, set[str]] = {"producers": set(), "consumers": set()}
        touched = [*ops.segments, *(segment for segment, _ in ops.subscriptions)]
        for segment in dict.fromkeys(touched) if address else ():
            topic = self._context.topics.loaded.get(TopicName.parse(segment))
            if topic is None:
                continue
            connected = topic.producers.connected
            names["producers"] |= {
                name for name, each in connected.items() if each.options.address == address
            }
            for subscription in topic.subscriptions.values():
                mine = [each for each in subscription.consumers if each.options.address == address]
                names["consumers"] |= {f"{subscription.name} {each.name}" for each in mine}
            if max(map(len, names.values())) > NAMES_MAX:
                break
        return {kind: sorted(found)[:NAMES_MAX] for kind, found in names.items()}

    # --- what they did

    async def ops(self, txn: TxnId, limit: int = OPS_MAX) -> Ops:
        """The op records of a transaction on topics that may be listed."""
        await asyncio.sleep(0)  # many of these may need no waiting at all: others come between
        found = Ops()
        if not is_metadata(txn):
            await self._add_legacy(found, txn, limit)
            return found
        name = to_text(txn)
        seen = 0
        async with aclosing(self._metadata.scan_index(OPS_BY_TXN, name, name)) as records:
            async for record in records:
                # Bounded before anything is decoded (invariant 2).
                seen += 1
                if seen > limit:
                    found.truncated = True
                    break
                self._add(found, record)
                # A record of many acknowledgements takes milliseconds: others come between two.
                await asyncio.sleep(0)
        return found

    def _add(self, found: Ops, record: Record) -> None:
        # The kind stands in the key: a pin and an ack have different bodies.
        if is_pin(record):
            pin = decode(record, Pin)
            if self.may_list(pin.segment):
                found.pins.append((dated(record), pin))
        else:
            ack = decode(record, AckOp)
            if self.may_list(ack.segment):
                found.acks.append((dated(record), ack))

    async def _add_legacy(self, found: Ops, txn: TxnId, limit: int) -> None:
        known = await self.legacy(txn)
        places = [(each.topic, each.subscription) for each in known.subscriptions]
        found.added_topics = [each for each in known.topics if self.may_list(each)][:limit]
        found.added_subscriptions = [each for each in places if self.may_list(each[0])][:limit]
        found.truncated = max(len(known.topics), len(places)) > limit

    async def touched(self, txn: TxnId) -> set[str]:
        # For the right to abort, all topics count: those that the reader may not list, too.
        """All topics where it takes part, whoever may list them."""
        if not is_metadata(txn):
            known = await self.legacy(txn)
            return {*known.topics, *(each.topic for each in known.subscriptions)}
        found: set[str] = set()
        name = to_text(txn)
        async with aclosing(self._metadata.scan_index(OPS_BY_TXN, name, name)) as records:
            async for record in records:
                op = decode(record, Pin) if is_pin(record) else decode(record, AckOp)
                found.add(op.segment)
        return found

    async def aborted(self, txn: TxnId) -> tuple[list[tuple[Dated, Aborted]], bool]:
        """The aborted records of a transaction, and whether there may be more. None is indexed."""
        found: list[tuple[Dated, Aborted]] = []
        ending = f":{to_text(txn)}"
        scanned = 0
        records = self._metadata.scan(ABORTED_RECORDS, limit=SCANNED_MAX + 1)
        async with aclosing(records) as each_record:
            async for record in each_record:
                scanned += 1
                # By the end of the key, without decoding: most records are of other transactions.
                if record.key.endswith(ending):
                    aborted = decode(record, Aborted)
                    if self.may_list(aborted.segment):
                        found.append((dated(record), aborted))
        return found, scanned > SCANNED_MAX


def check_here(own: Coordinators, txn: TxnId) -> None:
    """Raise unless this broker coordinates a transaction."""
    if not own.partitions.leads(txn.most):
        # The upper half of an id names its coordinator.
        url = own.partitions.assignments()[txn.most % PARTITIONS].url
        raise ServiceNotReady(
            f"coordinator {txn.most} is {f'at {url}' if url else 'nowhere now'}",
            hint="ask the admin interface of that broker" if url else "",
        )


def _unknown(txn: TxnId) -> TransactionNotFound:
    return TransactionNotFound(
        f"there is no transaction {to_text(txn)}",
        hint="it never was, or ended more than txn_retention_seconds ago",
    )


def is_pin(record: Record) -> bool:
    """Whether an op record is a pin; else it is an acknowledgement."""
    # <txn>-w-... or <txn>-a-...: see `txn/records.py`.
    return record.key[len(OPS) + 1 :].split("-", 2)[1] == "w"


# --- JSON


def java_id(txn: TxnId) -> str:
    """The id as Java prints it."""
    return f"({txn.most},{txn.least})"


def header_json(header: Header, state: LegacyState, now_ms: int) -> Json:
    """What the header of a transaction says."""
    member = header.group
    return {
        "txnId": java_id(header.id),
        "id": header.txn,
        "status": state,
        "kind": "metadata" if is_metadata(header.id) else "markers",
        "openTimestamp": header.created_ms,
        # As in Java: how long it may take, not until when (invariant 4).
        "timeoutAt": header.deadline_ms - header.created_ms,
        "owner": header.owner or None,
        "client": client_json(header.client),
        "decidedBy": header.decided_by or None,
        "coordinator": header.id.most,
        "deadline": header.deadline_ms,
        "ended": None if header.finalized_ms == NEVER else header.finalized_ms,
        "ageMs": max(now_ms - header.created_ms, 0),
        "group": None
        if member is None
        else {
            "application": member.application,
            "epoch": member.epoch,
            "sequence": member.sequence,
        },
    }


def client_json(text: str) -> Json | None:
    """The client that began a transaction; None: in a record from before it was kept."""
    address, _, version = text.partition(" ")
    return {"address": address, "version": version or None} if text else None


def summary_json(found: Found, ops: Ops, now_ms: int) -> Json:
    """An open transaction in a list."""
    return header_json(*found, now_ms) | {
        "segments": ops.segments,
        "subscriptions": [f"{segment} {name}" for segment, name in ops.subscriptions],
        "truncated": ops.truncated,
    }


def participants_json(ops: Ops, aborted: Iterable[Aborted] = ()) -> Json:
    # Later ones replace earlier ones: a pin knows from where on, an aborted record does not.
    """Where a transaction writes and acknowledges, as Java's tools read it."""
    hidden = {each.segment for each in aborted}
    produced: Json = {segment: in_buffer_json(None, aborted=True) for segment in sorted(hidden)}
    for topic in ops.added_topics:
        produced[topic] = in_buffer_json(None, aborted=topic in hidden)
    for _, pin in ops.pins:
        produced[pin.segment] = in_buffer_json(pin.bound, aborted=pin.segment in hidden)
    acked: Json = {}
    for segment, subscription in ops.subscriptions:
        mine = [
            ack for _, ack in ops.acks if (ack.segment, ack.subscription) == (segment, subscription)
        ]
        acked.setdefault(segment, {})[subscription] = in_pending_acks_json(mine)
    return {"producedPartitions": produced, "ackedPartitions": acked}


def in_buffer_json(first: Position | None, *, aborted: bool) -> Json:
    return {"startPosition": None if first is None else str(first), "aborted": aborted}


def in_pending_acks_json(acks: Iterable[AckOp]) -> Json:
    through = [each for ack in acks if ack.cumulative for each in ack.entries]
    last = max(through, key=lambda each: each.position, default=None)
    return {"cumulativeAckPosition": None if last is None else _through_text(last)}


def _through_text(entry: AckedEntry) -> str:
    """The position, with the last message of the batch if not all of it is acknowledged."""
    left = entry.unacked_bits
    if not left:
        return str(entry.position)
    # The lowest bit that is left is the first message not acknowledged; the one before it is shown.
    return f"{entry.position}:{(left & -left).bit_length() - 2}"


def pin_json(dates: Dated, pin: Pin) -> Json:
    return {
        "txnId": pin.txn,
        "segment": pin.segment,
        "from": str(pin.bound),
        "ownerEpoch": pin.epoch,
        "written": dates.created_ms,
        "changed": dates.changed_ms,
    }


async def acks_json(acks: Iterable[tuple[Dated, AckOp]]) -> list[Json]:
    """Records of acknowledgements; each may have very many entries, and is a turn of its own."""
    found = []
    for each in acks:
        found.append(ack_json(*each))
        await asyncio.sleep(0)
    return found


def ack_json(dates: Dated, ack: AckOp) -> Json:
    first = min(((each.ledger_id, each.entry_id) for each in ack.entries), default=None)
    last = max(((each.ledger_id, each.entry_id) for each in ack.entries), default=None)
    return {
        "txnId": ack.txn,
        "segment": ack.segment,
        "subscription": ack.subscription,
        "cumulative": ack.cumulative,
        "entries": len(ack.entries),
        "first": None if first is None else str(Position(*first)),
        "last": None if last is None else str(Position(*last)),
        "written": dates.created_ms,
    }


def aborted_json(dates: Dated, aborted: Aborted) -> Json:
    return {
        "txnId": aborted.txn,
        "segment": aborted.segment,
        "last": str(aborted.last),
        "written": dates.created_ms,
    }


def group_json(group: Group) -> Json:
    return {
        "application": group.application,
        "epoch": group.epoch,
        "generation": group.generation,
        "run": group.run,
        "committedSequence": group.sequence,
        "changed": group.changed_ms,
        "owner": group.owner or None,
    }


def timeline(
    header: Header, state: LegacyState, ops: Ops, aborted: Iterable[tuple[Dated, Aborted]]
) -> list[Json]:
    """What happened when, as far as records of it are left."""
    events = [(header.created_ms, _begun_text(header.owner, header.client))]
    for dates, pin in ops.pins:
        events.append((dates.created_ms, f"may write to {pin.segment}, from {pin.bound} on"))
        # Put again by a later owner of the segment, with its epoch.
        if dates.changed_ms > dates.created_ms:
            events.append((dates.changed_ms, f"{pin.segment} has owner epoch {pin.epoch}"))
    for dates, ack in ops.acks:
        what = "everything up to an entry" if ack.cumulative else _entries(len(ack.entries))
        events.append(
            (dates.created_ms, f"acknowledged {what} of {ack.segment} {ack.subscription}")
        )
    # Ended, or what will become of it. Ends of legacy transactions come from their log.
    if header.finalized_ms != NEVER:
        events.append((header.finalized_ms, state.lower() + _by_text(header.decided_by)))
    elif state == "OPEN":
        events.append((header.deadline_ms, "is aborted unless it is ended before"))
    for dates, each in aborted:
        events.append((dates.created_ms, f"hidden in {each.segment} up to {each.last}"))
    events.sort(key=lambda event: event[0])
    return [{"ms": ms, "event": event} for ms, event in events]


def legacy_timeline(known: LegacyTransaction) -> list[Json]:
    """The timeline of a legacy transaction; its log does not date added participants."""
    events = [(known.start_ms, _begun_text(known.owner, known.client))]
    if known.is_open:
        events.append((known.deadline_ms, "is aborted unless it is ended before"))
    else:
        by = _by_text(known.decided_by)
        events.append((known.decided_ms, f"to be {OUTCOMES[known.state].lower()}: decided{by}"))
    if known.is_finished:
        events.append((known.ended_ms, f"{known.state.lower()} everywhere"))
    return [{"ms": ms, "event": event} for ms, event in events]


def _begun_text(owner: str, client: str) -> str:
    who = owner or ("" if client else "nobody that was identified")
    return f"begun by {' at '.join(filter(None, (who, client)))}"


def _by_text(by: str) -> str:
    return f" by {by}" if by else ""


def _entries(count: int) -> str:
    return "an entry" if count == 1 else f"{count} entries"
