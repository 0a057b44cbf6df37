"""A persistent topic: one managed ledger, its producers and its subscriptions.

Owns: `Topic`, from its loading to its unloading or deletion.

Invariants:
1. One object per topic and process, and only its coroutines change it.
2. A failed append fences the topic: every producer is stopped, and none is admitted before all that
   was in flight is settled. Clients send again what got no receipt; dedup removes doubles.
3. A managed ledger that stopped for good takes the topic with it: `lost` says why, everybody is
   told to look it up again, and its owner loads it anew. So does a subscription whose deletion
   stopped half-way.
4. Terminating and deleting are decisions of the managed ledger, and as durable.
5. Subscriptions are woken whenever entries have become durable, and at the end of the topic.
6. On a segment, producers `<n>` and `<n>-seg-<its id>` are one for dedup, and never connected both.
7. Consumers see what `max_read_position` and `is_visible` let through. Transactions are recovered
   before anybody can ask; a topic whose transactions cannot go on is lost like one without its
   ledger.
8. On a terminated topic `TopicEnds.moved` advances after every step that may bring a subscription
   to the end or away from it (acknowledgements, skips, seeks), and when one comes or goes. A topic
   that is not terminated has no coroutine for that, and none of its subscriptions is watched.

Relies on: `managed_ledger` for durability and order; `subscription.py` for dispatch, and its
`wake`, which advances with each such step once the topic is sealed; `transactions.py` for what
transactions let through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from magnetar.broker.api import DROPPED, LastMessage, ProducerRequest, SubscribeRequest
from magnetar.broker.compact.compacted_ledger import CompactedLedger
from magnetar.broker.compact.compaction import Compaction
from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.dispatch.delay_rule import BROKER_DELAYS, DelayRule
from magnetar.broker.dispatch.dispatcher import ReadWindow
from magnetar.broker.entries import EntryView, publish_time_of
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.records import Directory, TopicRecord, record_name, topics_directory
from magnetar.broker.policy.schemas import Schemas, takes_any_schema, version_bytes
from magnetar.broker.policy.stats import Rate, RetentionStats, TopicStats, with_sums
from magnetar.broker.publish.lineage import Lineage, dedup_name
from magnetar.broker.publish.producer import Producer
from magnetar.broker.publish.producers import ProducerNames, TopicProducers
from magnetar.broker.publish.send_limits import SendLimits
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.dedup import TopicDedup
from magnetar.broker.topic.ownership import Ownership, SoleOwner
from magnetar.broker.topic.quotas import TopicQuotas
from magnetar.broker.topic.rates import TopicRates
from magnetar.broker.topic.subscriptions import TopicEnds, TopicSubscriptions
from magnetar.broker.topic.transactions import TopicTransactions
from magnetar.errors import (
    LedgerFenced,
    MagnetarError,
    ManagedLedgerFenced,
    NotAllowed,
    ProducerBusy,
    ServiceNotReady,
    TopicNotFound,
    TopicTerminated,
)
from magnetar.ledger.api import Entry, LedgerStore
from magnetar.managed_ledger.ledger_list import KEEP_NOTHING, Retention
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.metadata.api import MetadataStore
from magnetar.model.hashing import FULL_RING, HashRange
from magnetar.model.ids import Position
from magnetar.model.isolation import ReadIsolation
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import COMPACTION
from magnetar.runtime.clock import Clock
from magnetar.runtime.disk_space import PublishGate
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.txn.api import Transactions
from magnetar.txn.buffer.transaction_buffer import MetadataTransactionBuffer

# Producers that are told to reconnect come back at once; without a pause a broken disk would have
# them do so in a tight loop.
FENCE_PAUSE_S: Final = 0.1
"""How long a topic stays fenced once everything in flight is settled."""

_LOG: Final = logger(__name__)


@dataclass(frozen=True, slots=True)
class TopicParts:
    """The parts that all topics of one broker share."""

    metadata: MetadataStore
    ledgers: LedgerStore
    schemas: Schemas
    clock: Clock
    limits: Limits
    producer_names: ProducerNames
    owner: str = ""
    """The broker, as statistics name it."""
    ownership: Ownership = field(default_factory=SoleOwner)
    transactions: Transactions | None = None
    """None: transactional messages are refused."""
    consistent_hashing: bool = True
    """How Key_Shared consumers divide the keys that they do not choose themselves."""
    publish_gate: PublishGate = field(default_factory=PublishGate)
    """Closed while the disk is too full for messages."""
    segment_retention: Retention = KEEP_NOTHING
    """Of segments of scalable topics, where no policy says otherwise."""
    delays: DelayRule = BROKER_DELAYS
    """What the broker alone decides on messages that wait for their time."""
    compaction_turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """One topic is compacted at a time: the memory for its keys is that of the broker."""


class Topic:
    """A persistent topic. Get it from `open`, end it with `close` or `delete`."""

    def __init__(
        self,
        name: TopicName,
        parts: TopicParts,
        ledger: ManagedLedger,
        record: TopicRecord,
        policies: TopicPolicies,
    ) -> None:
        self.name, self.ledger = name, ledger
        self.policies = policies
        self.lost: MagnetarError | None = None
        """Why it cannot go on and must be loaded anew, if so."""
        self.load_number = 0
        """How many topics its broker had loaded when this was: they come in that order."""
        # Written by whoever leaves, and by maintenance, which goes by it for inactive topics.
        self.used_at = parts.clock.monotonic()
        """When it was last seen with a producer or consumer."""
        self._parts = parts
        self._clock = parts.clock
        directory = topics_directory(name.namespace, name.domain)
        self._records = Directory(parts.metadata, directory, TopicRecord)
        limits, patience_s = parts.limits, parts.limits.close_seconds
        self.producers = TopicProducers(record.epoch, self._set_epoch, close_seconds=patience_s)
        self._limit_sends()
        self._rates = TopicRates(name, self.producers, policies, parts.clock, self._publish_rates)
        # Before subscriptions and dedup: both ask it what consumers may see (invariant 7).
        self._transactions = TopicTransactions(name, ledger, parts, self)
        self.max_read_position: Callable[[], Position] = self._transactions.max_read_position
        """The last position that consumers may see."""
        self.read_window: Callable[[], ReadWindow] = self._transactions.read_window
        self.is_visible: Callable[[Entry], bool] = self._transactions.is_visible
        """Whether an entry up to `max_read_position` is for consumers."""
        self.legacy_transactions = self._transactions.legacy
        """Those with markers in the log; None: this topic can have none."""
        self._subscriptions = TopicSubscriptions(
            self,
            clock=parts.clock,
            limits=limits,
            consistent_hashing=parts.consistent_hashing,
            transactions=self._transactions.acks,
            rates=self._rates,
        )
        self.end_for = self._subscriptions.end_for
        self.readable = self._subscriptions.woken
        """Advances when more may be read than before, and when the topic ends or is unloaded."""
        # `_fenced` refuses producers for a while, `lost` for good; `_trouble` wakes `_mend`.
        self._fenced: MagnetarError | None = None
        self._trouble = Signal()
        self._tasks = Service(f"topic {name}", stop_seconds=patience_s)
        self._dedup = TopicDedup(
            name,
            parts.metadata,
            ledger,
            self.producers,
            self._transactions,
            self._tasks,
            parts.clock,
            policies.deduplication_snapshot_seconds,
        )
        self.quotas = TopicQuotas(self, parts.clock)
        self.compaction = _compaction_of(self, parts)
        self._deleting = False
        self._closing: asyncio.Task[None] | None = None
        # Switching dedup on and off awaits: two changes of policy must not overlap.
        self._policy_turn = asyncio.Lock()
        self._ends = TopicEnds(self._tasks)
        self._created_ms, self._last_publish_ms = record.created_ms, 0
        # Of producers that have left; those that are here count for themselves.
        self._gone_messages = self._gone_bytes = 0
        self._message_rate, self._byte_rate = Rate(parts.clock), Rate(parts.clock)

    @classmethod
    async def open(
        cls, name: TopicName, parts: TopicParts, record: TopicRecord, policies: TopicPolicies
    ) -> Topic:
        """Load a topic: take its managed ledger over, or begin one."""
        clock, limits = parts.clock, parts.limits
        ledger = await ManagedLedger.open(
            name.managed_ledger_name, parts.metadata, parts.ledgers, clock=clock, limits=limits
        )
        topic = cls(name, parts, ledger, record, policies)
        try:
            await topic._load()
        # A half-loaded topic already fences its former owner: closing gives the ledger back.
        except BaseException:
            await topic.close()
            raise
        return topic

    async def _load(self) -> None:
        # In this order: what transactions decided tells what subscriptions may show and what dedup
        # counts.
        await self._transactions.recover()
        self._subscriptions.load()
        await self.compaction.load()
        await self._dedup.load(wanted=self.policies.deduplication)
        self._tasks.spawn(self._wake_subscriptions(), "wake")
        self._tasks.spawn(self._mend(), "mend")
        for loop in self._transactions.loops(self._subscriptions, self._lose):
            self._tasks.spawn(loop, "transactions")
        # A topic that was terminated in a former life.
        self._watch_ends()
        if self.policies.compaction_threshold:
            await self.compaction.keep_all()

    # --- what it knows

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        return self._subscriptions.by_name

    @property
    def terminated(self) -> bool:
        return self.ledger.sealed

    def delay_rule(self) -> DelayRule:
        """The rule for messages with a time of delivery."""
        return self._parts.delays.under(self.policies.delayed_delivery)

    @property
    def consumers(self) -> int:
        """How many are connected, of all subscriptions."""
        return self._subscriptions.consumers

    @property
    def closing(self) -> bool:
        return self._closing is not None or self._deleting

    @property
    def undecided(self) -> int:
        """How many transactions write here, of either kind."""
        return self._transactions.undecided

    @property
    def in_use(self) -> bool:
        """Whether anybody is connected."""
        producers = self.producers
        return bool(producers.connected or producers.waiting or self._subscriptions.consumers)

    @property
    def transactions(self) -> MetadataTransactionBuffer | None:
        """The transactions that write here; None: this broker has none."""
        return self._transactions.buffer

    async def rescan(self) -> None:
        """Finish with transactions that ended and left something behind here."""
        if self.transactions is not None:
            await self.transactions.rescan()
        for subscription in list(self.subscriptions.values()):
            await subscription.rescan_transactions()

    @property
    def compacted(self) -> CompactedLedger | None:
        """What consumers that read compacted get first; None: it was never compacted."""
        return self.compaction.view

    async def last_message(
        self, isolation: ReadIsolation | None = None, *, compacted: bool = False
    ) -> LastMessage:
        """The last message that a consumer could get, or one that reads compacted."""
        entry = await self._transactions.last_entry(isolation)
        view = self.compacted if compacted else None
        # Up to its horizon the view counts: what the log has there may have been left out.
        if view is not None and (entry is None or entry.position <= view.horizon):
            found = await self.compaction.last_message()
            return LastMessage(DROPPED, -1) if found is None else LastMessage(*found)
        if entry is None:
            return LastMessage(DROPPED, -1)
        last = EntryView.of(entry)
        # MessageId's batch index: -1 means that the entry is no batch.
        return LastMessage(last.position, last.num_messages - 1 if last.is_batch else -1)

    async def find_by_time(self, ms: int) -> Position | None:
        """The first entry published at or after `ms`; None: there is none."""
        return await self.ledger.find_by_time(ms, publish_time_of)

    # --- producers

    async def add_producer(self, options: ProducerRequest) -> Producer:
        """Admit a producer: `ready`, or waiting to have the topic for itself.

        ProducerBusy because of its name: `producers.named` is who has it. Should that one's peer
        turn out to be dead, remove it and ask again.
        """
        self._check_writable()
        # Refusals that need no I/O come first, and nothing is kept of a producer before all have
        # passed.
        self.producers.check_room(self.policies.max_producers, options.name)
        self.producers.check_encrypted(options)
        await self.quotas.check()
        schemas = self._parts.schemas
        version = await schemas.for_producer(self.name.schema_id, options.schema, self.policies)
        # PIP-124: a dead letter producer makes the subscription first, so that its messages are
        # kept.
        if options.initial_subscription:
            await self._create_initial(options.initial_subscription)
        name = options.name or await self._parts.producer_names.next_name()
        # After the awaits: the topic may have been fenced, terminated or unloaded meanwhile.
        self._check_writable()
        producer = Producer(
            name,
            options,
            self.ledger.append,
            clock=self._clock,
            trouble=self._trouble,
            schema_version=version_bytes(version),
            dedup=self._dedup.state,
            dedup_name=dedup_name(self.name, name),
            transactions=self._transactions.writes,
            append_run=self.ledger.append_run,
        )
        await self.producers.add(producer, self.policies.max_producers)
        try:
            self._check_writable()  # it may have been fenced while the epoch was written
            # Invariant 6: two names that are one for dedup would spoil each other's sequences.
            other = self._dedup.namesake(producer)
            if other is not None and other.ready and producer.ready:
                raise ProducerBusy(
                    f"{self.name} has a producer {other.name!r}, the same as {name!r}"
                )
        except MagnetarError as error:
            producer.stop(error)
            await self.producers.remove(producer)
            raise
        # Last: until here it might have been refused, and dedup would wait for a producer that
        # never was.
        self._dedup.joined(producer)
        return producer

    async def remove_producer(self, producer: Producer) -> None:
        """Let a producer go, once everything that it sent is settled."""
        await self.producers.remove(producer)
        # Moved to the topic's own counters, so that totals never go down.
        self._gone_messages += producer.messages_in
        self._gone_bytes += producer.bytes_in
        producer.messages_in = producer.bytes_in = 0
        self.used_at = self._clock.monotonic()
        self._dedup.left(producer)

    def stop_producers(self, error: MagnetarError) -> None:
        """Take no more messages from those who are here; what is in flight gets its receipts."""
        self.producers.stop(error)

    async def _create_initial(self, name: str) -> None:
        if name in self.subscriptions:
            return
        # A producer's wish is no way around allowAutoSubscriptionCreation.
        if not self.policies.auto_subscription_creation:
            raise NotAllowed(f"{self.name}: subscription {name!r} may not be created")
        await self._subscriptions.create(name, EARLIEST, self.policies)

    async def _set_epoch(self, epoch: int) -> None:
        found = await self._records.change(
            record_name(self.name), lambda record: msgspec.structs.replace(record, epoch=epoch)
        )
        # PRODUCER crossed a deletion on another connection.
        if found is None:
            raise TopicNotFound(f"{self.name} was deleted")

    # --- subscriptions

    async def subscription(self, options: SubscribeRequest) -> Subscription:
        """The subscription that a consumer asks for; it joins with `add_consumer`."""
        self._check_open()
        schemas, idle = self._parts.schemas, self._takes_first_schema()
        await schemas.for_consumer(self.name.schema_id, options.schema, self.policies, idle=idle)
        found = await self._subscriptions.subscribe(options, self.policies)
        # Creating a cursor takes a write: the topic may be on its way out by now.
        self._check_open()
        self._watch_ends()
        return found

    def _takes_first_schema(self) -> bool:
        # Of a consumer: while the topic is empty, and nobody is there who relies on what it is.
        # Consumers that take whatever there is rely on nothing.
        if self.producers.connected or self.producers.waiting or self.ledger.entries:
            return False
        return all(
            takes_any_schema(consumer.options.schema)
            for subscription in self.subscriptions.values()
            for consumer in subscription.consumers
        )

    async def create_subscription(
        self, name: str, mark_delete: Position, properties: Mapping[str, str] | None = None
    ) -> bool:
        """A durable subscription without a consumer; False: it exists already."""
        self._check_open()
        created = await self._subscriptions.create(name, mark_delete, self.policies, properties)
        self._watch_ends()
        return created

    async def delete_subscription(
        self, name: str, *, by: Consumer | None = None, force: bool = False
    ) -> None:
        """Remove a subscription; refused while consumers other than `by` are connected."""
        self._check_open()
        subscription = self.subscriptions.get(name)
        if name == COMPACTION:
            await self.compaction.forget()
        try:
            await self._subscriptions.delete(name, by=by, force=force)
        except BaseException:
            unfinished = self._subscriptions.unfinished
            if unfinished is not None and not self.closing:
                text = f"{self.name}: the deletion of subscription {unfinished} was not finished"
                self._lose(ServiceNotReady(text))
            raise
        if subscription is not None:
            self._ends.unwatch(subscription)

    async def release(self, subscription: Subscription) -> None:
        """Call it when a consumer has left: a non-durable subscription may go with it."""
        self.used_at = self._clock.monotonic()
        await self._subscriptions.release(subscription)
        # It was non-durable, and this was its last consumer.
        if self.subscriptions.get(subscription.name) is not subscription:
            self._ends.unwatch(subscription)

    @property
    def ends(self) -> Signal:
        """Advances when, on a terminated topic, a subscription may have come to the end or left it,
        or came or went; never on others."""
        return self._ends.moved

    def _watch_ends(self) -> None:
        if self.terminated and not self.closing:
            self._ends.watch(self.subscriptions.values())

    # --- policies

    async def apply(self, policies: TopicPolicies) -> None:
        """Follow changed policies."""
        async with self._policy_turn:
            self._check_open()
            before, self.policies = self.policies, policies
            self._limit_sends()
            self._dedup.write_every(policies.deduplication_snapshot_seconds)
            if policies.delayed_delivery != before.delayed_delivery:
                self._subscriptions.wake()  # some may be due by now
            if _unacked_limits(policies) != _unacked_limits(before):
                self._subscriptions.limits_changed()
            await self._rates.follow(policies, self.subscriptions.values())
            self._check_open()  # very many subscriptions are told in slices
            if policies.compaction_threshold:
                await self.compaction.keep_all()
            # The rest is read from `policies` when it is needed.
            if policies.deduplication == before.deduplication:
                return
            if policies.deduplication:
                # Of what is in flight nobody would know the outcome: it comes again, judged.
                unready = ServiceNotReady(f"{self.name}: deduplication begins")
                await self._fence(unready)
                try:
                    await self._dedup.begin()
                finally:
                    self._unfence(unready)
            else:
                await self._dedup.end()

    def _limit_sends(self) -> None:
        self.producers.limit_sends(SendLimits.of(self.policies, self.name))

    async def trim(self, retention: Retention | None = None) -> list[int]:
        """Drop the ledgers that retention (its own, if none is given) lets go; their ids."""
        self._check_open()
        # First, so that messages of aborted transactions hold no ledger back that nobody reads.
        await self._transactions.pass_aborted(self._subscriptions)
        # Not trimmed: what dedup needs for its replay, and what undecided transactions refer to.
        pin = self._transactions.lowest_pin(self._dedup.pin)
        gone = await self.ledger.trim(retention or self.policies.retention, pin)
        # Records of aborted transactions go with their entries, in this order: the other way round
        # they would be delivered.
        await self._transactions.trimmed()
        return gone

    # --- loops

    async def _wake_subscriptions(self) -> None:
        appended = self.ledger.appended
        seen, end = appended.version, None
        while True:
            try:
                # A level to wait past: appends that come while subscriptions are woken are not
                # missed.
                seen = await appended.past(seen)
            except MagnetarError:
                break  # sealed, fenced or failed: `_mend` finds out
            # Once per batch, not per message.
            self._last_publish_ms = self._clock.now_ms()
            before, end = end, self.max_read_position()
            # Below an undecided transaction more is durable but nothing more readable: only those
            # who read uncommitted messages are woken.
            self._subscriptions.appended(is_readable=end != before)
        # The end of the topic (invariant 5), or of this load of it.
        self._subscriptions.wake()
        self._trouble.advance()

    async def _mend(self) -> None:
        """After a failed append: settle everything, then go on, or give up for good."""
        seen = 0
        while self.lost is None:
            await self._trouble.past(seen)
            # Sealing stops appends for good, so it looks like trouble. Cursors go on; that another
            # broker took the topic shows by the ledger's `stopped`.
            if self.terminated:
                await self.ledger.stopped.past(0)  # its cursors are another owner's by now
                self._lose(ManagedLedgerFenced(f"{self.name} has another owner"))
            if self.closing or self.terminated:
                return
            unready = ServiceNotReady(f"{self.name} recovers from a failed write")
            # Invariant 2: nobody sends while it is open which appends are in the log.
            try:
                await self._fence(unready)
                await self._dedup.store_holes()
                await self._clock.sleep(FENCE_PAUSE_S)
            except MagnetarError as error:
                self._lose(error)
            # The ledger itself is done for: fenced by another broker, or its storage failed.
            if self.ledger.failure is not None:
                self._lose(self.ledger.failure)
            # Failures that came during the fence are settled with it.
            seen = self._trouble.version
            self._unfence(unready)

    async def _fence(self, error: MagnetarError) -> None:
        self._fenced = error
        # Stopped, not closed: their sessions send CLOSE_PRODUCER, and clients come back by
        # themselves.
        self.producers.stop(error)
        await self.producers.drained()

    def _unfence(self, error: MagnetarError) -> None:
        if self._fenced is error:  # and not for another reason meanwhile
            self._fenced = None

    def _lose(self, error: MagnetarError) -> None:
        if self.lost is None:
            _LOG.warning("topic-lost", topic=str(self.name), error=str(error))
            # Before anybody is woken: whoever looks finds out why.
            self.lost = error
            self.readable.advance()
            gone = ServiceNotReady(f"{self.name} is being loaded again")
            self.producers.stop(gone)
            self._rates.close()
            for subscription in self.subscriptions.values():
                for consumer in list(subscription.consumers):
                    consumer.stop(gone)

    # --- the end of data, and of it all

    async def terminate(self) -> Position:
        """Take no more messages, durably; the last position."""
        self._check_open()
        # The decision (invariant 4): all that follows may be repeated after a crash.
        last = await self.ledger.seal()
        # Producers in Pulsar clients take this as final and do not reconnect.
        self.producers.stop(TopicTerminated(f"{self.name} was terminated"))
        self._subscriptions.wake()
        self._watch_ends()
        await self._settle_all()
        return last

    async def _settle_all(self) -> None:
        """Settle a topic that takes no more messages: dedup knows all outcomes, durably."""
        await self.producers.drained()
        await self._dedup.store_holes()

    # --- segments: what children know of the sequences of their parents

    async def lineage(self, child_range: HashRange = FULL_RING) -> Lineage:
        """What a child on that range inherits of this topic, which is terminated."""
        self._check_open()
        if not self.terminated:
            raise NotAllowed(f"{self.name} still takes messages", hint="terminate it first")
        # Asked again after a crash: the answer must have what was in flight when the first one was
        # given.
        await self._settle_all()
        return self._dedup.lineage(child_range)

    async def inherit(self, lineage: Lineage) -> None:
        """Take over, durably, what the parents stored; it takes no messages before that."""
        self._check_open()
        await self._dedup.inherit(lineage)

    async def delete(self, *, force: bool = False) -> None:
        """Remove it with all its data; refused while anybody is connected unless `force`."""
        self._check_open()
        if self.in_use and not force:
            raise NotAllowed(f"{self.name} has producers or consumers", hint="close them first")
        gone = TopicNotFound(f"{self.name} was deleted")
        # From here on nobody gets in; clients that are here hear that the topic is gone.
        self._deleting = True
        try:
            # The ledger's deletion decides. What is deleted after it has no topic any more, and is
            # found by name if this stops half-way.
            await self.producers.close(gone)
            await self.compaction.close()
            await self._subscriptions.close(gone)
            await self.ledger.delete(also=self.compaction.ledgers)
            await self._transactions.delete()
            await self._dedup.end()
        except BaseException:
            # Nobody can use it any more: the next load finds a deleted ledger, or a whole one.
            self._lose(ServiceNotReady(f"{self.name}: its deletion was not finished"))
            raise
        await self.close(gone)

    async def close(self, error: MagnetarError | None = None) -> None:
        """Unload: receipts owed are given, cursors written; clients look the topic up again."""
        if self._closing is None:
            reason = error or ServiceNotReady(f"{self.name} was unloaded")
            # No new producers while receipts are given; a reason from before stays.
            self._fenced = self._fenced or reason
            self.readable.advance()
            self._closing = asyncio.create_task(self._close(reason), name=f"{self.name}: close")
        # Whoever asks first starts it, all wait for the same end; cancelling one of them stops
        # nothing.
        await asyncio.shield(self._closing)

    async def _close(self, reason: MagnetarError) -> None:
        """Each part has its turn, whatever the others raise; the first error comes out."""
        problems: list[Exception] = []
        # The order matters: receipts first, then cursors, then dedup, which must know all outcomes;
        # the ledger that they write to goes last.
        steps: list[Callable[[], Awaitable[None]]] = [
            partial(self._close_producers, reason),
            self.compaction.close,
            partial(self._subscriptions.close, reason),
            self._last_snapshot,
            self._transactions.close,
            self.ledger.close,
            self._tasks.stop,
        ]
        for step in steps:
            try:
                await step()
            except (LedgerFenced, ManagedLedgerFenced) as error:
                # A later owner has taken it all; there is nothing left to finish.
                _LOG.info("topic-closed-after-take-over", topic=str(self.name), error=str(error))
            except Exception as problem:  # noqa: BLE001  raised below
                problems.append(problem)
        # Lost topics have lost their storage: their problems are known, and the next load recovers.
        if problems and self.lost is None:
            raise problems[0]

    async def _close_producers(self, reason: MagnetarError) -> None:
        try:
            await self.producers.close(reason)
        finally:
            self._rates.close()

    async def _last_snapshot(self) -> None:
        # Only in an orderly end: after a loss the former snapshot and the log say it all.
        if self.lost is None and not self.ledger.stopping:
            await self._dedup.store()

    def _check_open(self) -> None:
        if self.lost is not None or self.closing:
            raise ServiceNotReady(f"{self.name} is being unloaded")

    def _check_writable(self) -> None:
        self._check_open()
        if self._fenced is not None:
            raise ServiceNotReady(f"{self.name}: {self._fenced}")
        if self.terminated:
            raise TopicTerminated(f"{self.name} was terminated")
        # Last: whoever should go to another topic need not wait for this one.
        self._parts.publish_gate.check()

    # --- statistics

    @property
    def messages_in(self) -> int:
        """Since it was loaded."""
        producers = self.producers.connected.values()
        return self._gone_messages + sum(producer.messages_in for producer in producers)

    @property
    def bytes_in(self) -> int:
        return self._gone_bytes + sum(each.bytes_in for each in self.producers.connected.values())

    def _publish_rates(self) -> tuple[float, float]:
        """Messages and bytes in a second, as statistics show them."""
        return self._message_rate.of(self.messages_in), self._byte_rate.of(self.bytes_in)

    async def last_publish_ms(self) -> int:
        """When the last entry came; 0: there is none.

        Of one from before the topic was loaded, when its producer says that it was published.
        """
        if not self._last_publish_ms:
            entries = await self.ledger.read(self.ledger.last_position(), 1)
            if entries and not self._last_publish_ms:  # none came while this was read
                self._last_publish_ms = publish_time_of(entries[0].payload)
        return self._last_publish_ms

    def stats(self, *, publishers: bool = True, consumers: bool = True) -> TopicStats:
        """What the admin interface shows, with or without each producer and consumer.

        Read `last_publish_ms` before, for a time from before the topic was loaded.
        """
        producers = self.producers.connected.values() if publishers else ()
        subscriptions = {
            name: each.stats(consumers=consumers) for name, each in self.subscriptions.items()
        }
        # Of the last look that a quota by age made: nothing is read here.
        oldest_seconds, oldest_of = self.quotas.oldest()
        message_rate, byte_rate = self._publish_rates()
        stats = TopicStats(
            msg_rate_in=message_rate,
            msg_throughput_in=byte_rate,
            msg_in_counter=self.messages_in,
            bytes_in_counter=self.bytes_in,
            topic_creation_time_stamp=self._created_ms,
            last_publish_time_stamp=self._last_publish_ms,
            storage_size=self.ledger.size_bytes,
            backlog_size=self._backlog_bytes(),
            publishers=[producer.stats() for producer in producers],
            waiting_publishers=len(self.producers.waiting),
            subscriptions=subscriptions,
            deduplication_status="Disabled" if self._dedup.state is None else "Enabled",
            topic_epoch=self.producers.epoch,
            owner_broker=self._parts.owner,
            retention=RetentionStats.of(self.policies),
            backlog_quota_limit_size=self.policies.size_quota.limit,
            backlog_quota_limit_time=self.policies.age_quota.limit_time,
            oldest_backlog_message_age_seconds=oldest_seconds,
            oldest_backlog_message_subscription_name=oldest_of,
            publish_rate_limited_times=self._rates.publish_limited_times,
            compaction=self.compaction.stats(),
        )
        return with_sums(stats)

    def _backlog_bytes(self) -> int:
        # The largest backlog of any subscription, by the average size of an entry: an estimate.
        entries = self.ledger.entries
        backlog = max((each.backlog() for each in self.subscriptions.values()), default=0)
        return self.ledger.size_bytes * backlog // entries if entries else 0


def _compaction_of(topic: Topic, parts: TopicParts) -> Compaction:
    writable = parts.publish_gate.check
    turns = parts.compaction_turns
    return Compaction(
        topic, parts.ledgers, parts.clock, parts.limits, turns, check_writable=writable
    )


def _unacked_limits(policies: TopicPolicies) -> tuple[int, int]:
    return policies.max_unacked_per_consumer, policies.max_unacked_per_subscription
