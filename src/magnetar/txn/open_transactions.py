"""The open transactions that one broker coordinates.

Owns: `OpenTransactions`: which they are, by deadline, owner and group; and the one place where it
is told that a transaction began or was decided.

Invariants:
1. The book is a help, not the truth: it may miss a transaction for a while, or hold one that was
   decided elsewhere. Who decides looks at the stored records.
2. `over` tells everyone on this broker without an await: whoever calls it for several transactions
   in a row makes them visible together.
3. The heap holds each open transaction at least once; entries of those that are over are skipped.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from heapq import heappop, heappush
from typing import Final, Literal, Protocol, TypeAlias

from prometheus_client import Counter as Count

from magnetar.errors import TooManyRequests
from magnetar.runtime.metrics import TXN_ENDED, TXN_LATE_SECONDS, TXN_OPEN, TXN_OPEN_SECONDS
from magnetar.txn.records import Header, State
from magnetar.txn.transitions import BY_DEADLINE
from magnetar.wire.messages import TxnId

Cause: TypeAlias = Literal["asked", "timeout"]


def cause_of(by: str) -> Cause:
    """The cause, as metrics count it, of a decision by somebody or something."""
    return "timeout" if by == BY_DEADLINE else "asked"


_COMPACT_AT: Final = 1024
"""A heap that is larger, and mostly of transactions that are over, is made anew."""


@lru_cache
def _ended_count(coordinator: int, outcome: str) -> Count:
    return TXN_ENDED.labels(str(coordinator), outcome)


class Audience(Protocol):
    """The parts of this broker that are told what becomes of transactions; `Outcomes` is one."""

    def opened(self, txn: TxnId) -> None:
        """A transaction began here."""
        ...

    def learn(self, txn: TxnId, state: State) -> None:
        """The decision on a transaction; may be told more than once."""
        ...


class OpenTransactions:
    """All that is open, as far as it is known."""

    def __init__(self, audience: Audience, *, per_owner_max: int) -> None:
        self._audience = audience
        self._per_owner_max = per_owner_max
        # What is open, and three ways to find it: by owner for the limit, by group for its
        # decisions, by deadline for timeouts.
        self._headers: dict[TxnId, Header] = {}
        # Lets END_TXN be one put without a read before it.
        self._versions: dict[TxnId, int] = {}
        """Of headers that only this broker has written."""
        self._owners: dict[str, int] = {}
        self._groups: dict[str, set[TxnId]] = {}
        self._heap: list[tuple[int, TxnId]] = []

    def __len__(self) -> int:
        return len(self._headers)

    def get(self, txn: TxnId) -> Header | None:
        return self._headers.get(txn)

    def version(self, txn: TxnId) -> int | None:
        """The version of the header that `get` returns, as it was stored here; None: not known."""
        return self._versions.get(txn)

    def by_coordinator(self) -> Counter[int]:
        """How many are open."""
        return Counter(txn.most for txn in self._headers)

    def members(self, application: str) -> list[Header]:
        """The open transactions of a group."""
        return [self._headers[txn] for txn in self._groups.get(application, ())]

    # --- coming and going

    def reserve(self, owner: str) -> None:
        """Room for one more transaction of an owner, held until `release`."""
        # Counted when it begins, not when it is stored: many NEW_TXN in flight at once must not
        # slip past the limit together.
        count = self._owners.get(owner, 0)
        if count >= self._per_owner_max:
            whose = f"of {owner!r}" if owner else "of clients that are not identified"
            raise TooManyRequests(
                f"{self._per_owner_max} transactions {whose} are open, the limit",
                hint="end some of them, or raise txn_open_per_owner_max",
            )
        self._owners[owner] = count + 1

    def began(self, header: Header, version: int | None = None) -> None:
        """A transaction was begun here."""
        txn = header.id
        self.add(header)
        if version is not None:
            self._versions[txn] = version
        self._audience.opened(txn)

    def add(self, header: Header) -> None:
        """A transaction that was found open."""
        txn = header.id
        # The index of deadlines is read every second, and finds the same ones again.
        if txn in self._headers:
            return
        self._headers[txn] = header
        self._owners[header.owner] = self._owners.get(header.owner, 0) + 1
        if header.group is not None:
            self._groups.setdefault(header.group.application, set()).add(txn)
        heappush(self._heap, (header.deadline_ms, txn))
        TXN_OPEN.set(len(self._headers))

    def over(self, txn: TxnId, state: State, now_ms: int, cause: Cause = "asked") -> None:
        """A transaction was decided: tell everyone, and forget it."""
        # Even if the book does not have it: one that a former leader began is decided here all the
        # same, and its participants must hear of it.
        self._audience.learn(txn, state)
        header = self._headers.get(txn)
        if header is None:
            return
        self._discard(txn, header)
        # An abort by deadline is counted apart: it means that a client went away.
        outcome = "timeout" if cause == "timeout" else state.lower()
        _ended_count(txn.most, outcome).inc()
        TXN_OPEN_SECONDS.observe(max(now_ms - header.created_ms, 0) / 1000)
        if cause == "timeout":
            TXN_LATE_SECONDS.observe(max(now_ms - header.deadline_ms, 0) / 1000)

    def keep_only(self, partitions: frozenset[int]) -> None:
        """Forget what other brokers coordinate by now."""
        for txn in [each for each in self._headers if each.most not in partitions]:
            self._discard(txn, self._headers[txn])

    def _discard(self, txn: TxnId, header: Header) -> None:
        del self._headers[txn]
        self._versions.pop(txn, None)
        self.release(header.owner)
        if header.group is not None:
            members = self._groups[header.group.application]
            members.discard(txn)
            if not members:
                del self._groups[header.group.application]
        TXN_OPEN.set(len(self._headers))
        # Most transactions end long before their deadline, and their heap entries with the far
        # deadlines never come up by themselves ('no leak').
        if len(self._heap) > max(_COMPACT_AT, 2 * len(self._headers)):
            self._heap = sorted((each.deadline_ms, txn) for txn, each in self._headers.items())

    def release(self, owner: str) -> None:
        left = self._owners[owner] - 1
        if left:
            self._owners[owner] = left
        else:
            del self._owners[owner]

    # --- deadlines

    def next_deadline_ms(self) -> int | None:
        """The earliest deadline of all that are open; None: there are none."""
        while self._heap and self._heap[0][1] not in self._headers:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: int, most: int) -> list[Header]:
        """Open transactions whose deadline has passed; they stay in the book until they are over.

        One that cannot be aborted now must be put back with `try_again`.
        """
        due: list[Header] = []
        while len(due) < most:
            deadline = self.next_deadline_ms()
            if deadline is None or deadline > now_ms:
                break
            due.append(self._headers[heappop(self._heap)[1]])
        return due

    def try_again(self, header: Header, at_ms: int) -> None:
        if header.id in self._headers:
            # `take_due` has taken its entry; without a new one it would never
            # come up again (invariant 3).
            heappush(self._heap, (at_ms, header.id))
