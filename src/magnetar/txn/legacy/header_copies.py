"""Headers of legacy transactions, for topics that keep them in records.

Owns: `HeaderCopies`. In namespaces whose policy `transactionKind` is `metadata`, topics pin and
acknowledge legacy transactions as metadata-driven ones, and read their state from a header.

Invariants:
1. The log decides; a header is a copy. It is OPEN before a topic is told that it takes part, and
   final before the transaction has ended.
2. A copy has no deadline: the coordinator's own book aborts it. Once final it is collected like any
   header.
3. One that comes late, from a former leader, never opens what is final.
"""

from __future__ import annotations

from magnetar.errors import BadVersion
from magnetar.metadata.api import ABSENT
from magnetar.txn import transitions
from magnetar.txn.records import Header, State, encode, header_indexes, header_key
from magnetar.txn.store import TxnStore


class HeaderCopies:
    """Of all coordinators of one broker."""

    def __init__(self, store: TxnStore) -> None:
        self._store = store

    async def open(self, header: Header) -> None:
        """Let topics know that a transaction is open; again: nothing."""
        try:
            await self._store.metadata.put(header_key(header.id), encode(header), expected=ABSENT)
        except BadVersion:
            return  # it is there, and perhaps final

    async def end(self, header: Header, state: State, now_ms: int) -> None:
        """Let topics know the decision, whether or not they knew of the transaction."""

        def ended(present: Header | None) -> Header:
            return transitions.ended(present or header, state, now_ms)

        await self._store.change(header_key(header.id), Header, ended, header_indexes)
