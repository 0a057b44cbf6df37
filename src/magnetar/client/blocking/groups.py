"""Blocking: `TransactionGroup`, for threads.

Written by `make blocking` from `magnetar.client.transaction.group`; edit that.
"""

from __future__ import annotations

from collections.abc import Iterable

from magnetar.client.blocking.handle import Threaded, wrapped_of
from magnetar.client.blocking.transactions import Transaction
from magnetar.client.transaction.group import GroupStatus, GroupTicket
from magnetar.client.transaction.group import TransactionGroup as AsyncTransactionGroup
from magnetar.wire.messages import TxnId


class TransactionGroup(Threaded[AsyncTransactionGroup]):
    """One run of a writer that many tasks take part in. Made by `Client.open_group`.

    group = client.open_group("nightly", generation="query-1", run="run-1")
    with group.transaction(sequence=0) as txn:    # in any number of tasks and processes
        producer.send(b"row", txn=txn)
    group.commit(0, [txn])
    """

    @property
    def ticket(self) -> GroupTicket:
        """The ticket for `Client.group` in other processes."""
        return self._call(lambda: self._wrapped.ticket)

    @property
    def committed_sequence(self) -> int:
        """The last sequence that is known to be committed; -1: none."""
        return self._call(lambda: self._wrapped.committed_sequence)

    def transaction(self, sequence: int, *, timeout: float = 60.0) -> Transaction:
        """A transaction of a sequence. Leaving its block without an error prepares it."""
        return Transaction(
            self._thread, self._wait(lambda: self._wrapped.transaction(sequence, timeout=timeout))
        )

    def commit(
        self, sequence: int, transactions: Iterable[Transaction | TxnId], *, note: str = ""
    ) -> bool:
        """Commit these transactions of a sequence, and abort all others up to it.

        False: the sequence had been committed before, and this changed nothing. Raises
        `GroupFenced` if a later run has taken the group over. A `note`, up to 256 bytes, is kept
        with the commit for whoever asks for the status.
        """
        given = [wrapped_of(each) for each in transactions]
        return self._wait(lambda: self._wrapped.commit(sequence, given, note=note))

    def abort(self, transactions: Iterable[TxnId]) -> None:
        """Abort those of these transactions, begun anywhere, that are not decided yet."""
        given = [wrapped_of(each) for each in transactions]
        self._wait(lambda: self._wrapped.abort(given))

    def status(self) -> GroupStatus:
        """What the server knows of the group."""
        return self._wait(lambda: self._wrapped.status())
