"""Pure: one transaction for all tasks of a batch, and notes that say what was committed.

For servers without transaction groups. The driver begins the transaction, the tasks write in it,
and with them goes a token into a topic of notes: what that topic shows is what is committed.

Owns: `Note`, `Notes` (what a reader of the topic has learnt), `check_attempts`.

The topic of a writer has, in this order for each batch: a fence of the driver that is about to
commit; the announcement of its transaction; the token, inside that transaction.

Invariants:
1. Who has read up to its own fence knows every token that there will ever be before it: the fence
   is sent by a producer that shut all others out, and it is only delivered when every transaction
   before it is decided.
2. A transaction that is announced and not known to be committed is aborted by who reads of it. So
   a driver that died between token and commit holds up nobody.
3. A batch is committed only if the attempts that wrote in its transaction are exactly those that
   Spark handed to the driver: with one transaction for all, what a lost attempt wrote cannot be
   told apart, and the batch is run again. One that has not claimed by then cannot do so any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from magnetar.errors import TransactionAborted, UnreadableMessage
from magnetar.spark.sink.group_commit import NEVER, Known, TaskReport, WriteId
from magnetar.wire.messages import TxnId

RETRY_HINT: Final = (
    "with commitMode=single a task cannot be tried again; restart the query, which runs the batch "
    "again, or write to a server that has transaction groups"
)


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a topic of notes."""

    kind: Literal["fence", "announcement", "token", "claim"]
    generation: str
    sequence: int
    nonce: str = ""
    """Of a fence: whose it is."""
    txn: tuple[int, int] = (0, 0)
    attempt: int = -1
    """Of a claim: the task attempt that is about to write in the transaction."""
    rows: int | None = None
    """Of a token: how many the batch has."""

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Note:
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise UnreadableMessage(
                f"the topic of notes has something else in it: {error}",
                hint="give the option commitTopic a topic that nobody else writes to",
            ) from error


class Notes:
    """The state that the notes tell, as they are read one by one."""

    def __init__(self) -> None:
        self.known: Known | None = None
        """The last token."""

    def committed_in(self, generation: str) -> int:
        """The last batch of a query that is committed."""
        # Another query's commits say nothing of this one's batches.
        if self.known is None or self.known.generation != generation:
            return NEVER
        return self.known.committed_sequence

    def take(self, note: Note) -> TxnId | None:
        """A transaction to abort, unless it is decided, before more is read (invariant 2)."""
        # Visible only if its transaction was committed; the last one wins, since notes are in
        # order.
        if note.kind == "token":
            self.known = Known(note.generation, note.sequence, note.rows)
        return TxnId(*note.txn) if note.kind == "announcement" else None


def claims_of(notes: Iterable[Note], txn: TxnId) -> list[int]:
    """The attempts that said they would write in a transaction."""
    return [each.attempt for each in notes if each.kind == "claim" and TxnId(*each.txn) == txn]


def orphans_in(notes: Iterable[Note], txn: TxnId) -> list[TxnId]:
    """Transactions that were claimed before this one, and that nobody has ended.

    Their drivers are gone or replaced. Until they end nobody reads what comes after them.
    """
    # A dict keeps the order of the claims, which is that of their beginning.
    found: dict[TxnId, None] = {}
    for each in notes:
        if each.kind == "claim":
            if TxnId(*each.txn) == txn:
                break
            found[TxnId(*each.txn)] = None
    return [*found]


def check_attempts(write: WriteId, claimed: Sequence[int], parts: Sequence[TaskReport]) -> None:
    """Raise unless just those attempts wrote that Spark has chosen (invariant 3)."""
    chosen = {each.attempt for each in parts if each.txn is not None}
    # Speculation, or a task that failed and was repeated: its rows are in the one transaction too.
    lost = sorted(set(claimed) - chosen)
    if lost:
        raise TransactionAborted(
            f"{write} was not committed: a task of it was run more than once (attempt {lost})",
            hint=RETRY_HINT,
        )


def refuse_retry(write: WriteId, attempt: int) -> None:
    """Before a task writes: raise if it is not its first attempt."""
    if attempt > 0:
        raise TransactionAborted(
            f"a task of {write} failed and is tried again (attempt {attempt})", hint=RETRY_HINT
        )
