"""Dedup state of one topic across loads: snapshots in the metadata store, replay of the log.

Owns: `DedupLog`: the `Dedup` of a topic, its snapshot record, and when to write it.

Invariants:
1. The state after `load` is that of everything in the log: the snapshot, and every entry behind
   the snapshot's position, read in order; entries of transactions as these are decided by then.
2. Nothing behind the snapshot's position is trimmed (`pin`).
3. A snapshot covers everything that was persisted at or below its position: producers are settled
   in the same step in which that position is read, and no undecided transaction is below it.
4. Once dedup is on, there is a snapshot: without one, dedup begins behind the last entry. What a
   segment inherited is in every snapshot, from before `inherit` returns.
5. A snapshot is written by compare-and-set: a former owner never overwrites its successor's.
6. The next snapshot comes after `SNAPSHOT_ENTRIES` entries, or so many seconds after the first one
   as was told last, which `keep` follows also while it waits. Without entries nothing wakes it.

Relies on: a managed ledger whose last position moves in the step in which its futures resolve, and
a caller that runs `keep`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from magnetar.broker.entries import EntryView
from magnetar.broker.policy.records import dedup_key
from magnetar.broker.publish.dedup import Dedup
from magnetar.broker.publish.lineage import Lineage, SequenceSpan, dedup_name
from magnetar.errors import BadVersion, MagnetarError, ManagedLedgerFenced, OutcomeUnknown
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.managed_ledger.reading import SCAN_BYTES, SCAN_ENTRIES
from magnetar.metadata.api import ABSENT, VALUE_BYTES_MAX, MetadataStore
from magnetar.model.hashing import FULL_RING, HashRange
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.slices import SlicePace
from magnetar.txn.records import State

# Pulsar's defaults of brokerDeduplicationEntriesInterval, ...ProducerInactivityTimeoutMinutes and
# ...MaxNumberOfProducers.
SNAPSHOT_ENTRIES: Final = 1000
CARE_SECONDS: Final = 120.0
"""After a snapshot that failed, and where none is due by time: until the next look."""
LOOK_SECONDS: Final = 0.1
IDLE_SECONDS: Final = 360 * 60.0
NAMES_MAX: Final = 10_000

_LOG: Final = logger(__name__)


class ReplayedTransactions(Protocol):
    """A topic's knowledge of its transactions, for the replay."""

    def max_read_position(self) -> Position:
        """Below it no transaction is undecided."""
        ...

    def replayed(self, view: EntryView, name: str) -> State:
        """COMMITTED: an entry counts, be it of no transaction. Its producer counts as `name`."""
        ...


class DedupLog:
    """Made, then loaded before its `state` is used."""

    def __init__(
        self,
        topic: TopicName,
        metadata: MetadataStore,
        ledger: ManagedLedger,
        clock: Clock,
        settle: Callable[[], None],
        transactions: ReplayedTransactions,
        snapshot_seconds: float,
    ) -> None:
        self._topic = topic
        self._metadata = metadata
        self._ledger = ledger
        self._clock = clock
        self._settle = settle
        self._transactions = transactions
        self._snapshot_seconds = snapshot_seconds
        # Of `keep` alone; `write_every` moves the wait that is under way.
        self._wait: asyncio.Timeout | None = None
        """The wait of `keep`, while it waits."""
        self._first_at: float | None = None
        """When the first entry was seen that the last snapshot has not; by the loop's time."""
        self.state = Dedup(NAMES_MAX)
        self._covered = transactions.max_read_position()
        """The position of the last snapshot."""
        self._version = ABSENT
        self._ended = False
        self._turn = asyncio.Lock()

    async def load(self) -> None:
        """Bring the state up to date with everything in the log, or begin."""
        found = await self._metadata.get(dedup_key(self._topic))
        # Invariant 4: the record marks where dedup began; without it a restart would replay
        # everything.
        if found is None:
            await self.write()
            return
        self._version = found.version
        now = self._clock.monotonic()
        self.state, self._covered = Dedup.restore(found.value, NAMES_MAX, now)
        await self._replay(now)

    @staticmethod
    async def delete(topic: TopicName, metadata: MetadataStore) -> None:
        """Forget everything: with its topic, or because dedup was switched off."""
        if await metadata.get(dedup_key(topic)) is not None:
            await metadata.delete(dedup_key(topic))

    async def end(self) -> None:
        """Dedup was switched off: forget everything, and write no more."""
        # Before the lock: a write that waits for it finds the end, and does not bring the record
        # back.
        self._ended = True
        async with self._turn:
            await self.delete(self._topic, self._metadata)

    @property
    def pin(self) -> Position:
        """Entries at or above it are needed for the next replay."""
        return self._covered.next

    @property
    def _own_range(self) -> HashRange:
        descriptor = self._topic.descriptor
        return FULL_RING if descriptor is None else descriptor.hash_range

    async def inherit(self, lineage: Lineage) -> None:
        """Take over, durably, what the parents of this segment stored."""
        self.state.inherit(lineage, self._own_range, self._clock.monotonic())
        await self.write()

    def lineage(self, child_range: HashRange) -> Lineage:
        """What a child on that range inherits; everything is settled."""
        return self.state.lineage(self._own_range, child_range)

    async def _replay(self, now: float) -> None:
        position, pace = self.pin, SlicePace()
        while entries := await self._ledger.read(position, SCAN_ENTRIES, SCAN_BYTES):
            for entry in entries:
                view = EntryView.of(entry)
                # Markers carry no sequence of a client.
                if view.readable and not view.is_marker:
                    self._replay_one(view, now)
            last = entries[-1].position
            position = last.next
            await pace.after(len(entries))  # topics that are served already go on

    def _replay_one(self, view: EntryView, now: float) -> None:
        name = dedup_name(self._topic, view.producer_name)
        state = self._transactions.replayed(view, name)
        span = SequenceSpan(view.sequence_id, view.highest_sequence_id)
        # Undecided: neither stored nor free until its transaction ends (dedup's invariant 7).
        if state == "OPEN":
            if view.is_last_chunk:
                self.state.stored_in_txn(name, span)
            return
        self.state.replay(name, span.first, span.last, now=now, is_last_chunk=view.is_last_chunk)
        # Replayed all the same: its sequences were used, and later ones stand behind them.
        if state == "ABORTED" and view.is_last_chunk:
            self.state.txn_aborted(name, span)

    async def keep(self) -> None:
        """Write snapshots as they become due, until `end` or the end of the managed ledger."""
        seen = self._ledger.appended.version
        while not self._ended:
            self._first_at = self._now() if self._behind() else None
            try:
                async with asyncio.timeout_at(self._due()) as wait:
                    self._wait = wait
                    while self._behind() < SNAPSHOT_ENTRIES:
                        seen = await self._ledger.appended.past(seen)
                        if self._first_at is None:
                            self._first_at = self._now()
                            wait.reschedule(self._due())
                        await self._clock.sleep(LOOK_SECONDS)  # not at every sync
            except TimeoutError:
                # As long without many entries: time for what need not be done often.
                self.state.forget_idle(self._clock.monotonic(), IDLE_SECONDS)
            except MagnetarError:
                return  # the managed ledger takes no more entries
            finally:
                self._wait = None
            behind = self._behind()
            # By time there may be none at all: then many entries are the only reason to write.
            if behind >= SNAPSHOT_ENTRIES or (behind and self._snapshot_seconds):
                await self._try_to_write()

    def _due(self) -> float:
        """When `keep` goes on at the latest."""
        if self._first_at is None or not self._snapshot_seconds:
            return self._now() + CARE_SECONDS
        return self._first_at + self._snapshot_seconds

    def write_every(self, seconds: float) -> None:
        """Write a snapshot so many seconds after the first new entry; 0: by entries alone."""
        if seconds != self._snapshot_seconds:
            self._snapshot_seconds = seconds
            if self._wait is not None and not self._wait.expired():
                self._wait.reschedule(self._due())

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()  # as `asyncio.timeout` counts

    async def _try_to_write(self) -> None:
        try:
            await self.write()
        except MagnetarError as error:
            # The log still has it all; the next snapshot covers more.
            _LOG.warning("dedup-snapshot-failed", topic=str(self._topic), error=str(error))
            await self._clock.sleep(CARE_SECONDS)

    async def write(self) -> None:
        """Store a snapshot of this moment."""
        async with self._turn:
            if self._ended:
                return
            # No await between these three (invariant 3): what is durable at this position is in the
            # state.
            position = self._transactions.max_read_position()
            self._settle()
            data = self.state.snapshot(position)
            # A record has a limit: better forget producers that are not here than write no
            # snapshot.
            if len(data) > VALUE_BYTES_MAX:
                self.state.forget_idle(self._clock.monotonic(), 0.0)
                data = self.state.snapshot(position)
            self._version = await self._put(data)
            self._covered = position

    async def _put(self, data: bytes) -> int:
        key = dedup_key(self._topic)
        try:
            return (await self._metadata.put(key, data, expected=self._version)).version
        # Invariant 5: another broker has the topic. Nothing is written any more.
        except BadVersion as error:
            self._ended = True
            raise ManagedLedgerFenced(f"{self._topic} has another owner") from error
        # Reading it back tells: only this broker, or a successor with other bytes, writes here.
        except OutcomeUnknown:
            found = await self._metadata.get(key)
            if found is None or found.value != data:
                raise
            return found.version

    def _behind(self) -> int:
        return self._ledger.count_between(self._covered, self._transactions.max_read_position())
