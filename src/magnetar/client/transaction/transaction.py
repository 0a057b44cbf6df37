"""Transactions as an application uses them.

Owns: `Transaction`; `Beginning`, which `async with` and `await` understand. What they do is
`TransactionCore`'s: producers and consumers, to which an application gives a transaction, take its
core (`core_of`).

Invariants:
1. It begins when it is awaited or entered, not when it is made.
2. Leaving its block commits it (a member of a group is prepared); an exception or a cancellation in
   the block aborts it, and is not hidden by what the abort raises.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any

from magnetar.client.transaction.state import TransactionState
from magnetar.client.transaction.transaction_core import TransactionCore
from magnetar.errors import InvalidValue
from magnetar.wire.messages import TxnId


class Transaction:
    """Messages and acknowledgements that become effective together, or not at all.

    async with client.transaction(timeout=60) as txn:
        await producer.send(b"result", txn=txn)
        consumer.ack(message, txn=txn)

    Leaving the block commits; an exception or a cancellation in it aborts.
    """

    __slots__ = ("__weakref__", "_core")

    def __init__(self, core: TransactionCore) -> None:
        self._core = core

    @property
    def txn_id(self) -> TxnId:
        """The id by which another process can join it: `Client.join_transaction`."""
        return self._core.txn_id

    @property
    def state(self) -> TransactionState:
        """How far it is, as this client knows."""
        return self._core.state

    def __repr__(self) -> str:
        return repr(self._core)

    async def commit(self) -> None:
        """Commit: returns once everything of it is there for others, durably.

        Raises `TransactionConflict` or `TransactionAborted`, and it is then aborted; or another
        error if the coordinator could not be asked, and nobody here knows the outcome (the state is
        `ERROR`): commit again to know. Committing again is no mistake.
        """
        await self._core.commit()

    async def abort(self) -> None:
        """Abort: nothing of it will ever be seen, what it acknowledged is delivered again.

        Aborting again, or after the timeout, is no mistake.
        """
        await self._core.abort()

    async def prepare(self) -> None:
        """Wait until everything of it is durable: of a member of a group, or one begun elsewhere.

        It then takes no more.

        Raises as `commit` does if a part of it failed, and it is then aborted.
        """
        await self._core.prepare()

    async def close(self) -> None:
        """Abort it, unless it is ending, ended, or prepared."""
        await self._core.close()

    async def _leave(self, error: BaseException | None) -> None:
        """End a block that it was entered with."""
        await self._core.leave(error)


def core_of(txn: Transaction | None) -> TransactionCore | None:
    """What a producer or consumer takes of a transaction; raises `InvalidValue` if it is none."""
    if txn is None:
        return None
    if not isinstance(txn, Transaction):
        hint = "begin one: `async with client.transaction() as txn`, or `await` it"
        raise InvalidValue(f"txn is {txn!r}, not a transaction that was begun", hint=hint)
    return txn._core


class Beginning:
    """A transaction that is to be begun: `await` it, or use it with `async with`."""

    def __init__(self, begin: Callable[[], Awaitable[Transaction]]) -> None:
        self._begin = begin
        self._txn: Transaction | None = None

    def __await__(self) -> Generator[Any, None, Transaction]:
        return self._begin().__await__()

    async def __aenter__(self) -> Transaction:
        self._txn = await self._begin()
        return self._txn

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._txn is not None, "it was entered"
        await self._txn._leave(error)
