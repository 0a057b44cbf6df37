"""Transaction groups: one record decides on all transactions of a distributed writer.

Owns: `TransactionGroups`: OPEN_GROUP, COMMIT_GROUP, GROUP_STATUS, aborts of members, and the copies
of what the group's record says into the headers of its members.

Invariants:
1. A member is decided by a compare-and-set of the group's record and nothing else.
2. Every change of a record moves its `changed_ms` forward: equal records are the same record. A
   commit is decided on the very record that was read before the headers that it names.
3. A record forgets the ids of a sequence only after their headers say COMMITTED, and the name of an
   aborted member only after its header says ABORTED.
4. After a change of the record everyone on this broker learns all that it decided without an await.
5. A record is deleted only after its retention, with no open member left.

All changes of one group are made by the broker that leads its coordinator, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence, Set
from contextlib import aclosing
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from magnetar.errors import BadVersion, NotAllowed, ServiceNotReady
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import TXN_GROUP_COMMITS
from magnetar.txn import transitions
from magnetar.txn.coordinator_partitions import CoordinatorPartitions, partition_of
from magnetar.txn.ids import from_text, to_text
from magnetar.txn.open_transactions import OpenTransactions, cause_of
from magnetar.txn.records import GROUPS, Group, GroupMembership, Header, State, decode, group_key
from magnetar.txn.store import TxnStore
from magnetar.txn.transitions import Committed
from magnetar.wire.messages import TxnId

NAME_BYTES_MAX: Final = 256
"""Of an application, a generation, a run, a note, as they are stored: a record has many."""

# Changes of a group take turns here, so only a former leader's write can come between: rare.
_ATTEMPTS: Final = 10
# Bounds the reads and puts of one group in flight, and how long one record's change takes.
_AT_ONCE: Final = 100
_TOUCH_PART: Final = 10
"""A group in use is touched when this part of its retention has passed."""

Item = TypeVar("Item")
Background = Callable[[Coroutine[Any, Any, None], str], None]


class _Desk:
    """The state of one group at its coordinator: its lock, and how far headers are copied."""

    def __init__(self) -> None:
        # Whatever changes this group's record, or relies on what it says, holds this.
        self.turn = asyncio.Lock()
        self.rolled: tuple[int, int] | None = None
        """The epoch and sequence up to which all headers say what the record said."""
        self.final: set[str] = set()
        """Aborted members whose headers say so: the next change of the record forgets them."""


class TransactionGroups:
    """The groups of the coordinators that this broker leads."""

    def __init__(
        self,
        store: TxnStore,
        partitions: CoordinatorPartitions,
        open_transactions: OpenTransactions,
        clock: Clock,
        limits: Limits,
        background: Background,
    ) -> None:
        self._store = store
        self._partitions = partitions
        self._open_transactions = open_transactions
        self._clock = clock
        self._limits = limits
        self._background = background
        self._desks: dict[str, _Desk] = {}

    # --- commands

    async def open(self, application: str, generation: str, run: str, owner: str) -> Group:
        """A run of a writer begins; all epochs before its own are over."""
        self._check(application, generation, run)

        def opened(present: Group | None) -> Group:
            _check_owner(present, owner)
            group = transitions.opened(
                present,
                application,
                generation,
                run,
                now_ms=self._later(present),
                owner=owner,
                retired_max=self._limits.txn_group_retired_max,
            )
            # The same run again: nothing changes but the time, which keeps the
            # record from its retention.
            return self._touched(group) if group is present else group

        desk = self._desk(application)
        async with desk.turn:
            group = await self._store.change_group(application, opened)
            assert group is not None, "a group that was opened is there"
            # The new epoch fences the old one: its members are over, and participants here must
            # know before the answer lets the new writer begin ('fence').
            self._tell(group)
        self._background(self._settle(application), f"group {application}")
        return group

    async def check_new(self, member: GroupMembership, owner: str) -> None:
        """Raise unless a transaction may be begun in a group."""
        self._check(member.application)
        group = await self._store.group(member.application)
        _check_owner(group, owner)
        transitions.check_new_member(group, member)

    async def began(self, header: Header) -> None:
        """A member was stored: it counts from now on, unless its time was over meanwhile."""
        member = header.group
        assert member is not None, "its caller has checked"
        async with self._desk(member.application).turn:
            # Once more, under the lock: OPEN_GROUP or COMMIT_GROUP may have ended its time while
            # the header was written. The header then counts as aborted by the record alone.
            await self.check_new(member, header.owner)
            self._open_transactions.began(header)

    async def commit(
        self,
        application: str,
        epoch: int,
        sequence: int,
        txns: Sequence[TxnId],
        owner: str,
        note: str = "",
    ) -> Committed:
        """The transactions listed commit, all others up to that sequence abort."""
        self._check(application, *([note] if note else []))
        most = self._limits.txn_group_commit_max
        if len(txns) > most:
            raise transitions.too_many_in_commit(len(txns), most)
        # Before waiting for the lock: a fenced writer hears of it at once.
        transitions.check_epoch(await self._store.group(application), application, epoch)
        desk = self._desk(application)
        async with desk.turn:
            outcome, headers = await self._decide(
                desk, application, epoch, sequence, txns, owner, note
            )
            self._tell(outcome.group)
            # A writer that repeats a batch after a crash has written it again, in new transactions:
            # the first ones won, and these must not stay open.
            if outcome.replayed:
                await self._abort(desk, application, _members(headers.values(), application))
        TXN_GROUP_COMMITS.labels("replayed" if outcome.replayed else "committed").inc()
        # The record has decided, and the answer need not wait for copies in the headers.
        self._background(self._settle(application), f"group {application}")
        return outcome

    async def status(self, application: str, owner: str) -> Group | None:
        """What was decided last, also in the headers; None: there is no such group."""
        self._check(application)
        group = await self._store.group(application)
        if group is None:
            return None
        _check_owner(group, owner)
        desk = self._desk(application)
        async with desk.turn:
            return await self._rolled_forward(desk, application)

    async def abort(
        self, application: str, members: Sequence[Header], by: str = ""
    ) -> dict[TxnId, State]:
        """Abort those that are open; what became of each. One that is missing has no header."""
        desk = self._desk(application)
        async with desk.turn:
            return await self._abort(desk, application, members, by)

    # --- the decision

    async def _decide(
        self,
        desk: _Desk,
        application: str,
        epoch: int,
        sequence: int,
        txns: Sequence[TxnId],
        owner: str,
        note: str,
    ) -> tuple[Committed, dict[str, Header | None]]:
        for _ in range(_ATTEMPTS):
            # In this order: what the record says may be older than the headers, never newer.
            group = await self._rolled_forward(desk, application)
            _check_owner(group, owner)
            headers = await self._headers(txns)
            made: list[Committed] = []

            def committed(
                present: Group | None,
                before: Group | None = group,
                headers: dict[str, Header | None] = headers,
                made: list[Committed] = made,
            ) -> Group | None:
                made.clear()
                # Invariant 2: headers were read after `before`; a record that changed since may
                # have decided on one of them. Read both again.
                if present != before:
                    return None
                outcome = transitions.committed(
                    present,
                    application,
                    epoch,
                    sequence,
                    headers,
                    now_ms=self._later(present),
                    ids_max=self._limits.txn_group_commit_max,
                    note=note,
                )
                made.append(outcome)
                return outcome.group

            await self._store.change_group(application, committed)
            if made:
                return made[0], headers
        raise ServiceNotReady(f"the group {application!r} changes too often")

    async def _headers(self, txns: Iterable[TxnId]) -> dict[str, Header | None]:
        found: dict[str, Header | None] = {}
        for some in _batches(list(dict.fromkeys(txns))):
            headers = await asyncio.gather(*map(self._store.header, some))
            found.update(zip(map(to_text, some), headers, strict=True))
        return found

    async def _abort(
        self, desk: _Desk, application: str, members: Sequence[Header], by: str = ""
    ) -> dict[TxnId, State]:
        """Abort in the record, then tell everyone here, then copy it into the headers."""
        group = await self._store.group(application)
        most = self._limits.txn_group_aborted_max
        # Makes room: once headers say ABORTED themselves, the record may forget the names.
        if group is not None and len(group.aborted) + len(members) > most:
            await self._rolled_forward(desk, application)
        found: dict[TxnId, State] = {}
        for some in _batches(members):
            after = await self._abort_some(desk, application, some)
            # The headers after the record: one that is final goes before what the record says.
            headers = await self._headers(each.id for each in some)
            present = [each for each in headers.values() if each is not None]
            states = {each.id: transitions.state_of(each, after) for each in present}
            for txn, state in states.items():
                if state != "OPEN":
                    self._open_transactions.over(txn, state, self._clock.now_ms(), cause_of(by))
            # Those that the record had decided before were not open any more: not by who asks.
            open_before = {each.id for each in present if _is_open(each, group)}
            deciders = {
                each.id: by if each.id in open_before else _decider(each, after) for each in present
            }
            await self._copy(desk, states, deciders)
            found |= states
        return found

    async def _abort_some(
        self, desk: _Desk, application: str, members: Sequence[Header]
    ) -> Group | None:
        forget = frozenset(desk.final)

        def aborted(present: Group | None) -> Group | None:
            # No record: its members count as aborted already, see `transitions.state_of`.
            if present is None:
                return None
            # Piggy-backed on a change that is due anyway: names whose headers say it themselves go.
            group = transitions.forgotten(present, [*forget])
            for header in members:
                if transitions.state_of(header, group) == "OPEN":
                    group = (
                        transitions.member_aborted(
                            group,
                            header,
                            now_ms=self._later(present),
                            aborted_max=self._limits.txn_group_aborted_max,
                        )
                        or group
                    )
            # An equal record must be the very same one (invariant 2), so it keeps its time.
            if group == present:
                return present
            return replace(group, changed_ms=self._later(present))

        after = await self._store.change_group(application, aborted)
        desk.final -= forget
        return after

    # --- copies of the decision

    async def _settle(self, application: str) -> None:
        desk = self._desk(application)
        async with desk.turn:
            await self._rolled_forward(desk, application)

    async def _rolled_forward(self, desk: _Desk, application: str) -> Group | None:
        """Make the headers of all members say what the record says; the record as it is then."""
        group = await self._store.group(application)
        if group is None:
            return None
        mark = (group.epoch, group.sequence)
        # Nothing has been decided since the last roll-forward: no scan of members.
        if desk.rolled == mark and desk.final.issuperset(group.aborted):
            return await self._without(desk, group, frozenset())
        # Headers that another broker wrote must be found, too.
        await self._store.metadata.sync()
        still_open: set[str] = set()
        states: dict[TxnId, State] = {}
        deciders: dict[TxnId, str] = {}
        async for header in self._store.members(application):
            if header.is_final or not _is_of(header, application):
                continue
            state = transitions.state_of(header, group)
            if state == "OPEN":
                still_open.add(header.txn)
            else:
                states[header.id] = state
                deciders[header.id] = _decider(header, group)
        # Memory, then headers, then the mark: should a put fail, the next call copies them again.
        # Only then may a commit forget the ids (invariant 3).
        self._tell(group)
        for txn, state in states.items():
            self._open_transactions.over(txn, state, self._clock.now_ms())
        await self._copy(desk, states, deciders)
        desk.rolled = mark
        return await self._without(desk, group, still_open)

    async def _without(self, desk: _Desk, group: Group, still_open: Set[str]) -> Group | None:
        """The record without the names of members whose headers say that they were aborted."""
        # A member without an open header has a final one, or none at all: nothing needs the name.
        gone = [name for name in group.aborted if name not in still_open]
        if not gone:
            return group

        def forgotten(present: Group | None) -> Group | None:
            if present is None:
                return None
            left = transitions.forgotten(present, gone)
            return present if left == present else replace(left, changed_ms=self._later(present))

        after = await self._store.change_group(group.application, forgotten)
        desk.final -= set(gone)
        return after

    async def _copy(
        self, desk: _Desk, states: dict[TxnId, State], deciders: dict[TxnId, str]
    ) -> None:
        final = {txn: state for txn, state in states.items() if state != "OPEN"}
        now = self._clock.now_ms()
        for some in _batches(list(final)):
            await asyncio.gather(
                *(self._store.end(txn, final[txn], now, deciders[txn]) for txn in some)
            )
        desk.final.update(to_text(txn) for txn, state in final.items() if state == "ABORTED")

    def _tell(self, group: Group) -> None:
        """Everyone on this broker learns what the record surely decided, commits first.

        Of a member with a sequence before the last the record may have forgotten that it was
        committed: its header decides.
        """
        now = self._clock.now_ms()
        for name in group.decided:
            self._open_transactions.over(from_text(name), "COMMITTED", now)
        # Those that lost: left out of a commit, aborted by name, or of an epoch that is over.
        for header in self._open_transactions.members(group.application):
            member = header.group
            is_sure = member is not None and transitions.is_surely_told(member, group)
            if is_sure and transitions.state_of(header, group) == "ABORTED":
                self._open_transactions.over(header.id, "ABORTED", now)

    # --- the end of a group

    async def forget_old(self) -> None:
        """Delete the records that nobody came for in days."""
        before = self._clock.now_ms() - round(self._limits.txn_group_retention_seconds * 1000)
        old: list[tuple[str, int]] = []
        async with aclosing(self._store.metadata.scan(GROUPS)) as records:
            async for record in records:
                group = decode(record, Group)
                # Only the leader of its coordinator deletes a group, under the
                # same lock that changes it.
                if group.changed_ms <= before and self._partitions.leads(
                    partition_of(group.application)
                ):
                    old.append((group.application, group.changed_ms))
        for application, changed_ms in old:
            await self._forget(application, changed_ms)

    async def _forget(self, application: str, changed_ms: int) -> None:
        desk = self._desk(application)
        async with desk.turn:
            group = await self._rolled_forward(desk, application)
            # Somebody came between the scan and this turn: not old any more.
            if group is None or group.changed_ms != changed_ms:
                return
            if [header async for header in self._store.members(application)]:
                return  # it outlives every header that needs it
            # Deleted in the version whose content was judged: an OPEN_GROUP of another leader wins.
            record = await self._store.metadata.get(group_key(application))
            if record is None or decode(record, Group) != group:
                return
            try:
                await self._store.metadata.delete(record.key, expected=record.version)
            except BadVersion:
                return  # somebody came
            del self._desks[application]

    # --- parts

    def _check(self, application: str, *names: str) -> None:
        """Whether a group of this name is this broker's."""
        for name in (application, *names):
            # Measured as it is stored: a name of control characters is six times as long in JSON.
            if not 0 < len(msgspec.json.encode(name)) - len('""') <= NAME_BYTES_MAX:
                text = f"a name of a group has 1 to {NAME_BYTES_MAX} bytes, as JSON"
                raise NotAllowed(text, hint="use a shorter name, and no empty one")
        self._partitions.check(partition_of(application))

    def _desk(self, application: str) -> _Desk:
        return self._desks.setdefault(application, _Desk())

    def _later(self, group: Group | None) -> int:
        now = self._clock.now_ms()
        # Strictly later, though clocks may stand still or run back: equal
        # records are the same record.
        return now if group is None else max(now, group.changed_ms + 1)

    def _touched(self, group: Group) -> Group:
        """Used, though nothing of it changes."""
        # Not at every OPEN_GROUP of the same run: each would be a write.
        step = round(self._limits.txn_group_retention_seconds * 1000 / _TOUCH_PART)
        now = self._clock.now_ms()
        return replace(group, changed_ms=now) if now - group.changed_ms > step else group


def _check_owner(group: Group | None, owner: str) -> None:
    if group is not None and group.owner and group.owner != owner:
        text = f"the group {group.application!r} is another owner's"
        raise NotAllowed(text, hint="use another name, or connect as who opened it")


def _is_open(header: Header, group: Group | None) -> bool:
    return transitions.state_of(header, group) == "OPEN"


def _decider(header: Header, group: Group | None) -> str:
    return "the end of its group" if group is None else transitions.decider(header, group)


def _is_of(header: Header, application: str) -> bool:
    return header.group is not None and header.group.application == application


def _members(headers: Iterable[Header | None], application: str) -> list[Header]:
    return [each for each in headers if each is not None and _is_of(each, application)]


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[first : first + _AT_ONCE] for first in range(0, len(items), _AT_ONCE))
