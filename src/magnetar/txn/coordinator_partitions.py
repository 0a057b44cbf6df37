"""The coordinators of transactions, and which broker leads each of them.

Owns: `CoordinatorPartitions`: the elections of one broker for all coordinators, who leads each of
them, and the numbers of new transactions.

Invariants:
1. A coordinator is led by one broker at a time. A former leader that has not heard of it yet does
   no harm: what it stores is compare-and-set.
2. A number is given once, whoever leads: numbers come in blocks, each taken by one compare-and-set,
   and what is left of a block when its broker ends is never given.
3. `changes` advances after `assignments` has changed.

A new leader has nothing to replay: the records of transactions are the state.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from magnetar.errors import TransactionCoordinatorNotFound, TransactionNotFound
from magnetar.metadata.api import MetadataStore
from magnetar.metadata.recipes import Counter, LeaderElection, TableView
from magnetar.model.hashing import key_hash
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import TXN_COORDINATORS
from magnetar.runtime.service import Service
from magnetar.txn.ids import METADATA_BIT, is_metadata, metadata_id, to_text
from magnetar.wire.messages import TxnId

# Ids carry the number, so it is fixed; 16 is also what Pulsar initialises a cluster with.
PARTITIONS: Final = 16
"""The same for every broker of a cluster, and for as long as it has transactions."""

LEADERS: Final = "/txn/tc"
IDS: Final = "/txn/ids"

# One compare-and-set per 10,000 transactions; with 62 bits, what a restart skips is nothing.
_ID_BLOCK: Final = 10_000
_RETRY_SECONDS: Final = 5.0
"""Changes of leaders are watched; this is for candidates whom the store did not answer."""

_SETTLE_SECONDS: Final = 0.5
"""How long a start waits until every coordinator has a leader, here or elsewhere."""

_LOG: Final = logger(__name__)


class CoordinatorAssignment(NamedTuple):
    """A coordinator, and where it is; None: nobody leads it now."""

    partition: int
    url: str | None


def partition_of(application: str) -> int:
    """The coordinator of a transaction group."""
    return key_hash(application) % PARTITIONS


class CoordinatorPartitions(Service):
    """The coordinators of a cluster, as one broker sees them."""

    def __init__(self, metadata: MetadataStore, *, broker: str, url: str, limits: Limits) -> None:
        super().__init__("coordinator elections", stop_seconds=limits.close_seconds)
        # A candidate whose answer was lost recognises by it that the leader's record is its own.
        value = f"{broker} {url}".encode()  # no two processes share the first part
        self._elections = [
            LeaderElection(metadata, f"{LEADERS}/{number}", value, retry_s=_RETRY_SECONDS)
            for number in range(PARTITIONS)
        ]
        self._counters = [
            Counter(metadata, f"{IDS}/{number}", block=_ID_BLOCK) for number in range(PARTITIONS)
        ]
        self._leaders = TableView(metadata, LEADERS)
        self.changes = self._leaders.changes

    async def _start(self) -> None:
        for number, election in enumerate(self._elections):
            self.spawn(election.run(), f"coordinator {number}")
        self.spawn(self._leaders.run(), "leaders")
        self.spawn(self._count(), "count")
        # Clients ask for coordinators right after the start: a short wait saves
        # them a round of retries.
        try:
            async with asyncio.timeout(_SETTLE_SECONDS):
                await self._settled()
        except TimeoutError:
            # Those of a broker that died are free when its session ends; clients try again.
            _LOG.info("coordinators-without-leader", led=len(self.led))

    async def _stop(self) -> None:
        await asyncio.gather(*(election.close() for election in self._elections))

    async def _settled(self) -> None:
        while True:
            # The version first, then the look: a change in between makes `past` return at once.
            seen = self.changes.version
            if all(each.url is not None for each in self.assignments()):
                return
            await self.changes.past(seen)

    async def _count(self) -> None:
        seen = -1
        while True:
            seen = await self.changes.past(seen)
            TXN_COORDINATORS.set(len(self.led))

    # --- who leads

    @property
    def is_known(self) -> bool:
        """Whether `assignments` has been read at all."""
        return self._leaders.is_loaded

    def assignments(self) -> list[CoordinatorAssignment]:
        """All coordinators and where they are."""
        records = self._leaders.records
        urls = {key: record.value.decode().partition(" ")[2] for key, record in records.items()}
        return [
            CoordinatorAssignment(number, urls.get(f"{LEADERS}/{number}"))
            for number in range(PARTITIONS)
        ]

    @property
    def led(self) -> dict[int, int]:
        """The coordinators that this broker leads, with the epoch of its leadership."""
        return {
            number: election.epoch
            for number, election in enumerate(self._elections)
            if election.epoch is not None
        }

    def leads(self, partition: int) -> bool:
        return 0 <= partition < PARTITIONS and self._elections[partition].leading

    def coordinates(self, txn: TxnId) -> bool:
        """Whether the decision on a transaction is made by this broker."""
        most, least = txn
        # In one step: it is asked several times in each transaction.
        is_known = least & METADATA_BIT and 0 <= most < PARTITIONS
        return bool(is_known) and self._elections[most].leading

    def check(self, partition: int) -> None:
        """Raise unless this broker leads a coordinator."""
        if not self.leads(partition):
            raise TransactionCoordinatorNotFound(f"coordinator {partition} is not at this broker")

    def check_txn(self, txn: TxnId) -> None:
        """Raise unless this broker decides on a transaction."""
        if not is_metadata(txn):
            # A legacy id: its number could be that of a partition here, but the
            # other kind decides on it.
            raise TransactionNotFound(f"there is no transaction {to_text(txn)}")
        self.check(txn.most)

    # --- ids

    def new_id_at_once(self, partition: int) -> TxnId | None:
        """An id that no transaction had; None: `new_id`, for numbers have to be fetched."""
        number = self._counters[partition].next_at_once()
        return None if number is None else metadata_id(partition, number)

    async def new_id(self, partition: int) -> TxnId:
        """An id that no transaction had."""
        return metadata_id(partition, await self._counters[partition].next())
