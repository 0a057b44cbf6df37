"""The compaction of one topic: its state, its runs, and the view that consumers read.

Owns: `Compaction`, and `CompactionReport`, what is told of it.

Invariants:
1. A view stands for the log up to its horizon, and is named by one write of the cursor's record,
   after everything in it is durable. Until that write the former view is the one that is read.
2. Every ledger made here is named in that record before anything is written to it, and until it is
   deleted: what a crash leaves behind is deleted when the topic is loaded. (One that was made in
   the very instant before a crash, and is empty, may stay, as any other new ledger.)
3. The cursor moves only behind what a durable view stands for, so nothing is trimmed before; the
   former view is deleted after that.
4. One run at a time on a topic, and one on a broker: others wait. A run that fails leaves
   everything as it was.
5. What was told of runs is forgotten with the load of a topic.

Relies on: the managed ledger, which trims nothing that a durable cursor has not passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from magnetar.broker.compact import batches
from magnetar.broker.compact.compacted_ledger import CompactedLedger, CompactedWriter
from magnetar.broker.compact.compaction_state import CompactionState
from magnetar.broker.compact.latest_keys import Survivors
from magnetar.broker.compact.passes import CompactedSource, CompactionPace, CompactionRun
from magnetar.broker.policy.stats import CompactionStats
from magnetar.errors import Conflict, MagnetarError, NotAllowed, ServiceNotReady
from magnetar.ledger.api import LedgerStore
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.ids import Position
from magnetar.model.names import Domain, TopicName
from magnetar.model.subscriptions import COMPACTION
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import COMPACTION_REMOVED_MESSAGES, COMPACTIONS

CompactionStatus: TypeAlias = Literal["NOT_RUN", "RUNNING", "SUCCESS", "ERROR"]

_MS_PER_SECOND: Final = 1000
_LOG: Final = logger(__name__)


@dataclass(slots=True)
class CompactionReport:
    """The outcome of the runs since the topic was loaded. Times are wall times in ms; 0: none."""

    status: CompactionStatus = "NOT_RUN"
    last_error: str = ""
    removed: int = 0
    """Messages that the last successful run left out."""
    succeeded_ms: int = 0
    failed_ms: int = 0
    duration_ms: int = 0
    """Of the last successful run."""
    failures: int = 0
    """Since the last success."""


class CompactedTopic(CompactedSource, Protocol):
    """The part of a topic that its compaction needs."""

    @property
    def name(self) -> TopicName: ...

    @property
    def closing(self) -> bool: ...

    def max_read_position(self) -> Position:
        """The last position that consumers may see."""
        ...

    async def create_subscription(self, name: str, mark_delete: Position) -> bool:
        """A durable subscription without a consumer; False: it exists already."""
        ...


class Compaction:
    """See the module. Loaded with its topic, and closed before the topic's ledger is."""

    def __init__(
        self,
        topic: CompactedTopic,
        ledgers: LedgerStore,
        clock: Clock,
        limits: Limits,
        turns: asyncio.Semaphore,
        *,
        check_writable: Callable[[], None],
    ) -> None:
        self.report = CompactionReport()
        self.view: CompactedLedger | None = None
        """What consumers that read compacted get first; None: there is none."""
        self._topic = topic
        self._ledgers = ledgers
        self._clock = clock
        self._limits = limits
        self._turns = turns
        self._check_writable = check_writable
        self._state = CompactionState()
        self._task: asyncio.Task[None] | None = None
        self._waits = False
        self._closing = False
        # A child of a split keeps deletions: what they delete may still stand in the view of a
        # parent, which a consumer reads before it.
        self._keeps_deletions = topic.name.domain is Domain.SEGMENT

    @property
    def running(self) -> bool:
        return self._task is not None

    @property
    def ledgers(self) -> tuple[int, ...]:
        """All ledgers that are here, for who deletes the topic."""
        return self._state.ledgers

    # --- the view

    async def load(self) -> None:
        """Find the view that the cursor names, and delete what a crash left behind."""
        cursor = self._cursor()
        if cursor is None:
            return
        self._adopt(CompactionState.of(cursor.properties))
        if self._state.horizon is not None:
            # A crash may have come between the view and the cursor's move behind it.
            cursor.ack_cumulative(self._state.horizon)
        await self._drop()

    async def last_message(self) -> tuple[Position, int] | None:
        """The last message of the view, with its index in its batch; None: there is none."""
        while (view := self.view) is not None:
            try:
                entry = await view.last()
            except MagnetarError:
                # Replaced meanwhile, and deleted.
                if view is not self.view:
                    continue
                raise
            return None if entry is None else (entry.position, batches.last_index(entry.payload))
        return None

    # --- what keeps the log

    async def keep_all(self) -> None:
        """Have nothing trimmed from now on that was not compacted."""
        if self._cursor() is None:
            await self._topic.create_subscription(COMPACTION, EARLIEST)

    async def forget(self) -> None:
        """Give the view up, for the cursor that names it will go."""
        if self.running:
            raise NotAllowed(f"{self._topic.name} is being compacted", hint="try again later")
        if self._cursor() is not None:
            dropping = self._state.ledgers
            await self._store(CompactionState(dropping=dropping))
            await self._drop()

    def stats(self) -> CompactionStats:
        """What the statistics of its topic show."""
        report = self.report
        return CompactionStats(
            last_compaction_removed_event_count=report.removed,
            last_compaction_succeed_timestamp=report.succeeded_ms,
            last_compaction_failed_timestamp=report.failed_ms,
            last_compaction_duration_time_in_mills=report.duration_ms,
        )

    # --- runs

    def begin(self) -> None:
        """Begin a run. Conflict: there is one already."""
        if self._closing or self._topic.closing:
            raise ServiceNotReady(f"{self._topic.name} is being unloaded")
        if self.running:
            raise Conflict(f"{self._topic.name} is being compacted already")
        self.report.status, self.report.last_error = "RUNNING", ""
        self._waits = True
        self._task = asyncio.create_task(self._run(), name=f"{self._topic.name}: compaction")

    async def ended(self) -> None:
        """Wait until what runs now is over."""
        if self._task is not None:
            await _over(self._task)

    async def close(self) -> None:
        """End what runs, at its next step; what it made is deleted."""
        self._closing = True
        task = self._task
        if task is None:
            return
        if self._waits:
            task.cancel()
        await _over(task)

    async def _run(self) -> None:
        report = self.report
        try:
            async with self._turns:
                self._waits = False
                began = self._clock.monotonic()
                report.removed = await self._compact()
            report.status, report.failures = "SUCCESS", 0
            report.succeeded_ms = self._clock.now_ms()
            report.duration_ms = round((self._clock.monotonic() - began) * _MS_PER_SECOND)
            COMPACTIONS.labels(outcome="success").inc()
            COMPACTION_REMOVED_MESSAGES.inc(report.removed)
        # Nobody waits for it (invariant 4): who asks hears of it, what is automatic comes again.
        except MagnetarError as error:
            self._failed(str(error))
            _LOG.warning("compaction-failed", topic=str(self._topic.name), error=str(error))
        except Exception as error:  # noqa: BLE001  a bug: logged with all that is known of it
            self._failed(repr(error))
            _LOG.error("compaction-crashed", error, topic=str(self._topic.name))
        # It waited for its turn, and its topic is being unloaded.
        except BaseException as error:
            self._failed(str(error) or f"{self._topic.name} is being unloaded")
            raise
        finally:
            self._waits = False
            self._task = None

    def _failed(self, reason: str) -> None:
        report = self.report
        report.status, report.last_error = "ERROR", reason
        report.failures += 1
        report.failed_ms = self._clock.now_ms()
        COMPACTIONS.labels(outcome="error").inc()

    async def _compact(self) -> int:
        """One run; how many messages it removed."""
        self._check()
        await self.keep_all()
        # What a former run could not delete; mostly there is nothing.
        await self._drop()
        former = self.view
        end = self._topic.max_read_position()
        begin = EARLIEST if former is None else former.horizon
        # Nothing new: the view is what it would be.
        if self._topic.ledger.count_between(begin, end) == 0:
            return 0
        run = CompactionRun(
            self._topic,
            former,
            end,
            CompactionPace(self._clock, self._limits, self._check),
            keys_max=self._limits.compaction_keys,
            keeps_deletions=self._keeps_deletions,
        )
        survivors = await run.survivors()
        ledger_id = await self._written(run, survivors)
        await self._replace(ledger_id, end)
        return run.messages - run.kept

    async def _written(self, run: CompactionRun, survivors: Survivors) -> int:
        """A ledger with what survives, closed; its id."""
        writer = CompactedWriter(await self._ledgers.create(), self._clock)
        try:
            # The first thing behind its creation that is durable is its name (invariant 2).
            dropping = (*self._state.dropping, writer.ledger_id)
            await self._store(self._state._replace(dropping=dropping))
        except MagnetarError:
            await self._ledgers.delete(writer.ledger_id)
            raise
        try:
            await run.write(survivors, writer)
            await writer.close()
        except MagnetarError:
            await self._drop()
            raise
        return writer.ledger_id

    async def _replace(self, ledger_id: int, horizon: Position) -> None:
        """Put a view in the place of the former one."""
        dropping = tuple(each for each in self._state.ledgers if each != ledger_id)
        # The decision (invariant 1); what follows may be repeated after a crash (invariant 3).
        await self._store(CompactionState(ledger_id, horizon, dropping))
        cursor = self._cursor()
        if cursor is not None:
            cursor.ack_cumulative(horizon)
            await cursor.flush()
        await self._drop()

    # --- the record

    async def _store(self, state: CompactionState) -> None:
        cursor = self._cursor()
        if cursor is None:
            raise NotAllowed(f"{self._topic.name} has no subscription {COMPACTION} any more")
        await cursor.change_properties(state.within(cursor.properties))
        self._adopt(state)

    def _adopt(self, state: CompactionState) -> None:
        present, self._state = self.view, state
        if state.ledger_id is None or state.horizon is None:
            self.view = None
        elif present is None or present.ledger_id != state.ledger_id:
            self.view = CompactedLedger(self._ledgers, state.ledger_id, state.horizon)

    async def _drop(self) -> None:
        """Delete the ledgers that are no view, then forget them."""
        dropping = self._state.dropping
        if not dropping:
            return
        try:
            for ledger_id in dropping:
                await self._ledgers.delete(ledger_id)
            await self._store(self._state._replace(dropping=()))
        except MagnetarError as error:
            # They are named still: the next run, or the next load, tries again.
            _LOG.warning("compacted-ledgers-kept", topic=str(self._topic.name), error=str(error))

    def _cursor(self) -> Cursor | None:
        ledger = self._topic.ledger
        return ledger.cursor(COMPACTION) if COMPACTION in ledger.cursor_names() else None

    def _check(self) -> None:
        if self._closing or self._topic.closing:
            raise ServiceNotReady(f"{self._topic.name} is being unloaded")
        # It writes, too: not what is left for acknowledgements.
        self._check_writable()


async def _over(task: asyncio.Task[None]) -> None:
    """Wait until a run is over; how it went, its report tells."""
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
