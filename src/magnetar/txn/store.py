"""The records of transactions in the metadata store.

Owns: `TxnStore`: every read and write that coordinators and participants make.

Invariants:
1. What a method returned is durable. Nothing relies on two records at once.
2. Who finds records by an index gets those whose names are the ones asked for: index keys of long
   names are hashed, and records may have changed since the scan began.
3. An outcome that is unknown is settled by reading, within a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import NamedTuple, TypeVar

import msgspec

from magnetar.errors import BadVersion, InvalidTxnStatus, OutcomeUnknown
from magnetar.managed_ledger.names import encode_name
from magnetar.metadata.api import ABSENT, Index, MetadataStore, Record, Stat
from magnetar.metadata.recipes import Content, Fate, cas_settle
from magnetar.model.ids import Position
from magnetar.runtime.background import future_of
from magnetar.runtime.metrics import TXN_HEADER_CAS, TXN_INDEX_SECONDS, TXN_OP_WRITES
from magnetar.txn import transitions
from magnetar.txn.ids import to_text
from magnetar.txn.records import (
    ABORTED_BY_POSITION,
    ACKS_BY_SUBSCRIPTION,
    BY_DEADLINE,
    BY_END,
    BY_GROUP,
    OPS_BY_TXN,
    WRITES_BY_SEGMENT,
    Aborted,
    AckOp,
    Group,
    Header,
    OpKey,
    Pin,
    State,
    aborted_index,
    aborted_key,
    ack_key,
    decode,
    encode,
    group_key,
    header_indexes,
    header_key,
    key_of,
    number,
    pin_key,
    subscription_index,
)
from magnetar.wire.messages import TxnId

Body = TypeVar("Body", bound=msgspec.Struct)

_CAS_OK = TXN_HEADER_CAS.labels("ok")
_CAS_CONFLICT = TXN_HEADER_CAS.labels("conflict")
_CAS_REJECT = TXN_HEADER_CAS.labels("reject")


class StoredOp(NamedTuple):
    """An op record with its version: it is deleted only as it was seen."""

    key: str
    version: int


class FoundPin(NamedTuple):
    op: StoredOp
    pin: Pin


class FoundAck(NamedTuple):
    op: StoredOp
    ack: AckOp


class TxnStore:
    """All transactions of one metadata store."""

    def __init__(self, metadata: MetadataStore) -> None:
        self.metadata = metadata

    # --- headers

    def create(self, header: Header) -> Awaitable[Stat]:
        """Submitted when called; BadVersion if there is one of that id."""
        key = key_of(header)
        indexes = header_indexes(header)
        return self.metadata.put(key, encode(header), expected=ABSENT, indexes=indexes)

    def replace(self, header: Header, version: int) -> Awaitable[Stat]:
        """Put a header where this version of it is; submitted when called."""
        key, indexes = key_of(header), header_indexes(header)
        return self.metadata.put(key, encode(header), expected=version, indexes=indexes)

    def count_replaced(self, error: BaseException | None) -> None:
        """Count the outcome of a `replace`."""
        if error is None:
            _CAS_OK.inc()
        elif isinstance(error, BadVersion | OutcomeUnknown):
            _CAS_CONFLICT.inc()

    async def header(self, txn: TxnId) -> Header | None:
        return await self._get(header_key(txn), Header)

    async def state(self, txn: TxnId) -> State | None:
        """The state of a transaction; None: there is no header."""
        header = await self.header(txn)
        if header is None or header.is_final or header.group is None:
            return None if header is None else header.state
        # The group first, then the header once more: a member that was rolled forward in between
        # may be gone from the group's record.
        group = await self.group(header.group.application)
        again = await self.header(txn)
        return None if again is None else transitions.state_of(again, group)

    async def end(self, txn: TxnId, state: State, now_ms: int, by: str = "") -> Header | None:
        """Decide a transaction that is alone, or copy a group's decision; None: no header."""

        # Called again for each lost race, so that a decision that came between is seen as final.
        def ended(header: Header | None) -> Header | None:
            return None if header is None else transitions.ended(header, state, now_ms, by)

        return await self.change(header_key(txn), Header, ended, header_indexes)

    def due(self, now_ms: int) -> AsyncIterator[Header]:
        """Open transactions whose deadline has passed."""
        return self._found(BY_DEADLINE, "", number(now_ms), Header)

    def members(self, application: str) -> AsyncIterator[Header]:
        """Open transactions of a group."""
        name = encode_name(application)
        return self._found(BY_GROUP, name, name, Header)

    def finished(self, before_ms: int) -> AsyncIterator[Header]:
        """Transactions that ended before a time."""
        return self._found(BY_END, "", number(before_ms), Header)

    # --- groups

    async def group(self, application: str) -> Group | None:
        found = await self._get(group_key(application), Group)
        return found if found is not None and found.application == application else None

    async def change_group(
        self, application: str, change: Callable[[Group | None], Group | None]
    ) -> Group | None:
        """Compare-and-set of the group's record: the decision on its members."""
        return await self.change(group_key(application), Group, change)

    # --- pins

    async def pin(self, txn: TxnId, segment: str) -> FoundPin | None:
        key = pin_key(txn, segment).key
        record = await self.metadata.get(key)
        return None if record is None else FoundPin(_op(record), decode(record, Pin))

    async def pins(self, segment: str) -> list[FoundPin]:
        """All pins of a segment."""
        name = encode_name(segment)
        found = [
            FoundPin(_op(record), decode(record, Pin))
            async for record in self._records(WRITES_BY_SEGMENT, name, name)
        ]
        # Invariant 2: index keys of long names are hashes, so another
        # segment's pins may be among them.
        return [each for each in found if each.pin.segment == segment]

    # --- acknowledgements

    def write_ack(self, txn: TxnId, epoch: int, serial: int, ack: AckOp) -> Awaitable[StoredOp]:
        """What a transaction acknowledges, durably."""
        return self._put_op(ack_key(txn, ack.segment, ack.subscription, epoch, serial), ack)

    def submit_ack(self, txn: TxnId, epoch: int, serial: int, ack: AckOp) -> asyncio.Future[Stat]:
        """Write what a transaction acknowledges; of an unknown outcome `settle_ack` is asked."""
        key, indexes = ack_key(txn, ack.segment, ack.subscription, epoch, serial)
        return future_of(self.metadata.put(key, encode(ack), indexes=indexes))

    async def settle_ack(self, txn: TxnId, epoch: int, serial: int, ack: AckOp) -> StoredOp | None:
        """The record that was submitted so, if it is there."""
        target = ack_key(txn, ack.segment, ack.subscription, epoch, serial)
        return await self._settle(target, encode(ack))

    async def acks(self, segment: str, subscription: str) -> list[FoundAck]:
        """All that undecided or unmerged transactions acknowledge on a subscription."""
        pair = subscription_index(segment, subscription)
        found = [
            FoundAck(_op(record), decode(record, AckOp))
            async for record in self._records(ACKS_BY_SUBSCRIPTION, pair, pair)
        ]
        return [
            each
            for each in found
            if each.ack.segment == segment and each.ack.subscription == subscription
        ]

    # --- ops of either kind

    async def ops(self, txn: TxnId) -> list[Record]:
        """All op records of a transaction."""
        name = to_text(txn)
        return [record async for record in self._records(OPS_BY_TXN, name, name)]

    async def delete_ops(self, ops: Iterable[StoredOp]) -> None:
        """Each only as it was seen; one that is gone, or another's by now, stays as it is."""
        # Conditional on the version ('GC never forces'): a pin that a new owner has adopted
        # meanwhile, or a record that it wrote anew, has another version and survives.
        await self.metadata.delete_seen(ops)

    # --- aborted

    async def write_aborted(
        self, txn: TxnId, segment: str, last: Position, *, first: Position | None = None
    ) -> None:
        """The higher of two last positions stays; no entry is below `first`."""

        def merged(present: Aborted | None) -> Aborted:
            # Two owners may each write the abort of one transaction, with the end that each of them
            # saw; the lower one would show entries of the other ('aborted stays known').
            if present is not None and present.last >= last:
                return present
            return Aborted(to_text(txn), segment, *last, first=first)

        key = aborted_key(segment, txn)
        await self.change(key, Aborted, merged, lambda each: (aborted_index(segment, each.last),))

    async def aborted(self, segment: str) -> list[Aborted]:
        """All aborted records of a segment."""
        name = encode_name(segment)
        low, high = f"{name}:", f"{name};"  # the character behind ":"
        found = [each async for each in self._found(ABORTED_BY_POSITION, low, high, Aborted)]
        return [each for each in found if each.segment == segment]

    async def aborted_record(self, txn: TxnId, segment: str) -> Aborted | None:
        return await self._get(aborted_key(segment, txn), Aborted)

    async def forget_aborted(self, segment: str, txns: Iterable[TxnId]) -> None:
        await asyncio.gather(*(self.metadata.delete(aborted_key(segment, txn)) for txn in txns))

    # --- parts

    async def _put_op(self, target: OpKey, body: msgspec.Struct) -> StoredOp:
        value = encode(body)
        try:
            stat = await self.metadata.put(target.key, value, indexes=target.indexes)
        except OutcomeUnknown:
            found = await self._settle(target, value)
            if found is None:
                raise
            return found
        TXN_OP_WRITES.inc()
        return StoredOp(target.key, stat.version)

    async def _settle(self, target: OpKey, value: bytes) -> StoredOp | None:
        # The key is this owner's alone (epoch and serial), so the same value there is this put.
        found = await self.metadata.get(target.key)
        if found is None or found.value != value:
            return None
        TXN_OP_WRITES.inc()
        return _op(found)

    async def _get(self, key: str, kind: type[Body]) -> Body | None:
        record = await self.metadata.get(key)
        return None if record is None else decode(record, kind)

    async def change(
        self,
        key: str,
        kind: type[Body],
        change: Callable[[Body | None], Body | None],
        indexes: Callable[[Body], tuple[Index, ...]] = lambda _: (),
    ) -> Body | None:
        """Put what `change` makes of a record until nobody came between; None: leave it."""
        after: Body | None = None
        attempts = lost = 0

        def fate(record: Record | None) -> Content | Fate:
            nonlocal after, attempts, lost
            # Called again: the attempt before lost its race. The last one was
            # stored if no call follows.
            lost = attempts
            before = None if record is None else decode(record, kind)
            after = change(before)
            # What is wanted stands there already, as after a repeated END_TXN: no second write.
            if after is None or after == before:
                return Fate.KEPT
            attempts += 1
            return Content(encode(after), indexes(after))

        try:
            await cas_settle(self.metadata, key, fate)
        except BaseException as error:
            lost = attempts
            # Decided otherwise before: nothing was put, and that is what the caller is told.
            if kind is Header and isinstance(error, InvalidTxnStatus):
                _CAS_REJECT.inc()
            raise
        finally:
            if kind is Header and attempts:
                _CAS_OK.inc(attempts - lost)
                _CAS_CONFLICT.inc(lost)
        return after

    async def _found(
        self, index: str, low: str, high: str, kind: type[Body]
    ) -> AsyncIterator[Body]:
        async for record in self._records(index, low, high):
            yield decode(record, kind)

    async def _records(self, index: str, low: str, high: str) -> AsyncIterator[Record]:
        now = asyncio.get_running_loop().time
        spent = 0.0  # by the store, not by who asks
        async with aclosing(self.metadata.scan_index(index, low, high)) as records:
            while True:
                began = now()
                record = await anext(records, None)
                spent += now() - began
                if record is None:
                    break
                yield record
        TXN_INDEX_SECONDS.observe(spent)


def _op(record: Record) -> StoredOp:
    return StoredOp(record.key, record.version)
