"""Blocking: `Transaction`, for threads.

Written by `make blocking` from `magnetar.client.transaction.transaction`; edit that.
"""

from __future__ import annotations

from types import TracebackType

from magnetar.client.blocking.handle import Handle
from magnetar.client.transaction.state import TransactionState
from magnetar.client.transaction.transaction import Transaction as AsyncTransaction
from magnetar.wire.messages import TxnId


class Transaction(Handle[AsyncTransaction]):
    """Messages and acknowledgements that become effective together, or not at all.

    with client.transaction(timeout=60) as txn:
        producer.send(b"result", txn=txn)
        consumer.ack(message, txn=txn)

    Leaving the block commits; an exception or a cancellation in it aborts.
    """

    @property
    def txn_id(self) -> TxnId:
        """The id by which another process can join it: `Client.join_transaction`."""
        return self._call(lambda: self._wrapped.txn_id)

    @property
    def state(self) -> TransactionState:
        """How far it is, as this client knows."""
        return self._call(lambda: self._wrapped.state)

    def commit(self) -> None:
        """Commit: returns once everything of it is there for others, durably.

        Raises `TransactionConflict` or `TransactionAborted`, and it is then aborted; or another
        error if the coordinator could not be asked, and nobody here knows the outcome (the state is
        `ERROR`): commit again to know. Committing again is no mistake.
        """
        self._wait(lambda: self._wrapped.commit())

    def abort(self) -> None:
        """Abort: nothing of it will ever be seen, what it acknowledged is delivered again.

        Aborting again, or after the timeout, is no mistake.
        """
        self._wait(lambda: self._wrapped.abort())

    def prepare(self) -> None:
        """Wait until everything of it is durable: of a member of a group, or one begun elsewhere.

        It then takes no more.

        Raises as `commit` does if a part of it failed, and it is then aborted.
        """
        self._wait(lambda: self._wrapped.prepare())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._wait(lambda: self._wrapped._leave(error))
