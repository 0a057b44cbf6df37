"""The deduplication of one topic, as long as its policy asks for it.

Owns: `TopicDedup`: when dedup begins and ends, and what producers and transactions see of it.

Invariants:
1. Without dedup nothing of it is stored; a name that comes back later begins anew.
2. Every producer of the topic has the same state, or none.

Relies on: the topic, which fences its producers while dedup begins.
"""

from __future__ import annotations

from magnetar.broker.publish.dedup import Dedup
from magnetar.broker.publish.dedup_log import DedupLog
from magnetar.broker.publish.lineage import NO_LINEAGE, Lineage, producer_names
from magnetar.broker.publish.producer import Producer
from magnetar.broker.publish.producers import TopicProducers
from magnetar.broker.topic.transactions import TopicTransactions
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.metadata.api import MetadataStore
from magnetar.model.hashing import HashRange
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.service import Service


class TopicDedup:
    """Made with its topic; off until `load` or `begin`."""

    def __init__(
        self,
        name: TopicName,
        metadata: MetadataStore,
        ledger: ManagedLedger,
        producers: TopicProducers,
        transactions: TopicTransactions,
        tasks: Service,
        clock: Clock,
        snapshot_seconds: float,
    ) -> None:
        self._name = name
        self._metadata = metadata
        self._ledger = ledger
        self._producers = producers
        self._transactions = transactions
        self._tasks = tasks
        self._clock = clock
        self._snapshot_seconds = snapshot_seconds
        self._log: DedupLog | None = None

    @property
    def state(self) -> Dedup | None:
        """None: nothing is judged."""
        return None if self._log is None else self._log.state

    @property
    def pin(self) -> Position | None:
        """Entries at or above it are needed for the next replay."""
        return None if self._log is None else self._log.pin

    async def load(self, *, wanted: bool) -> None:
        """Begin dedup on a topic just opened, or forget its records, as the policy says."""
        if wanted:
            await self.begin()
        else:
            # Switched off while the topic was not loaded (invariant 1).
            await DedupLog.delete(self._name, self._metadata)

    async def begin(self) -> None:
        log = DedupLog(
            self._name,
            self._metadata,
            self._ledger,
            self._clock,
            self._producers.settle,
            self._transactions,
            self._snapshot_seconds,
        )
        # Whole before anybody can ask: half a state would let duplicates through. Undecided
        # transactions are told to it in the same step in which it is shown.
        await log.load()
        self._log = log
        self._transactions.count_in(log.state)
        self._tasks.spawn(log.keep(), "dedup")

    def write_every(self, seconds: float) -> None:
        """Write a snapshot so many seconds after the first new entry; 0: by entries alone."""
        self._snapshot_seconds = seconds
        if self._log is not None:
            self._log.write_every(seconds)

    async def end(self) -> None:
        """Forget everything."""
        # In memory first: nobody judges by a state whose record is about to go.
        log, self._log = self._log, None
        self._transactions.count_in(None)
        for producer in self._producers.connected.values():
            producer.dedup = None
        if log is not None:
            await log.end()

    # --- producers

    def joined(self, producer: Producer) -> None:
        state = producer.dedup = self.state
        if state is not None:
            state.producer_joined(producer.dedup_name)
            # PRODUCER_SUCCESS carries it: the client goes on behind it.
            producer.last_sequence_id = state.last_sequence_id(producer.dedup_name)

    def left(self, producer: Producer) -> None:
        # While its namesake of a segment is connected the name is in use, and not to be forgotten.
        if self.state is not None and self.namesake(producer) is None:
            self.state.producer_left(producer.dedup_name, self._clock.monotonic())

    def namesake(self, producer: Producer) -> Producer | None:
        """Another one that counts as the same."""
        names = producer_names(self._name, producer.dedup_name)
        others = (self._producers.named(name) for name in names)
        return next((other for other in others if other not in (None, producer)), None)

    # --- what lasts

    async def store_holes(self) -> None:
        """If there are holes, make them durable: the log alone does not show them."""
        if self._log is not None and self._log.state.has_holes:
            await self._log.write()

    async def store(self) -> None:
        """Spare the next load the replay; without it the log is replayed."""
        if self._log is not None:
            await self._log.write()

    def lineage(self, child_range: HashRange) -> Lineage:
        """What a child on that range inherits; everything is settled."""
        return NO_LINEAGE if self._log is None else self._log.lineage(child_range)

    async def inherit(self, lineage: Lineage) -> None:
        """Take over, durably, what the parents of this segment stored."""
        if self._log is None:
            return
        await self._log.inherit(lineage)
        # Those that connected before it inherited: their names must not count as absent.
        for producer in self._producers.connected.values():
            self._log.state.producer_joined(producer.dedup_name)
