"""Mode "group": a transaction per task attempt, one decision per batch.

Owns: `GroupTask`, a task's side, and `commit` and `abort`, the driver's. What to do with each
answer is `group_commit`'s to say.

Invariants:
1. A group is opened once per process and run; its tasks begin transactions in that epoch.
2. A part is told to Spark only when everything of its transaction is durable.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

from magnetar.blocking import Client, Transaction, TransactionGroup
from magnetar.client.client import Client as AsyncClient
from magnetar.client.client import connections_of
from magnetar.client.connection.pool import retrying
from magnetar.client.transaction.group import GroupStatus, GroupTicket
from magnetar.client.transaction.group import TransactionGroup as AsyncTransactionGroup
from magnetar.errors import (
    GroupFenced,
    InvalidTxnStatus,
    MagnetarError,
    NotAllowed,
    NotConnected,
    TransactionAborted,
    TransactionEnded,
    TransactionNotFound,
)
from magnetar.runtime.logs import logger
from magnetar.spark.links import not_reached, patiently
from magnetar.spark.sink import group_commit
from magnetar.spark.sink.group_commit import Known, TaskPlan, TaskReport, Ticket, WriteId

_LOG: Final = logger(__name__)
_WRITE: Final = "a write"
# Python workers live on and serve many queries; the limit keeps old runs from piling up.
_GROUPS_MAX: Final = 100
_GROUPS: Final[dict[tuple[Client, str, str, str], TransactionGroup]] = {}
"""Open ones, by client, application, generation and run."""
# Weak: a client that is gone takes its answer with it.
_HAS_GROUPS: Final[WeakKeyDictionary[Client, bool]] = WeakKeyDictionary()
_TURN: Final = threading.Lock()


class GroupTask:
    """One attempt of a task."""

    def __init__(self, client: Client, write: WriteId, timeout_s: float) -> None:
        self._client = client
        self._write = write
        self._timeout_s = timeout_s
        self._group: TransactionGroup | None = None
        self._txn: Transaction | None = None
        self._is_skipped = False

    def begin(self) -> TaskPlan:
        """Called with the first row."""
        self._txn = self._begun()
        self._is_skipped = self._txn is None
        return TaskPlan.SKIP if self._is_skipped else TaskPlan.WRITE

    @property
    def txn(self) -> Transaction | None:
        """What rows are sent in."""
        return self._txn

    def _begun(self) -> Transaction | None:
        """None: the batch is committed."""
        # The group may have been opened by an earlier task of this process, before another
        # attempt's batch was committed: then it knows an old sequence, and a second look is enough.
        for is_last in (False, True):
            group = self._group = _opened(self._client, self._write, anew=is_last)
            if group_commit.plan(self._write, group.committed_sequence) is TaskPlan.SKIP:
                return None
            try:
                return group.transaction(self._write.sequence, timeout=self._timeout_s)
            except InvalidTxnStatus:
                # The sequence was committed since the group was opened here: ask how far it is.
                if is_last:
                    raise
        raise AssertionError("the loop returns or raises")

    def finish(self, rows: int, size: int) -> TaskReport:
        """Wait until everything is durable; what to tell the driver."""
        # No group: the task had no rows. No transaction: it skipped a committed batch. Else it
        # wrote.
        if self._group is None:
            return TaskReport(self._write)
        ticket = Ticket(*self._group.ticket)
        if self._txn is None:
            return TaskReport(self._write, ticket, is_skipped=True, rows=rows)
        # Invariant 2: prepared before Spark hears of it. `close` only lets go of it here; the
        # driver ends it.
        self._txn.prepare()
        self._txn.close()
        return TaskReport(self._write, ticket, self._txn.txn_id, rows=rows, bytes=size)

    def explained(self, error: MagnetarError) -> MagnetarError:
        """Why rows could not be written: a transaction may be over because its run is."""
        # A transaction that the server ended looks the same whether it timed out or its run was
        # fenced; the group's status tells which.
        if self._txn is not None and _is_over(error):
            try:
                status = self._client.group_status(self._write.application)
            except MagnetarError as unknown:
                _LOG.info("run-not-known", write=str(self._write), reason=str(unknown))
            else:
                if (status.generation, status.run) != (self._write.generation, self._write.run):
                    error = GroupFenced(f"run {status.run} has begun: {error}")
        return group_commit.refused(self._write, error, self._timeout_s)

    def give_up(self) -> None:
        """The attempt failed: its rows are not to wait for a timeout."""
        if self._txn is not None:
            try:
                self._txn.abort()
            except MagnetarError as error:
                _LOG.info("attempt-not-aborted", write=str(self._write), reason=str(error))


def commit(
    client: Client,
    sequence: int,
    parts: Sequence[TaskReport | None],
    *,
    timeout_s: float,
    retry_s: float,
    same_rows: bool,
) -> None:
    """Spark commits a batch. Raises if it is not committed, and nothing of it is there then.

    `timeout_s` is that of transactions. Brokers that cannot be reached are waited for, `retry_s`:
    a commit may be asked for any number of times. `same_rows`: a batch that is repeated must have
    as many rows as it had.
    """
    wanted = group_commit.decision(sequence, parts)
    told = next((each for each in parts if each is not None), None)
    if told is None:
        return  # no task, no rows
    write, rows = told.write, sum(each.rows for each in parts if each is not None)

    # Repeated by `patiently`, so every step of it can be repeated; a commit whose answer was lost
    # is found committed, and confirmed as a repetition.
    async def attempt(asked: AsyncClient) -> bool:
        group = await _ticketed(asked, write, wanted.ticket)
        if not wanted.is_repeated:
            note = group_commit.note_of(rows)
            if await group.commit(sequence, wanted.transactions, note=note):
                return True
        # Here tasks were told that the batch is committed, or the server just said so. What
        # attempts wrote nevertheless is a second copy, and is aborted.
        known = _known(await group.status())
        group_commit.confirm(write, known)
        await group.abort(wanted.transactions)
        if same_rows:
            group_commit.check_repeated(write, known, rows)
        return False

    try:
        is_new = patiently(client, f"the commit of {write}", attempt, retry_s)
    # In the words of the sink: a refused commit leaves nothing of the batch (`group_commit`,
    # invariant 6).
    except MagnetarError as error:
        raise group_commit.refused(write, error, timeout_s) from error
    names = ", ".join(f"({each.most},{each.least})" for each in wanted.transactions)
    _LOG.info(
        "committed-group" if is_new else "group-was-committed",
        group=f"{write.application}/{sequence}",
        transactions=names,
    )


def abort(client: Client, parts: Sequence[TaskReport | None]) -> None:
    """Spark gives a batch up, maybe one that was committed: only what is open is touched."""
    told = [each for each in parts if each is not None and each.txn is not None]
    # A task without rows has no transaction, and one that failed has aborted its own.
    if not told:
        return
    ticket = told[0].ticket
    assert ticket is not None, "who has a transaction has a group"
    try:
        client.group(GroupTicket(*ticket)).abort([each.txn for each in told if each.txn])
    except MagnetarError as error:
        # They end by their timeout, or when the next run opens the group.
        _LOG.info("batch-not-aborted", write=str(told[0].write), reason=str(error))


def _is_over(error: MagnetarError) -> bool:
    return isinstance(error, TransactionAborted | TransactionEnded | InvalidTxnStatus | NotAllowed)


def has_groups(client: Client) -> bool:
    """Whether the server says that it has transaction groups; looked up once for each client."""

    async def ask(asked: AsyncClient) -> bool:
        connections = connections_of(asked)
        timeout_s = connections.settings.operation_timeout
        try:
            # Not `patiently`: that one lets its last attempt end, however long it takes. A wrong
            # `serviceUrl` is told after `operationTimeoutMs`, also where connecting hangs.
            broker = await retrying(_WRITE, connections.service, connections.backoff(), timeout_s)
        except NotConnected as error:
            raise not_reached(error, _WRITE, asked) from error
        return broker.features.supports_transaction_groups

    known = _HAS_GROUPS.get(client)
    if known is None:
        known = _HAS_GROUPS[client] = client.run(ask)
    return known


async def _ticketed(
    client: AsyncClient, write: WriteId, ticket: Ticket | None
) -> AsyncTransactionGroup:
    # None: no task had rows, so nobody has opened the group yet. The empty batch is committed
    # nevertheless, for its number.
    if ticket is not None:
        return await client.group(GroupTicket(*ticket))
    await _check_writer(client, write)
    return await client.open_group(write.application, generation=write.generation, run=write.run)


async def _check_writer(client: AsyncClient, write: WriteId) -> None:
    if write.application == write.generation:
        return  # the id of a query, which no other has
    try:
        known = _known(await client.group_status(write.application))
    except TransactionNotFound:
        return
    group_commit.check_writer(write, known)


def _opened(client: Client, write: WriteId, *, anew: bool = False) -> TransactionGroup:
    key = (client, write.application, write.generation, write.run)
    # Under the lock also while the broker is asked: tasks of one process share one opening
    # (invariant 1). They would wait for its answer anyway.
    with _TURN:
        known = _GROUPS.get(key)
        if known is not None and not anew:
            return known
        client.run(lambda asked: _check_writer(asked, write))
        # Forgetting is safe: an open group is found again by opening it in the same run.
        if len(_GROUPS) >= _GROUPS_MAX:
            _GROUPS.clear()
        group = client.open_group(write.application, generation=write.generation, run=write.run)
        _GROUPS[key] = group
        return group


def _known(status: GroupStatus) -> Known:
    rows = group_commit.rows_in(status.note)
    return Known(status.generation, status.committed_sequence, rows)
