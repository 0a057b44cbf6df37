"""The rules of transactions, each with a patch that takes it away and what then breaks.

`MUTATIONS` is the only place that knows where rules are; the product has no switch for them. Where
few seeds would see the harm, something that always may take long takes long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import pytest

from harness.simulation.txn.expiry import STAY_GONE
from harness.simulation.txn.run import Course
from harness.simulation.txn.truth import place_of
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.subscribe.pending_ack_messages import PendingAckMessages
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.subscribe.txn_acks import TransactionalAcks
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.transactions import TopicTransactions, Waiting
from magnetar.managed_ledger.appender import Appender
from magnetar.managed_ledger.cursors import Cursors
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.managed_ledger.records import decode_cursor
from magnetar.metadata.api import Record
from magnetar.model.ids import Position
from magnetar.server.repairs import Repairs
from magnetar.txn import transitions
from magnetar.txn.acks.ack_store import MetadataPendingAckStore
from magnetar.txn.buffer import pins
from magnetar.txn.buffer import transaction_buffer as buffers
from magnetar.txn.buffer.segment_transactions import PinnedTransaction
from magnetar.txn.buffer.transaction_buffer import MetadataTransactionBuffer
from magnetar.txn.buffer.txn_dedup import TxnRuns, TxnVerdict
from magnetar.txn.buffer.visibility import Visibility
from magnetar.txn.coordinator.coordinators import Coordinators
from magnetar.txn.coordinator.gc import Leftover, TransactionGc
from magnetar.txn.coordinator.groups import TransactionGroups
from magnetar.txn.ids import from_text, to_text
from magnetar.txn.outcomes import Outcomes
from magnetar.txn.records import (
    OPS,
    Aborted,
    Group,
    Header,
    Pin,
    State,
    aborted_index,
    aborted_key,
    decode,
    encode,
    header_indexes,
    header_key,
)
from magnetar.txn.spec import names
from magnetar.txn.store import FoundPin, StoredOp, TxnStore
from magnetar.wire.messages import TxnId

Patch = Callable[[pytest.MonkeyPatch], None]


class Mutation(NamedTuple):
    """A rule that is taken away."""

    patch: Patch
    breaks: tuple[str, ...]
    """Invariants of which at least one is found broken."""
    course: Course = Course()
    first: int = 0
    """Where the search begins: a seed that saw it when this was written."""


def set_method(owner: type, name: str, method: Callable[..., Any]) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, method)


def _pins_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a former owner deletes meets the present one in the middle of its work more often."""
    monkeypatch.setattr(buffers, "GATHER_SECONDS", 0.0)


def _all(*patches: Patch) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for each in patches:
            each(monkeypatch)

    return patch


# --- publishing


async def _pin_later(self: MetadataTransactionBuffer, segment_txn: PinnedTransaction) -> None:
    self._check_open(segment_txn, await self._outcomes.state(segment_txn.txn))

    async def placed() -> None:
        await asyncio.sleep(0.05)
        segment_txn.op = await pins.place_pin(
            self._store, segment_txn.txn, self._segment, segment_txn.bound, self._epoch
        )

    self._tasks.spawn(placed(), "a late pin")


async def _pin_unchecked(self: MetadataTransactionBuffer, segment_txn: PinnedTransaction) -> None:
    """It always may take so long."""
    self._check_open(segment_txn, await self._outcomes.state(segment_txn.txn))
    await asyncio.sleep(2.5)
    segment_txn.op = await pins.place_pin(
        self._store, segment_txn.txn, self._segment, segment_txn.bound, self._epoch
    )
    segment_txn.decision = None


def _refuse_nothing(self: MetadataTransactionBuffer, txn: TxnId) -> None:
    return None


async def _pin_blindly(self: MetadataTransactionBuffer, segment_txn: PinnedTransaction) -> None:
    segment_txn.op = await pins.place_pin(
        self._store, segment_txn.txn, self._segment, segment_txn.bound, self._epoch
    )


def _store_always(self: TxnRuns, first: int, last: int) -> TxnVerdict:
    self.flying.add(first)
    return TxnVerdict.STORE


def _pin_behind(self: MetadataTransactionBuffer, segment_txn: PinnedTransaction) -> None:
    async def submitted() -> None:
        await asyncio.sleep(0.05)
        segment_txn.op = await pins.place_pin(
            self._store, segment_txn.txn, self._segment, segment_txn.bound, self._epoch
        )

    self._tasks.spawn(submitted(), "a late pin")
    segment_txn.is_admitted = True


def _aborted_up_to_what_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    abort = MetadataTransactionBuffer._abort

    async def aborted(
        self: MetadataTransactionBuffer, segment_txn: PinnedTransaction, _: Position
    ) -> None:
        await abort(self, segment_txn, self._ledger.last_position())

    monkeypatch.setattr(MetadataTransactionBuffer, "_abort", aborted)


def _kept_without_a_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was not admitted stays where it is."""
    admission = MetadataTransactionBuffer._admission

    async def kept(self: MetadataTransactionBuffer, segment_txn: PinnedTransaction) -> None:
        await admission(self, segment_txn)
        if not segment_txn.is_admitted and segment_txn.txn not in self._tracked:
            self._visibility.track(segment_txn.txn, segment_txn.bound)

    monkeypatch.setattr(MetadataTransactionBuffer, "_admission", kept)


def _told_nothing(self: Outcomes, txn: TxnId, participant: object, missing: object = None) -> None:
    return None


# --- recovery


def _open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the recovery, and the gate is open."""
    made = Visibility.__init__
    recover = MetadataTransactionBuffer.recover

    def opened(self: Visibility) -> None:
        made(self)
        self.open_gate()

    async def slowly(self: MetadataTransactionBuffer) -> None:
        await asyncio.sleep(0.1)
        await recover(self)

    async def meanwhile(self: TopicTransactions) -> None:
        assert self.buffer is not None
        self.buffer._tasks.spawn(slowly(self.buffer), "recovery")

    monkeypatch.setattr(Visibility, "__init__", opened)
    monkeypatch.setattr(TopicTransactions, "recover", meanwhile)


def _pins_before_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins are read, and a while later the former owner is fenced."""
    opened, found = ManagedLedger.open.__func__, TxnStore.pins  # type: ignore[attr-defined]
    before: dict[str, list[FoundPin]] = {}

    async def read_first(
        cls: type[ManagedLedger], name: str, metadata: Any, *rest: Any, **options: Any
    ) -> Any:
        ops = [record async for record in metadata.scan(OPS) if "-w-" in record.key]
        pinned = [FoundPin(StoredOp(each.key, each.version), decode(each, Pin)) for each in ops]
        before[name] = [each for each in pinned if place_of(each.pin.segment) == name]
        await asyncio.sleep(1.0)
        return await opened(cls, name, metadata, *rest, **options)

    async def as_read(self: TxnStore, segment: str) -> list[FoundPin]:
        known = before.pop(place_of(segment), None)
        return await found(self, segment) if known is None else known

    monkeypatch.setattr(ManagedLedger, "open", classmethod(read_first))
    monkeypatch.setattr(TxnStore, "pins", as_read)


async def _not_fenced(self: Appender) -> None:
    for span in self.ledgers.spans:
        if not span.closed:
            self._close_span(await self._store.info(span.ledger_id))


def _missing_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, found = MetadataTransactionBuffer._judged, TxnStore.pins

    async def at_once(self: MetadataTransactionBuffer, each: FoundPin) -> StoredOp | None:
        if await self._outcomes.read(from_text(each.pin.txn)) is None:
            self._tracked[from_text(each.pin.txn)].decision = "ABORTED"
            return None
        return await judged(self, each)

    async def slowly(self: TxnStore, segment: str) -> list[FoundPin]:
        pinned = await found(self, segment)
        await asyncio.sleep(2.5)
        return pinned

    monkeypatch.setattr(MetadataTransactionBuffer, "_judged", at_once)
    monkeypatch.setattr(TxnStore, "pins", slowly)


def _bound_of_the_new_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    track = MetadataTransactionBuffer._track

    def tracked(self: MetadataTransactionBuffer, txn: TxnId, _: Position) -> PinnedTransaction:
        return track(self, txn, self._ledger.next_append_floor())

    monkeypatch.setattr(MetadataTransactionBuffer, "_track", tracked)


def _aborted_before_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    recover, aborted = MetadataTransactionBuffer.recover, TxnStore.aborted
    before: dict[str, Any] = {}

    async def read_first(self: MetadataTransactionBuffer) -> None:
        before[self._segment] = await aborted(self._store, self._segment)
        await asyncio.sleep(0.3)
        await recover(self)

    async def as_read(self: TxnStore, segment: str) -> Any:
        known = before.pop(segment, None)
        return await aborted(self, segment) if known is None else known

    monkeypatch.setattr(MetadataTransactionBuffer, "recover", read_first)
    monkeypatch.setattr(TxnStore, "aborted", as_read)


async def _recover_no_acks(self: TransactionalAcks) -> None:
    return None


def _dispatch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recover = TransactionalAcks.recover

    async def slowly(self: TransactionalAcks) -> None:
        self.ready.set()
        await asyncio.sleep(0.3)
        await recover(self)

    monkeypatch.setattr(TransactionalAcks, "recover", slowly)


def _pins_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def only_read(store: TxnStore, found: FoundPin, bound: Position, epoch: int) -> StoredOp:
        return found.op

    monkeypatch.setattr(buffers, "adopt_pin", only_read)
    monkeypatch.setattr(pins, "adopt_pin", only_read)


def _cursor_before_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def loaded(self: Cursors, stored: Record) -> None:
        found = decode_cursor(stored.key, self._name, stored.value)
        await asyncio.sleep(0.3)
        record = await self._take(found.name, lambda _: found)
        store = self._store_of(record)
        if record.value.deleted:
            await store.delete()
            return
        state = await store.load()
        state.settle(self._ledgers())
        self._by_name[found.name] = self._cursor(found.name, state, store)

    monkeypatch.setattr(Cursors, "_load", loaded)


# --- materialising


async def _delete_at_once(self: MetadataPendingAckStore) -> None:
    gone, self._dropped, self._merged = [*self._dropped, *self._merged], [], []
    await self._store.delete_ops(gone)


async def _delete_what_came_meanwhile(self: MetadataPendingAckStore) -> None:
    while self.unsettled:
        if self._merged:
            await self._cursor.flush()
        gone, self._dropped, self._merged = [*self._dropped, *self._merged], [], []
        await self._store.delete_ops(gone)


async def _delete_anything(self: TxnStore, ops: Iterable[StoredOp]) -> None:
    await asyncio.gather(*(self.metadata.delete(op.key) for op in ops))


async def _last_writer_wins(
    self: TxnStore, txn: TxnId, segment: str, last: Position, *, first: Position
) -> None:
    await asyncio.sleep(0.2)
    record = Aborted(to_text(txn), segment, *last, first=first)
    indexes = (aborted_index(segment, last),)
    await self.metadata.put(aborted_key(segment, txn), encode(record), indexes=indexes)


def _stay_held(self: PendingAckMessages, txn: TxnId, acks: object, cumulative: bool) -> None:
    return None


async def _unpin_first(
    self: MetadataTransactionBuffer, segment_txn: PinnedTransaction, last: Position
) -> None:
    assert segment_txn.op is not None
    await self._store.delete_ops([segment_txn.op])
    record = self._store.write_aborted
    if await self._tried("aborted", lambda: record(segment_txn.txn, self._segment, last)):
        self.hide(segment_txn.txn, segment_txn.bound, last)
        self._end(segment_txn)


def _confirm_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    write = MetadataPendingAckStore.write

    async def nothing(self: MetadataPendingAckStore) -> None:
        return None

    async def slowly(self: MetadataPendingAckStore, *what: Any) -> list[StoredOp]:
        await asyncio.sleep(0.4)
        return await write(self, *what)

    monkeypatch.setattr(MetadataPendingAckStore, "confirm", nothing)
    monkeypatch.setattr(MetadataPendingAckStore, "write", slowly)


# --- decisions


def _answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acknowledgement that is written by a callback is answered before it is durable."""
    submit = TransactionalAcks._ack_at_once

    def at_once(self: TransactionalAcks, command: Any) -> asyncio.Future[None] | None:
        if submit(self, command) is None:
            return None
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.set_result(None)
        return answer

    monkeypatch.setattr(TransactionalAcks, "_ack_at_once", at_once)


def _ending_in_header(
    self: Coordinators, txn: TxnId, state: State, owner: str | None, cause: object
) -> asyncio.Future[State]:
    return asyncio.ensure_future(_end_in_header(self, txn, state, owner, cause))


async def _end_in_header(
    self: Coordinators, txn: TxnId, state: State, owner: str | None, cause: object
) -> State:
    now = self._clock.now_ms()

    def ended(header: Header | None) -> Header | None:
        return None if header is None else transitions.ended(header, state, now)

    after = await self._store.change(header_key(txn), Header, ended, header_indexes)
    if after is None:
        return state
    self._open_transactions.over(txn, after.state, self._clock.now_ms())
    return after.state


def _every_epoch(group: Group | None, application: str, epoch: int) -> Group:
    assert group is not None
    return group


async def _no_roll_forward(self: TransactionGroups, desk: Any, application: str) -> Group | None:
    return await self._store.group(application)


# --- the end


async def _force(
    self: TransactionGc, name: str, records: list[Record], repaired: set[Leftover]
) -> None:
    await self._store.delete_ops([StoredOp(each.key, each.version) for each in records])


async def _find_no_ops(self: TransactionGc, names: list[str]) -> dict[str, list[Record]]:
    return {}


def _repair_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    unpin = MetadataTransactionBuffer._unpin_all

    async def nothing(self: Repairs, left: Leftover) -> bool:
        return True

    async def slowly(self: MetadataTransactionBuffer) -> None:
        await asyncio.sleep(1.0)
        await unpin(self)

    monkeypatch.setattr(Repairs, "__call__", nothing)
    monkeypatch.setattr(MetadataTransactionBuffer, "_unpin_all", slowly)


def _records_before_data(monkeypatch: pytest.MonkeyPatch) -> None:
    trim = Topic.trim

    async def trimmed(self: Topic) -> list[int]:
        if self.transactions is not None:
            await self.transactions.trimmed(self.ledger.last_position())
        return await trim(self)

    monkeypatch.setattr(Topic, "trim", trimmed)


def _trim_anything(self: TopicTransactions, other: Position | None) -> Position | None:
    return other


async def _never_wake(self: TopicTransactions, moved: object, subscriptions: object) -> None:
    await asyncio.Event().wait()


async def _poll(self: TopicTransactions, moved: object, subscriptions: Waiting) -> None:
    while True:
        await asyncio.sleep(0.05)
        subscriptions.wake()


SHORT: Final = {"txn_retention_seconds": 1.0, "txn_collect_seconds": 0.5}
BUFFER: Final = MetadataTransactionBuffer


async def _expire_all(self: Subscription, seconds: float) -> None:
    self._ack_through(self._topic.ledger.last_position())


async def _expire_what_nobody_holds(self: Subscription, seconds: float) -> None:
    self._held.ack_through(Ack(self._topic.max_read_position()))


MUTATIONS: Final[dict[str, Mutation]] = {
    "the pin is awaited before the append": Mutation(
        set_method(BUFFER, "_pin", _pin_later), (names.PIN_BEFORE_ENTRY,), Course(hosts=2)
    ),
    "in a journal the pin stands before the entry": Mutation(
        set_method(BUFFER, "_pin_ahead", _pin_behind), (names.PIN_BEFORE_ENTRY,), Course(hosts=0)
    ),
    "the decision is checked again after the pin": Mutation(
        set_method(BUFFER, "_pin", _pin_unchecked),
        (names.READ_COMMITTED, names.GATE, names.ALL_OR_NOTHING, names.GC_NEVER_FORCES),
        Course(hosts=2, limits=SHORT),
    ),
    "nothing is written after the decision": Mutation(
        _all(
            set_method(BUFFER, "refusal", _refuse_nothing),
            set_method(BUFFER, "_pin", _pin_blindly),
        ),
        (names.FENCE, names.ALL_OR_NOTHING, names.GATE),
        Course(hosts=1),
    ),
    "sends inside a transaction are deduplicated": Mutation(
        set_method(TxnRuns, "judge", _store_always), (names.ALL_OR_NOTHING,), first=10
    ),
    "an abort covers what is in flight": Mutation(
        _aborted_up_to_what_is_durable, (names.ABORTED_STAYS_KNOWN,), first=24
    ),
    "who is not admitted is not tracked": Mutation(
        _kept_without_a_pin,
        (names.ALL_OR_NOTHING, names.NO_POLL),
        Course(hosts=2, troubles=("weather",), rest_seconds=30.0),
    ),
    "participants are told of decisions": Mutation(
        set_method(Outcomes, "join", _told_nothing),
        (names.ALL_OR_NOTHING,),
        Course(hosts=0, rest_seconds=30.0),
        first=6,
    ),
    "a recovered transaction keeps its bound": Mutation(
        _bound_of_the_new_owner, (names.READ_COMMITTED, names.GATE), Course(hosts=2)
    ),
    "pins are read before aborted records": Mutation(
        _all(_aborted_before_pins, _pins_go_at_once),
        (names.READ_COMMITTED, names.ABORTED_STAYS_KNOWN),
        Course(hosts=2, troubles=("usurp", "unload")),
        first=13,
    ),
    "what subscriptions held is held again": Mutation(
        set_method(TransactionalAcks, "recover", _recover_no_acks),
        (names.ALL_OR_NOTHING, names.INTENTS_OUTLIVE_CURSOR, names.NO_LEAK),
    ),
    "a subscription recovers before it dispatches": Mutation(
        _dispatch_at_once,
        (names.ALL_OR_NOTHING,),
        Course(hosts=2, troubles=("usurp", "unload")),
        first=3,
    ),
    "the gate is closed until recovery is over": Mutation(
        _open_at_once, (names.READ_COMMITTED, names.GATE), first=6
    ),
    "pins are read after the former owner is fenced": Mutation(
        _pins_before_fence,
        (names.READ_COMMITTED, names.GATE, names.PIN_BEFORE_ENTRY, names.ABORTED_STAYS_KNOWN),
        Course(hosts=2, troubles=("usurp",)),
        first=10,
    ),
    "the former owner's ledger is fenced": Mutation(
        set_method(Appender, "recover", _not_fenced),
        (names.READ_COMMITTED, names.ALL_OR_NOTHING, names.ABORTED_STAYS_KNOWN, names.GATE),
        Course(hosts=2, troubles=("usurp",), rest_seconds=30.0),
        first=2,
    ),
    "a pin without a header is read again": Mutation(
        _missing_is_aborted,
        (names.ALL_OR_NOTHING, names.ABORTED_STAYS_KNOWN),
        Course(hosts=3, limits=SHORT, troubles=("usurp", "weather")),
        first=4,
    ),
    "pins are adopted": Mutation(
        _all(_pins_not_adopted, _pins_go_at_once),
        (names.ABORTED_STAYS_KNOWN, names.GC_NEVER_FORCES, names.READ_COMMITTED),
        Course(hosts=3, troubles=("usurp", "weather")),
        first=17,
    ),
    "the cursor is fenced before it is read": Mutation(
        _cursor_before_fence,
        (names.INTENTS_OUTLIVE_CURSOR, names.ALL_OR_NOTHING),
        Course(hosts=2, troubles=("usurp", "unload")),
        first=3,
    ),
    "intents are deleted after the cursor is durable": Mutation(
        set_method(MetadataPendingAckStore, "settle", _delete_at_once),
        (names.INTENTS_OUTLIVE_CURSOR,),
    ),
    "an ack is answered when it is durable": Mutation(
        _answered_at_once,
        (names.INTENTS_OUTLIVE_CURSOR, names.ALL_OR_NOTHING),
        Course(hosts=0),
        first=10,
    ),
    "the snapshot is taken after the merge": Mutation(
        set_method(MetadataPendingAckStore, "settle", _delete_what_came_meanwhile),
        (names.INTENTS_OUTLIVE_CURSOR,),
        Course(troubles=("weather",)),
        first=15,
    ),
    "ops are deleted as they were seen": Mutation(
        _all(set_method(TxnStore, "delete_ops", _delete_anything), _pins_go_at_once),
        (names.ABORTED_STAYS_KNOWN, names.GC_NEVER_FORCES),
        Course(hosts=3, troubles=("usurp",)),
        first=22,
    ),
    "the aborted record is a maximum": Mutation(
        set_method(TxnStore, "write_aborted", _last_writer_wins),
        (names.ABORTED_STAYS_KNOWN,),
        Course(hosts=3, troubles=("usurp",)),
        first=2,
    ),
    "an intent that was not written holds nothing": Mutation(
        set_method(PendingAckMessages, "release", _stay_held),
        (names.ALL_OR_NOTHING,),
        Course(hosts=1, troubles=("weather",), rest_seconds=30.0),
        first=3,
    ),
    "the aborted record is written before the pin goes": Mutation(
        set_method(BUFFER, "_abort", _unpin_first), (names.ABORTED_STAYS_KNOWN,)
    ),
    "an ack is answered by the owner only": Mutation(
        _confirm_nothing, (names.ALL_OR_NOTHING,), Course(hosts=3, troubles=("usurp",)), first=13
    ),
    "the group's record alone decides": Mutation(
        set_method(Coordinators, "_ending", _ending_in_header), (names.ONE_DECISION,), first=4
    ),
    "decided ids are kept until they are rolled forward": Mutation(
        set_method(TransactionGroups, "_rolled_forward", _no_roll_forward),
        (names.ONE_DECISION,),
        first=2,
    ),
    "older epochs decide nothing": Mutation(
        lambda patch: patch.setattr(transitions, "check_epoch", _every_epoch),
        (names.ONE_DECISION,),
        first=10,
    ),
    "the collector asks": Mutation(
        set_method(TransactionGc, "_finish", _force),
        (names.INTENTS_OUTLIVE_CURSOR, names.ABORTED_STAYS_KNOWN),
        Course(limits=SHORT),
        first=7,
    ),
    "headers outlive ops": Mutation(
        set_method(TransactionGc, "_ops", _find_no_ops),
        (names.GC_NEVER_FORCES,),
        Course(limits=SHORT),
    ),
    "participants are made to look again": Mutation(
        _repair_nothing,
        (names.NO_LEAK, names.ALL_OR_NOTHING),
        Course(limits=SHORT),
        first=0,
    ),
    "aborted records go after the data": Mutation(
        _records_before_data, (names.ABORTED_STAYS_KNOWN,), Course(troubles=("trim",))
    ),
    "nothing at or above the lowest pin is trimmed": Mutation(
        set_method(TopicTransactions, "lowest_pin", _trim_anything),
        (names.SEALING_IRRELEVANT,),
        Course(troubles=("trim",), limits={"managed_ledger_ledger_entries": 4}),
    ),
    "dispatch is woken when the ceiling moves": Mutation(
        set_method(TopicTransactions, "_follow_moves", _never_wake),
        (names.NO_POLL, names.ALL_OR_NOTHING),
    ),
    "dispatch does not poll": Mutation(
        set_method(TopicTransactions, "_follow_moves", _poll),
        (names.NO_POLL,),
        Course(hosts=1),
    ),
    "nothing expires above an open transaction": Mutation(
        set_method(Subscription, "expire", _expire_all), (names.GATE,), Course(expires=True)
    ),
    "what a transaction holds expires all the same": Mutation(
        set_method(Subscription, "expire", _expire_what_nobody_holds),
        (STAY_GONE,),
        Course(expires=True),
        first=2,
    ),
}
