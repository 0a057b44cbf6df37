"""Mode "single": one transaction for all tasks of a batch, with a token in it.

Owns: `begin`, on the driver before the tasks; `SingleTask`, a task's side; `commit` and `abort`.
What the notes mean is `single_commit`'s to say.

Invariants:
1. A task writes only after its claim is stored. From the moment at which a driver reads the claims
   until it has ended the transaction, no more can be stored.
2. The token is sent after everything else of the transaction is durable, and the transaction ends
   right after it.

Relies on: a regular topic of notes for each writer, `<commitTopic>-<transactional id>`, and one
beside it for the claims of tasks. They hold a few notes of each batch; what is not needed any more
is acknowledged, so that retention removes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from magnetar.blocking import Client, Consumer, Producer, Transaction
from magnetar.client.client import Client as AsyncClient
from magnetar.client.produce.settings import AccessMode
from magnetar.errors import (
    DeadlineExceeded,
    InvalidTxnStatus,
    MagnetarError,
    ProducerBusy,
    ServiceNotReady,
    TransactionAborted,
    TransactionNotFound,
)
from magnetar.model.subscriptions import InitialPosition
from magnetar.runtime.logs import logger
from magnetar.spark.links import patiently
from magnetar.spark.sink import group_commit
from magnetar.spark.sink.group_commit import TaskPlan, TaskReport, WriteId
from magnetar.spark.sink.single_commit import (
    Note,
    Notes,
    check_attempts,
    claims_of,
    orphans_in,
    refuse_retry,
)
from magnetar.wire.messages import TxnId

_LOG: Final = logger(__name__)
_SUBSCRIPTION: Final = "magnetar-spark"
_CLAIMS: Final = "-claims"
# Two silent intervals of keepalive, 30 s each by default, and one more to spare.
_CLAIM_S: Final = 90.0
"""How long a task waits for its claim: longer than a broker needs to give up a dead connection."""


class Mode:
    """The transactions of one sink: begun, joined and aborted here."""

    def __init__(
        self, client: Client, commit_topic: str, timeout_s: float, *, scalable: bool | None
    ) -> None:
        self.client = client
        self.timeout_s = timeout_s
        self.scalable = scalable
        self._commit_topic = commit_topic

    def topic(self, write: WriteId) -> str:
        return f"{self._commit_topic}-{quote(write.application, safe='')}"

    def begin(self, retry_s: float) -> TxnId:
        """Begin the transaction of a batch on the driver; brokers out of reach are waited for."""

        async def attempt(asked: AsyncClient) -> TxnId:
            begun = await asked.transaction(timeout=self.timeout_s, scalable=self.scalable)
            return begun.txn_id

        return patiently(self.client, "the transaction of a batch", attempt, retry_s)

    def joined(self, txn: TxnId, *, ends_here: bool = False) -> Transaction:
        return self.client.join_transaction(
            txn, time_left=self.timeout_s, scalable=self.scalable, ends_here=ends_here
        )

    def abort(self, txn: TxnId) -> None:
        """Abort a transaction, if it is not decided."""
        try:
            self.joined(txn, ends_here=True).abort()
        except (InvalidTxnStatus, TransactionNotFound) as error:
            _LOG.debug("was-decided", txn=f"({txn.most},{txn.least})", reason=str(error))


class SingleTask:
    """The only attempt of a task."""

    def __init__(self, mode: Mode, write: WriteId, txn: TxnId, retry: int, attempt: int) -> None:
        self._mode = mode
        self._write = write
        self._txn_id = txn
        self._retry = retry
        self._attempt = attempt
        self._txn: Transaction | None = None

    @property
    def txn(self) -> Transaction | None:
        return self._txn

    def begin(self) -> TaskPlan:
        """Say that this attempt is going to write."""
        # A second attempt: what the first wrote cannot be told apart, so the whole batch is given
        # up (`single_commit`, invariant 3).
        if self._retry:
            self._abort()
        refuse_retry(self._write, self._retry)
        # Invariant 1: first the claim, then rows. Claims go to a topic of their own, which a driver
        # that commits takes for itself.
        claim = Note(
            "claim",
            self._write.generation,
            self._write.sequence,
            txn=(self._txn_id.most, self._txn_id.least),
            attempt=self._attempt,
        )
        topic = self._mode.topic(self._write) + _CLAIMS

        async def attempt(asked: AsyncClient) -> None:
            try:
                async with await asked.producer(topic) as producer:
                    await producer.send(claim.to_bytes())
            except ProducerBusy as error:
                # A driver that was replaced is about to commit, or died a moment ago.
                # Turned into an error that passes, so that `patiently` waits.
                raise ServiceNotReady(f"{topic} is another driver's: {error}") from error

        patiently(self._mode.client, "the claim of a task", attempt, _CLAIM_S)
        self._txn = self._mode.joined(self._txn_id)
        return TaskPlan.WRITE

    def finish(self, rows: int, size: int) -> TaskReport:
        if self._txn is None:
            return TaskReport(self._write)
        # Durable before Spark hears of it; the driver ends it.
        self._txn.prepare()
        self._txn.close()
        return TaskReport(
            self._write, None, self._txn_id, attempt=self._attempt, rows=rows, bytes=size
        )

    def explained(self, error: MagnetarError) -> MagnetarError:
        if self._txn is None:
            return error
        return group_commit.refused(self._write, error, self._mode.timeout_s)

    def give_up(self) -> None:
        """What this attempt wrote cannot be told from the rest: nothing of the batch may stay.

        An attempt that has not written anything is no harm to those that did.
        """
        if self._txn is not None:
            self._abort()

    def _abort(self) -> None:
        try:
            self._mode.abort(self._txn_id)
        except MagnetarError as error:
            _LOG.info("batch-not-aborted", write=str(self._write), reason=str(error))


def commit(
    mode: Mode, sequence: int, parts: Sequence[TaskReport | None], *, same_rows: bool = True
) -> None:
    """Spark commits a batch. Raises if it is not committed, and nothing of it is there then."""
    # From here to the end: shut other drivers out, learn what is committed, and only then decide.
    told = group_commit.checked(sequence, parts)
    if not told:
        return
    write = told[0].write
    txn = next((each.txn for each in told if each.txn is not None), None)
    rows = sum(each.rows for each in told)
    topic = mode.topic(write)
    with _exclusive(mode, topic) as producer:
        notes = _read(mode, topic, producer, write)
        group_commit.check_writer(write, notes.known)
        # A repeated batch: what was written again is thrown away.
        if group_commit.plan(write, notes.committed_in(write.generation)) is TaskPlan.SKIP:
            if txn is not None:
                mode.abort(txn)
            if same_rows and notes.known is not None:
                group_commit.check_repeated(write, notes.known, rows)
            return
        # A batch without rows: it needs a token all the same, or its number would be missing.
        if txn is None:
            _end(mode, producer, write, mode.begin(0.0), rows)
            return
        # Until the end of the transaction nobody else can claim to write in it.
        with _exclusive(mode, topic + _CLAIMS) as gate:
            claims = _claims(mode, topic + _CLAIMS, gate, write)
            # They would hold back readers of the topic until they time out.
            for orphan in orphans_in(claims, txn):
                mode.abort(orphan)
            check_attempts(write, claims_of(claims, txn), told)
            _end(mode, producer, write, txn, rows)


def abort(mode: Mode, parts: Sequence[TaskReport | None]) -> None:
    """Spark gives a batch up, maybe one that was committed."""
    for txn in {each.txn for each in parts if each is not None and each.txn is not None}:
        try:
            mode.abort(txn)
        except MagnetarError as error:
            _LOG.info("batch-not-aborted", reason=str(error))


def _end(mode: Mode, producer: Producer[bytes], write: WriteId, txn: TxnId, rows: int) -> None:
    pair = (txn.most, txn.least)
    ids = (write.generation, write.sequence)
    # Order: announcement, token, commit. Who reads the announcement aborts the transaction unless
    # it is decided, so a driver that dies here holds up nobody (`single_commit`, invariant 2).
    producer.send(Note("announcement", *ids, txn=pair).to_bytes())
    last = mode.joined(txn, ends_here=True)
    try:
        producer.send(Note("token", *ids, txn=pair, rows=rows).to_bytes(), txn=last)
        last.commit()
    except MagnetarError as error:
        raise group_commit.refused(write, error, mode.timeout_s) from error
    _LOG.info(
        "committed-group",
        group=f"{write.application}/{write.sequence}",
        transactions=f"({txn.most},{txn.least})",
    )


def _read(mode: Mode, topic: str, producer: Producer[bytes], write: WriteId) -> Notes:
    """Read all that was noted before this moment, with nothing undecided among it."""
    # The fence is the end of what is to be read: a topic has no "everything up to now".
    nonce = _fence(producer, write)
    notes = Notes()
    with _consumer(mode.client, topic) as consumer:
        message: Any = None
        before: Any = None  # everything up to here is needed no more
        # It ends with the fence of this very read; fences of others before it are passed over.
        while True:
            previous, message = message, _next(mode, consumer)
            note = Note.from_bytes(message.value)
            if note.kind == "fence" and note.nonce == nonce:
                break
            to_abort = notes.take(note)
            # What stands behind an open transaction is not delivered: the fence would come only
            # after that one's timeout.
            if to_abort is not None:
                mode.abort(to_abort)
            # One token is enough to know how far it is: what stands before the last one can go.
            if note.kind == "token":
                before = previous
        if before is not None:
            consumer.ack_cumulative(before).wait()
    return notes


def _claims(mode: Mode, topic: str, gate: Producer[bytes], write: WriteId) -> list[Note]:
    """What tasks have claimed since the last commit."""
    found: list[Note] = []
    nonce = _fence(gate, write)
    with _consumer(mode.client, topic) as consumer:
        while True:
            message = _next(mode, consumer)
            note = Note.from_bytes(message.value)
            # Everything up to here is settled by this commit, one way or the other.
            if note.kind == "fence" and note.nonce == nonce:
                consumer.ack_cumulative(message).wait()
                return found
            found.append(note)


def _exclusive(mode: Mode, topic: str) -> Producer[bytes]:
    """A producer that shuts all others out, those that are there and those that come."""
    access = AccessMode.EXCLUSIVE_WITH_FENCING
    return mode.client.producer(topic, access_mode=access, batching=False)


def _fence(producer: Producer[bytes], write: WriteId) -> str:
    nonce = uuid.uuid4().hex
    producer.send(Note("fence", write.generation, write.sequence, nonce=nonce).to_bytes())
    return nonce


def _consumer(client: Client, topic: str) -> Consumer[bytes]:
    return client.consumer(topic, _SUBSCRIPTION, initial_position=InitialPosition.EARLIEST)


def _next(mode: Mode, consumer: Consumer[bytes]) -> Any:
    """What is undecided is decided within the timeout of transactions, and then delivered."""
    try:
        # A minute more than a transaction may take: brokers end late ones in their own time.
        return consumer.receive(timeout=mode.timeout_s + 60.0)
    except DeadlineExceeded as error:
        raise TransactionAborted(
            "the notes of earlier commits cannot be read: a transaction before them stays open",
            hint="look at the topic of the option commitTopic; a restart runs the batch again",
        ) from error
