"""Ledgers in memory: one shared server, and one store object per simulated broker.

Owns: `MemoryLedgers`, the state that outlives its brokers, and `MemoryLedgerStore`, one broker's
connection to it. Everything in `ledger/api.py` is promised here too; durable means: in the server.

Invariants:
1. An entry is in the server's ledger before its future resolves, and futures of one connection
   resolve in the order of their `append` calls (one commit takes all that is queued, as a journal
   does).
2. A commit looks at the ledger's state when it happens, not when the append was submitted: what a
   fence found in the queue is refused, never stored.
3. The first failed append of a writer takes every later one with it; nothing is stored after a gap.
4. A sync failure (`StorageFenced`) stops every write of that connection, as it stops a process.

Faults are part of the server (`fail_next`, `drop`), so that every user of it, in whatever process
of a simulation, sees the same ones.

Relies on: calls from one event loop at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from magnetar.errors import (
    InvalidArgument,
    LedgerClosed,
    LedgerFenced,
    LedgerMissing,
    StorageClosed,
    StorageError,
    StorageFenced,
    TooManyRequests,
)
from magnetar.ledger.api import (
    ENTRY_BYTES_MAX,
    Entry,
    LedgerInfo,
    LedgerState,
    LedgerStore,
    LedgerWriter,
)
from magnetar.model.ids import Position
from magnetar.runtime.signal import Signal

Operation = Literal["create", "append", "read", "info", "fence", "close", "delete"]

Delay = Callable[[], Awaitable[None]]
"""Awaited before each commit; appends that come meanwhile join that commit."""


class _Fault(NamedTuple):
    error: StorageError
    stored: bool


@dataclass(slots=True)
class _Ledger:
    """The server's side of one ledger: what is durable."""

    ledger_id: int
    state: LedgerState = LedgerState.OPEN
    payloads: list[bytes] = field(default_factory=list)
    uncertain: list[bytes] = field(default_factory=list)
    """Reported as failed, but there: a fence finds them, nobody sees them before."""
    size_bytes: int = 0

    def store(self, payload: bytes) -> None:
        self.payloads.append(payload)
        self.size_bytes += len(payload)

    def end(self, state: LedgerState) -> LedgerInfo:
        for payload in self.uncertain:
            self.store(payload)
        self.uncertain.clear()
        self.state = state
        return self.info()

    def info(self) -> LedgerInfo:
        return LedgerInfo(self.ledger_id, self.state, len(self.payloads) - 1, self.size_bytes)


class MemoryLedgers:
    """The shared server: its ledgers live as long as this object."""

    def __init__(self, *, delay: Delay | None = None, queue_max: int = 100_000) -> None:
        self.delay = delay
        self.queue_max = queue_max
        self._ledgers: dict[int, _Ledger] = {}
        self._last_id = 0
        self._faults: dict[Operation, deque[_Fault]] = {}

    def connect(self) -> MemoryLedgerStore:
        """One more broker."""
        return MemoryLedgerStore(self)

    def fail_next(
        self, error: StorageError, *, operation: Operation = "append", stored: bool = False
    ) -> None:
        """The next operation of that kind, of whatever broker, fails with `error`.

        Faults of one kind queue up. `stored` goes with StorageFenced: the entry of the failing
        append exists all the same, as after a sync that failed once the bytes were on the disk.
        """
        self._faults.setdefault(operation, deque()).append(_Fault(error, stored))

    def drop(self, store: MemoryLedgerStore) -> None:
        """Let that broker die: what it had queued is lost, and it never writes again."""
        store._die()

    def _take_fault(self, operation: Operation) -> _Fault | None:
        faults = self._faults.get(operation)
        return faults.popleft() if faults else None

    def _check_fault(self, operation: Operation) -> None:
        fault = self._take_fault(operation)
        if fault is not None:
            raise fault.error

    def _create(self) -> _Ledger:
        self._last_id += 1
        ledger = _Ledger(self._last_id)
        self._ledgers[ledger.ledger_id] = ledger
        return ledger

    def _find(self, ledger_id: int) -> _Ledger:
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            raise LedgerMissing(f"ledger {ledger_id} does not exist")
        return ledger


class MemoryLedgerWriter(LedgerWriter):
    """A writer that queues at its connection."""

    def __init__(self, store: MemoryLedgerStore, ledger: _Ledger) -> None:
        self.ledger_id = ledger.ledger_id
        self.durable = Signal()
        self._store = store
        self._ledger = ledger
        self._next = 0
        self._refusal: StorageError | None = None
        """Why new appends are refused; those already queued may still succeed."""
        self._loss: StorageError | None = None
        """Why an append failed: everything queued behind it fails too."""
        self._ended = False

    @property
    def failure(self) -> StorageError | None:
        return self._loss

    @property
    def last_durable(self) -> int:
        return len(self._ledger.payloads) - 1

    def append(self, payload: bytes) -> asyncio.Future[Position]:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if len(payload) > ENTRY_BYTES_MAX:
            raise InvalidArgument(f"entry of {len(payload)} bytes; the limit is {ENTRY_BYTES_MAX}")
        return self._submit([payload])

    @property
    def run_bytes_max(self) -> int:
        return ENTRY_BYTES_MAX

    def append_run(self, payloads: list[bytes], size: int) -> asyncio.Future[Position]:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if size > ENTRY_BYTES_MAX:
            raise InvalidArgument(f"run of {size} bytes; the limit is {ENTRY_BYTES_MAX}")
        return self._submit(payloads)

    def _submit(self, payloads: list[bytes]) -> asyncio.Future[Position]:
        future = self._store._submit(self, payloads, self._next)
        self._next += len(payloads)
        return future

    async def close(self) -> LedgerInfo:
        if self._refusal is None:
            self._refusal = LedgerClosed(f"ledger {self.ledger_id} was closed by its owner")
        # Appends in the queue may still succeed; they belong to the end that is answered.
        await self._store._settled()
        self._store._check_writable()
        if self._ended:
            return self._ledger.info()
        # A later owner was quicker: the end is its own to declare.
        if self._ledger.state is not LedgerState.OPEN:
            raise LedgerFenced(f"ledger {self.ledger_id} was taken over by another owner")
        self._store._server._check_fault("close")
        self._ended = True
        return self._ledger.end(LedgerState.CLOSED)

    def _commit(self, payloads: Sequence[bytes]) -> StorageError | None:
        """Store one entry, or those of a run, or say why not."""
        # Looked at now, not at the submit: a fence may have come between (invariant 2).
        if self._loss is None:
            self._loss = self._why_lost()
        if self._loss is not None:
            self._refuse(self._loss)
            return self._loss
        fault = self._store._server._take_fault("append")
        if fault is None:
            for payload in payloads:
                self._ledger.store(payload)
            return None
        # The sync failed after the bytes had arrived: a fence finds the entry, as a restart would.
        if fault.stored:
            self._ledger.uncertain += payloads
        # A failed sync stops the whole process, not this ledger alone (invariant 4).
        if isinstance(fault.error, StorageFenced):
            self._store._failure = fault.error
        self._loss = fault.error
        self._refuse(fault.error)
        return fault.error

    def _why_lost(self) -> StorageError | None:
        if self._store._failure is not None:
            return self._store._failure
        if self._ledger.state is not LedgerState.OPEN:
            return LedgerFenced(f"ledger {self.ledger_id} was taken over by another owner")
        return None

    def _refuse(self, error: StorageError) -> None:
        # A fence outlives any other reason: trying again is of no use.
        if self._refusal is None or isinstance(error, LedgerFenced | StorageFenced):
            self._refusal = error


class _Queued(NamedTuple):
    writer: MemoryLedgerWriter
    payloads: Sequence[bytes]
    position: Position
    future: asyncio.Future[Position]


class MemoryLedgerStore(LedgerStore):
    """One broker's connection. Get it from `MemoryLedgers.connect`."""

    def __init__(self, server: MemoryLedgers) -> None:
        self._server = server
        self._queue: list[_Queued] = []
        self._committing: asyncio.Task[None] | None = None
        self._scheduled = False
        self._settling: list[asyncio.Future[None]] = []
        self._failure: StorageError | None = None
        self._closed = False

    async def create(self) -> LedgerWriter:
        await self._turn("create")
        self._check_writable()
        return MemoryLedgerWriter(self, self._server._create())

    async def info(self, ledger_id: int) -> LedgerInfo:
        await self._turn("info")
        return self._server._find(ledger_id).info()

    async def read(
        self, ledger_id: int, first: int, last: int, *, bytes_max: int = ENTRY_BYTES_MAX
    ) -> list[Entry]:
        if first < 0:
            raise InvalidArgument(f"entry id {first} is negative")
        await self._turn("read")
        payloads = self._server._find(ledger_id).payloads
        found: list[Entry] = []
        room = bytes_max
        for entry_id in range(first, min(last + 1, len(payloads))):
            payload = payloads[entry_id]
            room -= len(payload)
            if room < 0 and found:
                break
            found.append(Entry(Position(ledger_id, entry_id), payload))
        return found

    async def fence(self, ledger_id: int) -> LedgerInfo:
        await self._turn("fence")
        self._check_writable()
        ledger = self._server._find(ledger_id)
        # Its owner closed it before: that end stands.
        return (
            ledger.info() if ledger.state is LedgerState.CLOSED else ledger.end(LedgerState.FENCED)
        )

    async def close_ledger(self, ledger_id: int) -> LedgerInfo:
        await self._turn("close")
        self._check_writable()
        return self._server._find(ledger_id).end(LedgerState.CLOSED)

    async def delete(self, ledger_id: int) -> None:
        await self._turn("delete")
        self._check_writable()
        ledger = self._server._ledgers.pop(ledger_id, None)
        if ledger is not None:
            # Its writer may have appends in the queue, which must not be acknowledged any more.
            ledger.end(LedgerState.FENCED)

    async def list(self) -> AsyncGenerator[int, None]:
        self._check_open()
        for ledger_id in sorted(self._server._ledgers):
            yield ledger_id

    async def close(self) -> None:
        self._closed = True
        await self._settled()

    # --- the queue: one commit at a time takes all of it

    def _submit(
        self, writer: MemoryLedgerWriter, payloads: Sequence[bytes], entry_id: int
    ) -> asyncio.Future[Position]:
        if self._closed:
            raise LedgerClosed(f"the store of ledger {writer.ledger_id} was closed")
        self._check_writable()
        if len(self._queue) >= self._server.queue_max:
            raise TooManyRequests(f"{self._server.queue_max} appends are queued")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Position] = loop.create_future()
        self._queue.append(_Queued(writer, payloads, Position(writer.ledger_id, entry_id), future))
        # The first one schedules the commit and the others join it, as in a journal's group commit.
        if not self._scheduled:
            self._scheduled = True
            if self._server.delay is None:
                loop.call_soon(self._commit)
            else:
                self._committing = loop.create_task(self._commit_after(self._server.delay))
        return future

    async def _commit_after(self, delay: Delay) -> None:
        await delay()
        self._commit()

    def _commit(self) -> None:
        batch, self._queue = self._queue, []
        self._scheduled = False
        touched: dict[MemoryLedgerWriter, None] = {}
        for writer, payloads, position, future in batch:
            touched[writer] = None
            error = writer._commit(payloads)
            # Its caller was cancelled, which does not undo the append.
            if future.done():
                continue
            if error is None:
                future.set_result(position)
            else:
                future.set_exception(error)
        for writer in touched:
            writer.durable.advance()
        settling, self._settling = self._settling, []
        for settled in settling:
            if not settled.done():
                settled.set_result(None)

    async def _settled(self) -> None:
        """Until all that is queued now has been committed or refused."""
        if self._queue:
            settled = asyncio.get_running_loop().create_future()
            self._settling.append(settled)
            await settled

    def _die(self) -> None:
        self._closed = True
        self._failure = StorageClosed("this broker's connection was dropped")
        if self._committing is not None:
            self._committing.cancel()
        # With `_failure` set this stores nothing: every append in the queue fails.
        self._commit()

    # --- checks

    async def _turn(self, operation: Operation) -> None:
        """Let others run, as any remote call does, then fail if a fault is due."""
        self._check_open()
        await asyncio.sleep(0)
        # It may have been closed or dropped while the others ran.
        self._check_open()
        self._server._check_fault(operation)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed("this broker's ledger store was closed")

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
