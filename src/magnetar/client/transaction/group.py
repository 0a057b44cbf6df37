"""Groups of transactions: many writers, one commit. Magnetar's own; Apache Pulsar has none.

Owns: `TransactionGroup`, `GroupTicket` (what another process needs to take part), `GroupStatus`.

Invariants:
1. A member is committed by its group and by nothing else. A commit of a sequence decides on all
   members up to it: those that it names are committed, all others are aborted.
2. Before a member of this process is committed, everything of it is durable.
3. A commit that is repeated changes nothing; what had been decided is then asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from magnetar.client.transaction.coordinators import CoordinatorClients
from magnetar.client.transaction.transaction import Beginning, Transaction
from magnetar.client.transaction.transaction_core import TransactionCore
from magnetar.errors import GroupFenced, InvalidTxnStatus, ProducerFenced, TransactionNotFound
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb

NEVER: Final = -1
"""The sequence of a group that has committed none."""

Result = TypeVar("Result")


class GroupTicket(NamedTuple):
    """The name of an open group; any process may begin transactions with it."""

    application: str
    epoch: int
    coordinator: int


class GroupStatus(NamedTuple):
    """A group as the server knows it."""

    epoch: int
    generation: str
    run: str
    committed_sequence: int
    """The last one; -1: none."""
    committed: tuple[TxnId, ...]
    """Its transactions."""
    note: str = ""
    """What its writer noted with it."""


BeginMember = Callable[[GroupTicket, int, float], Beginning]


class TransactionGroup:
    """One run of a writer that many tasks take part in. Made by `Client.open_group`.

    group = await client.open_group("nightly", generation="query-1", run="run-1")
    async with group.transaction(sequence=0) as txn:    # in any number of tasks and processes
        await producer.send(b"row", txn=txn)
    await group.commit(0, [txn])
    """

    def __init__(
        self,
        coordinators: CoordinatorClients,
        ticket: GroupTicket,
        begin: BeginMember,
        *,
        committed_sequence: int = NEVER,
    ) -> None:
        self._coordinators = coordinators
        self._ticket = ticket
        self._begin = begin
        self._committed_sequence = committed_sequence
        # The members of this process, by their cores; one that nobody holds any more needs no news.
        self._members: WeakKeyDictionary[TransactionCore, int] = WeakKeyDictionary()

    @property
    def ticket(self) -> GroupTicket:
        """The ticket for `Client.group` in other processes."""
        return self._ticket

    @property
    def committed_sequence(self) -> int:
        """The last sequence that is known to be committed; -1: none."""
        return self._committed_sequence

    def transaction(self, sequence: int, *, timeout: float = 60.0) -> Beginning:
        """A transaction of a sequence. Leaving its block without an error prepares it."""

        async def begin() -> Transaction:
            txn = await _fenced(self._begin(self._ticket, sequence, timeout))
            self._members[txn._core] = sequence
            return txn

        return Beginning(begin)

    async def commit(
        self, sequence: int, transactions: Iterable[Transaction | TxnId], *, note: str = ""
    ) -> bool:
        """Commit these transactions of a sequence, and abort all others up to it.

        False: the sequence had been committed before, and this changed nothing. Raises
        `GroupFenced` if a later run has taken the group over. A `note`, up to 256 bytes, is kept
        with the commit for whoever asks for the status.
        """
        chosen = list(transactions)
        for each in chosen:
            if isinstance(each, Transaction):
                self._members[each._core] = sequence
        ids = [each.txn_id if isinstance(each, Transaction) else each for each in chosen]
        # Invariant 2. Those of other processes have been prepared there, before their ids came
        # here.
        for member in [each for each in self._members if each.txn_id in ids]:
            await member.prepare()
        answer = await _fenced(
            self._ask(
                "COMMIT_GROUP",
                epoch=self._ticket.epoch,
                sequence=sequence,
                transactions=[{"most_bits": each.most, "least_bits": each.least} for each in ids],
                **({"note": note} if note else {}),
            )
        )
        self._committed_sequence = max(self._committed_sequence, sequence)
        # Invariant 3: an earlier commit of the sequence decided, maybe on other transactions.
        if answer.replayed:
            status = await self.status()
            ids = list(status.committed) if status.committed_sequence == sequence else []
        for member, at in list(self._members.items()):
            # Earlier sequences too: what was not committed with them is aborted now.
            if at <= sequence:
                member.decided(committed=member.txn_id in ids)
                del self._members[member]
        return not answer.replayed

    async def abort(self, transactions: Iterable[TxnId]) -> None:
        """Abort those of these transactions, begun anywhere, that are not decided yet."""
        for each in transactions:
            try:
                await self._coordinators.ask(each, "END_TXN", txn_action=pb.ABORT)
            except (InvalidTxnStatus, TransactionNotFound):
                continue  # it was decided, maybe long ago

    async def status(self) -> GroupStatus:
        """What the server knows of the group."""
        return _status(await self._ask("GROUP_STATUS"))

    async def _ask(self, what: str, **fields: object) -> Any:
        return await self._coordinators.ask_group(
            self._ticket.coordinator, what, application=self._ticket.application, **fields
        )


async def open_group(
    coordinators: CoordinatorClients,
    application: str,
    generation: str,
    run: str,
    begin: BeginMember,
) -> TransactionGroup:
    """Open a group, which ends every earlier run of it."""
    answer = await _fenced(
        coordinators.ask_group(
            None, "OPEN_GROUP", application=application, generation=generation, run=run
        )
    )
    ticket = GroupTicket(application, answer.epoch, answer.tc_id)
    sequence = answer.committed_sequence
    return TransactionGroup(coordinators, ticket, begin, committed_sequence=sequence)


async def group_status(coordinators: CoordinatorClients, application: str) -> GroupStatus:
    """What the server knows of a group, which need not be open here."""
    return _status(await coordinators.ask_group(None, "GROUP_STATUS", application=application))


def _status(answer: Any) -> GroupStatus:
    committed = tuple(TxnId(each.most_bits, each.least_bits) for each in answer.committed)
    return GroupStatus(
        answer.epoch,
        answer.generation,
        answer.run,
        answer.committed_sequence,
        committed,
        answer.note,
    )


async def _fenced(work: Awaitable[Result]) -> Result:
    """Groups and producers are fenced with the same code on the wire."""
    try:
        return await work
    except ProducerFenced as error:
        raise GroupFenced(str(error)) from error
