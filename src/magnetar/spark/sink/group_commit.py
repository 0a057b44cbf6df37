"""Pure: how one micro-batch of many tasks becomes one commit of a transaction group.

Owns: `WriteId` (which batch of which writer), `TaskReport` (what one task tells the driver), and
what tasks and driver do with each answer of the server. `group_writes.py` asks the server.

Invariants:
1. A task's rows are in a transaction of its own. Only parts that Spark handed to the driver are
   committed: an attempt that lost, failed or was forgotten is aborted with the same decision.
2. A task leaves its rows out only if the server says that the very batch is committed. If one did,
   the batch is never committed: it must turn out to have been.
3. A batch is committed with the parts of one epoch, or not at all.
4. Only the last committed batch is ever repeated. One before it means that the checkpoint is not
   the one that was written with: nothing is skipped in silence.
5. A batch of another query is never taken for one of this.
6. An error leaves the batch undecided or aborted, never half committed: Spark runs it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, TypeVar

import msgspec

from magnetar.errors import (
    CheckpointMismatch,
    GroupFenced,
    InvalidTxnStatus,
    InvariantBroken,
    MagnetarError,
    TransactionAborted,
    TransactionNotFound,
    WriterConflict,
)
from magnetar.wire.messages import TxnId

NEVER: Final = -1
"""The sequence of a writer that has committed none."""

P = TypeVar("P", bound="TaskReport")


class WriteId(NamedTuple):
    """One batch of a writer, in one of its runs."""

    application: str
    """Who writes: what the server remembers commits under."""
    generation: str
    """What survives a restart: the query of one checkpoint."""
    run: str
    """One start of it."""
    sequence: int
    """The number of the batch."""

    def __str__(self) -> str:
        return f"batch {self.sequence} of {self.application!r}"


class Ticket(NamedTuple):
    """An open group, as all tasks of a run know it."""

    application: str
    epoch: int
    coordinator: int


class Known(NamedTuple):
    """The last commit of a writer, as the server tells it."""

    generation: str
    committed_sequence: int
    rows: int | None = None
    """How many rows that batch had, if it was noted."""


class TaskPlan(Enum):
    """The choice of a task: write its rows, or leave them out."""

    WRITE = "write"
    SKIP = "skip"
    """The batch is committed: this is a repetition."""


@dataclass(frozen=True)
class TaskReport:
    """The report of one task to the driver: where its rows are, and how many."""

    write: WriteId
    ticket: Ticket | None = None
    """None: it had no rows, and did not ask the server for anything."""
    txn: TxnId | None = None
    is_skipped: bool = False
    attempt: int = -1
    """Spark's number of the task attempt, where one transaction is shared."""
    rows: int = 0
    bytes: int = 0


class Decision(NamedTuple):
    """The commit that the driver asks for."""

    ticket: Ticket | None
    """None: no task has opened the group."""
    transactions: tuple[TxnId, ...]
    is_repeated: bool
    """Tasks were told that the batch is committed: that is to be confirmed, nothing to be done."""


# --- a task


def check_writer(write: WriteId, known: Known | None) -> None:
    """Before a group is opened: raise if it belongs to another query (invariant 5).

    One that never committed anything may be taken over; its run is fenced then.
    """
    # New to the server, or the same query after a restart.
    if known is None or known.generation == write.generation:
        return
    # Another query's, with commits: its batch numbers mean other rows. Without commits there is
    # nothing that could be skipped or written twice.
    if known.committed_sequence != NEVER:
        raise WriterConflict(
            f"the transactional id {write.application!r} belongs to query {known.generation}, "
            f"which has committed batch {known.committed_sequence}; this is {write.generation}",
            hint="go on from the checkpoint of that query; or, if its output may be written a "
            "second time, choose another transactionalId",
        )


def plan(write: WriteId, committed_sequence: int) -> TaskPlan:
    """What to do with the rows of a batch, when so much is committed (invariants 2 and 4)."""
    # The ordinary case; then a batch that was committed and repeated because Spark died before it
    # noted that; and last a checkpoint that was restored from a backup.
    if committed_sequence < write.sequence:
        return TaskPlan.WRITE
    if committed_sequence == write.sequence:
        return TaskPlan.SKIP
    raise CheckpointMismatch(
        f"{write} comes after batch {committed_sequence} was committed",
        hint="the checkpoint is older than the output: restore the newest one; or begin with an "
        "empty checkpoint folder, which writes everything a second time",
    )


# --- the driver


def decision(sequence: int, parts: Sequence[TaskReport | None]) -> Decision:
    """What to ask for when Spark commits a batch."""
    told = checked(sequence, parts)
    tickets = {each.ticket for each in told if each.ticket is not None}
    # Invariant 3. Tasks of one batch open the group in several processes; a second run of the query
    # that begins in between raises the epoch, and only the newer one could commit.
    if len(tickets) > 1:
        epochs = sorted(each.epoch for each in tickets)
        raise GroupFenced(
            f"tasks of {told[0].write} wrote in different epochs: {epochs}",
            hint="another run of the query was started meanwhile; let only one of them run",
        )
    return Decision(
        next(iter(tickets), None),
        tuple(each.txn for each in told if each.txn is not None),
        any(each.is_skipped for each in told),
    )


def checked(sequence: int, parts: Sequence[P | None]) -> list[P]:
    """The parts of a batch; raises if one is missing, or is of another batch."""
    # None of these happens with a Spark that keeps its word: they are bugs, of Spark or of ours,
    # and committing anyway would lose rows or mix batches.
    told = [each for each in parts if each is not None]
    if len(told) < len(parts):
        raise InvariantBroken(f"Spark commits batch {sequence} with parts missing")
    if any(each.write != told[0].write for each in told):
        raise InvariantBroken(f"batch {sequence} has parts of {sorted({p.write for p in told})}")
    if told and told[0].write.sequence != sequence:
        raise InvariantBroken(f"batch {sequence} has parts of {told[0].write}")
    return told


def confirm(write: WriteId, known: Known | None) -> None:
    """Tasks were told that the batch is committed: raise unless it is (invariant 2)."""
    # The writer was taken over, or its memory was removed, between a task's question and the
    # commit.
    if known is None or known.generation != write.generation:
        raise GroupFenced(
            f"{write} was begun, and another query writes under its name now",
            hint="give every query a transactionalId of its own",
        )
    if known.committed_sequence < write.sequence:
        raise InvariantBroken(f"{write} was left out, and is not committed")


def check_repeated(write: WriteId, known: Known, rows: int) -> None:
    """A batch came again: raise if it has other rows than were committed (invariant 4).

    Spark runs a batch again with the rows that it had. If their number is another one, somebody
    has changed the checkpoint, and rows that were never written are about to be skipped.
    """
    if known.committed_sequence == write.sequence and known.rows not in (None, rows):
        raise CheckpointMismatch(
            f"{write} was committed with {known.rows} rows, and has {rows} now",
            hint="the checkpoint was changed by hand: restore it; if the query gives other rows "
            "for the same input, set the option repeatedRows to ignore",
        )


def note_of(rows: int) -> str:
    """What is kept with a commit."""
    return msgspec.json.encode({"rows": rows}).decode()


def rows_in(note: str) -> int | None:
    try:
        return msgspec.json.decode(note, type=_Noted).rows if note else None
    except msgspec.MsgspecError:
        return None  # another writer's note says nothing here


class _Noted(msgspec.Struct):
    rows: int


def refused(write: WriteId, error: MagnetarError, timeout_s: float) -> MagnetarError:
    """What to tell the user when a commit was refused: nothing of the batch is there."""
    # A part of the batch is over at the server, mostly because it took too long.
    if isinstance(error, InvalidTxnStatus | TransactionNotFound | TransactionAborted):
        return TransactionAborted(
            f"{write} was not committed, a transaction of it is over: {error.args[0]}",
            hint=f"a batch may take {timeout_s:g} s from its first row to its commit; raise "
            "transactionTimeout, or make batches smaller; a restart runs it again",
        )
    # A second driver has the group. Everything else is told as it is.
    if isinstance(error, GroupFenced):
        return GroupFenced(
            f"{write} was not committed: {error.args[0]}",
            hint="another run of this query has been started; only the last one goes on",
        )
    return error
