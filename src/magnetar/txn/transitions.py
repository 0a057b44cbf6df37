"""The one decision on a transaction, alone or in a group, as transitions of records (pure).

Owns: the transitions of headers and group records, and how a member's state is read from the two.

Invariants:
1. A final state never changes; who asks for the same one again gets the same answer.
2. A transaction that is alone is decided by its header. A member of a group is decided by the
   group's record alone, and its header is a copy of that: copied (`rolled_forward`) before the
   record forgets the ids of a sequence.
3. An epoch of a group is over when a later one begins: nothing of it is decided afterwards, and
   what was not decided is aborted. A decided member stays committed.
4. Sequences of a group are committed in ascending order, each at most once. Of a sequence that is
   committed, or is below one that is, every other member is aborted. A new generation begins anew:
   its first sequence is not taken for one that an earlier generation committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from magnetar.errors import (
    GroupFenced,
    InvalidTxnStatus,
    NotAllowed,
    TooManyRequests,
    TransactionNotFound,
)
from magnetar.txn.ids import to_text
from magnetar.txn.records import NEVER, Group, GroupMembership, Header, Retired, State
from magnetar.wire.messages import TxnId

BY_DEADLINE: Final = "deadline"
BY_OPERATOR: Final = "operator"
BY_CLIENT: Final = "client"
"""Deciders: the deadline, or somebody, whose address follows if it is known."""

ANY_RUN: Final = "*"
"""As a retired run: all runs of that generation."""


# --- one transaction


def begun(
    txn: TxnId,
    *,
    now_ms: int,
    timeout_ms: int,
    owner: str = "",
    group: GroupMembership | None = None,
    client: str = "",
) -> Header:
    return Header(
        to_text(txn), now_ms, now_ms + timeout_ms, owner=owner, group=group, client=client
    )


def check_timeout(timeout_ms: int, most_seconds: float) -> None:
    """Raise unless a transaction may be begun with a timeout."""
    if not 0 < timeout_ms <= most_seconds * 1000:
        raise NotAllowed(
            f"a transaction cannot have a timeout of {timeout_ms} ms",
            hint=f"from 1 ms to {most_seconds:g} s (txn_timeout_max_seconds)",
        )


def ended(header: Header, state: State, now_ms: int, by: str = "") -> Header:
    """The header with that outcome, and who decided; InvalidTxnStatus if it has another one."""
    # The same END_TXN again, after a lost answer or a failover: the same answer ('one decision').
    if header.state == state:
        return header
    # The other outcome was stored first: by the deadline, an operator, or a second client.
    if header.state != "OPEN":
        raise InvalidTxnStatus(f"transaction {header.txn} is {header.state}, not {state}")
    return replace(header, state=state, finalized_ms=now_ms, decided_by=by)


# --- members of a group


def state_of(header: Header, group: Group | None) -> State:
    """A transaction's state. The group was read first: what it says may be older, never wrong."""
    if header.is_final or header.group is None:
        return header.state
    if group is None:
        # A group outlives every header that points to it, unless nobody came for days.
        return "ABORTED"
    return member_state(header.txn, header.group, group)


def member_state(txn: str, member: GroupMembership, group: Group) -> State:
    # The order matters: a decided member has a sequence that is at or below the last, and would
    # count as aborted by the next test.
    if txn in group.decided:
        return "COMMITTED"
    # Three ways to lose: aborted by name (END_TXN, deadline), fenced by a later epoch, or left out
    # when its sequence, or a later one, was committed.
    if txn in group.aborted or member.epoch != group.epoch or member.sequence <= group.sequence:
        return "ABORTED"
    return "OPEN"


def decider(header: Header, group: Group) -> str:
    """What of a group's record has decided a member that is not open."""
    member = header.group
    assert member is not None, "its caller has checked"
    if header.txn in group.decided:
        return f"commit of sequence {member.sequence} of its group"
    # The same order as in `member_state`.
    if header.txn in group.aborted:
        return "abort in its group"
    if member.epoch != group.epoch:
        return f"epoch {group.epoch} of its group, which fenced epoch {member.epoch}"
    return f"commit of sequence {group.sequence} of its group, without it"


def is_surely_told(member: GroupMembership, group: Group) -> bool:
    """Whether the record alone tells the state of a member that it does not name.

    Of a sequence before the last the record has forgotten what was committed: headers know it.
    """
    # In the present epoch the record names all winners of its last sequence; those of earlier ones
    # are forgotten, and absence proves nothing.
    if member.epoch == group.epoch:
        return member.sequence >= group.sequence
    # Of an epoch that is over: what is beyond all that any generation committed was surely not.
    return member.sequence > max(group.sequence, group.past)


def opened(
    group: Group | None,
    application: str,
    generation: str,
    run: str,
    *,
    now_ms: int,
    owner: str = "",
    retired_max: int,
) -> Group:
    """A writer comes: the same one again, or a new one, whose epoch ends all older ones."""
    if not generation or not run or ANY_RUN in (generation, run):
        raise NotAllowed("a group needs a generation and a run", hint="use any text but '*'")
    # First writer of this application, or the first after the record's retention.
    if group is None:
        return Group(application, 1, generation, run, changed_ms=now_ms, owner=owner)
    # The same run again, after a lost answer: the same epoch, so it does not fence itself.
    if (group.generation, group.run) == (generation, run):
        return group
    # A zombie: a run, or a whole generation, that another one has taken over from
    # must not fence the living.
    former = (Retired(generation, run), Retired(generation, ANY_RUN))
    if any(each in group.retired for each in former):
        raise GroupFenced(f"run {run!r} of {application!r} was superseded")
    # Another run of the present generation retires only that run; a new generation retires all runs
    # of the one before with a single entry.
    over = Retired(group.generation, group.run if group.generation == generation else ANY_RUN)
    kept = [each for each in group.retired if each.generation != over.generation or not _all(over)]
    is_anew = _all(over)
    # A restarted query (same generation) goes on behind its last sequence; a new query counts from
    # its own first one, and `past` remembers what is no longer comparable.
    return replace(
        group,
        epoch=group.epoch + 1,
        sequence=NEVER if is_anew else group.sequence,
        past=max(group.past, group.sequence) if is_anew else group.past,
        generation=generation,
        run=run,
        aborted=(),  # those of the epoch that is over are aborted by its end
        retired=(*kept, over)[-retired_max:],
        changed_ms=now_ms,
    )


def check_epoch(group: Group | None, application: str, epoch: int) -> Group:
    """The group, if a writer of this epoch may still do something."""
    if group is None:
        raise TransactionNotFound(f"there is no group {application!r}", hint="open it first")
    if epoch != group.epoch:
        raise GroupFenced(f"{application!r} is at epoch {group.epoch}, not {epoch}")
    return group


def check_new_member(group: Group | None, member: GroupMembership) -> None:
    """Whether a transaction may be begun for a sequence."""
    present = check_epoch(group, member.application, member.epoch)
    if member.sequence <= present.sequence:
        raise InvalidTxnStatus(
            f"sequence {member.sequence} of {member.application!r} is behind "
            f"{present.sequence}, which is committed",
            hint="go on behind it: its work is done",
        )


class Committed(NamedTuple):
    """The outcome of COMMIT_GROUP, and the record that says so."""

    group: Group
    replayed: bool
    """The sequence was committed before: nothing changed."""


def committed(
    group: Group | None,
    application: str,
    epoch: int,
    sequence: int,
    headers: Mapping[str, Header | None],
    *,
    now_ms: int,
    ids_max: int,
    note: str = "",
) -> Committed:
    """Name the winners of a sequence; `headers` holds all that are named.

    Only once the ids of the last sequence are rolled forward, for they are forgotten here.
    """
    present = check_epoch(group, application, epoch)
    # The batch is repeated after a crash: it was committed before, and nothing is decided twice.
    if sequence <= present.sequence:
        return Committed(present, replayed=True)
    if len(headers) > ids_max:
        raise too_many_in_commit(len(headers), ids_max)
    for txn, header in headers.items():
        # All or nothing: one transaction that is not exactly of this writer and sequence, or is
        # over, refuses the whole commit before anything is stored.
        member = None if header is None else header.group
        if header is None or member is None or member.application != application:
            raise TransactionNotFound(f"transaction {txn} is not one of {application!r}")
        if member.epoch != epoch or member.sequence != sequence:
            raise InvalidTxnStatus(
                f"transaction {txn} was begun for sequence {member.sequence}",
                hint="commit it with that sequence, by the writer that began it",
            )
        if state_of(header, present) != "OPEN":
            raise InvalidTxnStatus(f"transaction {txn} is {state_of(header, present)}")
    later = replace(
        present,
        sequence=sequence,
        decided=tuple(headers),
        note=note,
        aborted=(),
        changed_ms=now_ms,
    )
    return Committed(replace(later, aborted=_still_needed(present, headers)), replayed=False)


def too_many_in_commit(count: int, most: int) -> TooManyRequests:
    return TooManyRequests(
        f"{count} transactions in one commit; the limit is {most}",
        hint="commit fewer at once, or raise txn_group_commit_max",
    )


def _still_needed(group: Group, headers: Mapping[str, Header | None]) -> tuple[str, ...]:
    """Aborted members may have a later sequence; which, the record does not say: keep them."""
    return tuple(each for each in group.aborted if each not in headers)


def member_aborted(
    group: Group | None, header: Header, *, now_ms: int, aborted_max: int
) -> Group | None:
    """Abort one member: the group's record, or None if it is aborted without that."""
    member = header.group
    assert member is not None, "its caller has checked"
    # Without its group a member counts as aborted already, see `state_of`.
    if group is None:
        return None
    state = member_state(header.txn, member, group)
    if state == "COMMITTED":
        raise InvalidTxnStatus(f"transaction {header.txn} is COMMITTED")
    # By its epoch or sequence: naming it would only make the record larger.
    if state == "ABORTED":
        return None
    # The record is one value of the store; the limit keeps it within what a value may have.
    if len(group.aborted) >= aborted_max:
        raise TooManyRequests(
            f"{group.application!r} has {aborted_max} aborted members, its limit",
            hint="commit the sequence, or open the group anew",
        )
    return replace(group, aborted=(*group.aborted, header.txn), changed_ms=now_ms)


def forgotten(group: Group, gone: Sequence[str]) -> Group:
    """Aborted members whose headers say so themselves need not be named any more."""
    kept = tuple(each for each in group.aborted if each not in gone)
    return group if kept == group.aborted else replace(group, aborted=kept)


def _all(retired: Retired) -> bool:
    return retired.run == ANY_RUN
