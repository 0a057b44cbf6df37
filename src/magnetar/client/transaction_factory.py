"""The part of a client that begins transactions and opens groups of them.

Owns: `TransactionFactory`, and the coordinators of the client, which are looked for when the first
transaction begins.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack

from magnetar.client.connection.pool import Connections
from magnetar.client.opening import Closable
from magnetar.client.transaction.coordinators import CoordinatorClients
from magnetar.client.transaction.group import (
    GroupStatus,
    GroupTicket,
    TransactionGroup,
    group_status,
    open_group,
)
from magnetar.client.transaction.transaction import Beginning, Transaction
from magnetar.client.transaction.transaction_core import TransactionCore
from magnetar.errors import InvalidSetting
from magnetar.wire.messages import TxnId


class TransactionFactory(ABC):
    """The transactions of a client, and their groups."""

    _connections: Connections

    def __init__(self) -> None:
        # By the kind that was asked for: most clients need one, and most of them none.
        self._coordinators: dict[bool | None, CoordinatorClients] = {}

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `AlreadyClosed` if the client was told to close."""

    @abstractmethod
    def _keep(self, made: Closable) -> None:
        """Close it with the client, unless it is closed before."""

    @abstractmethod
    def _forget(self, closed: Closable) -> None:
        """Close it no more: it is closed."""

    def transaction(self, *, timeout: float = 60.0, scalable: bool | None = None) -> Beginning:
        """A transaction: of any number of topics, scalable and regular.

            async with client.transaction(timeout=60) as txn:
                await producer.send(b"result", txn=txn)
                consumer.ack(message, txn=txn)

            txn = await client.transaction()    # and `commit` or `abort` later

        It is aborted if it is not committed within `timeout` seconds. `scalable=False` takes a
        coordinator of the older kind, whose transactions are for regular topics only: Apache
        Pulsar 5 needs that for those, Magnetar does not.
        """
        _check_timeout(timeout)

        async def begin() -> Transaction:
            # The clock starts before the broker's: here the time is over first, and nothing is sent
            # to a transaction that the broker has given up.
            coordinators = await self._find(scalable)
            deadline = asyncio.get_running_loop().time() + timeout
            txn_id = await coordinators.begin(timeout)
            return self._begun(
                TransactionCore(coordinators, txn_id, deadline=deadline, on_close=self._forget)
            )

        return Beginning(begin)

    async def join_transaction(
        self,
        txn_id: TxnId,
        *,
        time_left: float = 60.0,
        scalable: bool | None = None,
        ends_here: bool = False,
    ) -> Transaction:
        """A transaction that another process has begun; `time_left` is in seconds.

            txn = await client.join_transaction(txn_id, time_left=20)
            await producer.send(b"a part", txn=txn)
            await txn.prepare()    # its parts are durable: now the other process may be told

        Whoever ends it (`ends_here`) must know that all others have prepared. Raises nothing if
        there is no such transaction: its first send does.
        """
        _check_timeout(time_left)
        coordinators = await self._find(scalable)
        deadline = asyncio.get_running_loop().time() + time_left
        return self._begun(
            TransactionCore(
                coordinators,
                txn_id,
                deadline=deadline,
                on_close=self._forget,
                # Joined, it is only prepared here; one process alone commits it.
                is_member=not ends_here,
            )
        )

    async def open_group(self, application: str, *, generation: str, run: str) -> TransactionGroup:
        """Open a group of transactions that are committed together, and end its earlier runs.

            group = await client.open_group("nightly", generation="query-1", run="run-1")

        Opening the same run again is no mistake: it goes on. A `generation` is what survives a
        restart (a streaming query, say), a `run` is one start of it. Raises `NotAllowed` if the
        server has no groups, as Apache Pulsar has not, and `GroupFenced` if a later run or
        generation has been opened.
        """
        # Groups are at coordinators of the newer kind only, which are looked for first.
        coordinators = await self._find(None)
        return await open_group(coordinators, application, generation, run, self._begin_member)

    async def group(self, ticket: GroupTicket) -> TransactionGroup:
        """A group that another process has opened."""
        return TransactionGroup(await self._find(None), ticket, self._begin_member)

    async def group_status(self, application: str) -> GroupStatus:
        """What the server knows of a group: its run, and what was committed last."""
        return await group_status(await self._find(None), application)

    def _begin_member(self, ticket: GroupTicket, sequence: int, timeout: float) -> Beginning:
        _check_timeout(timeout)

        async def begin() -> Transaction:
            coordinators = await self._find(None)
            deadline = asyncio.get_running_loop().time() + timeout
            # A member begins at the coordinator of its group: one record there decides on all of
            # them.
            application, epoch, number = ticket
            txn_id = await coordinators.begin_member(number, timeout, application, epoch, sequence)
            return self._begun(
                TransactionCore(
                    coordinators, txn_id, deadline=deadline, on_close=self._forget, is_member=True
                )
            )

        return Beginning(begin)

    def _begun(self, core: TransactionCore) -> Transaction:
        # Kept until it is over, so that closing the client aborts what is open.
        self._keep(core)
        return Transaction(core)

    async def _find(self, scalable: bool | None) -> CoordinatorClients:
        self._check_open()
        found = self._coordinators.get(scalable)
        if found is None:
            # Kept before it is started: two transactions that begin at once share it.
            found = self._coordinators[scalable] = CoordinatorClients(
                self._connections, scalable=scalable
            )
            await found.start()
        return found

    async def _leave_coordinators(self) -> None:
        async with AsyncExitStack() as parts:
            for each in self._coordinators.values():
                parts.push_async_callback(each.stop)


def _check_timeout(seconds: float) -> None:
    if not seconds > 0:
        raise InvalidSetting(f"a transaction has a timeout, not {seconds}", hint="give seconds")
