"""The record of a stream's legacy transactions in the metadata store.

Owns: `StreamStore`: the one record of one stream, as one owner writes it.

Invariants:
1. `adopt` writes the record, if there is one, with this owner's epoch: from then on no former
   owner's write gets through, and one that comes first in spite of it fences this owner.
2. A topic without legacy transactions has no record: the first write makes it.

Relies on: `OwnedRecord` for the order of writes, unknown outcomes, and who has been fenced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from magnetar.errors import ManagedLedgerFenced
from magnetar.managed_ledger.owned_record import OwnedRecord, take
from magnetar.metadata.api import ABSENT, MetadataStore
from magnetar.runtime.clock import Clock
from magnetar.txn.legacy.stream_state import StreamRecord, stream_key
from magnetar.txn.records import decode_value, encode

_NOWHERE: Final = (-1, -1)


class StreamStore:
    """Adopted before anything else."""

    def __init__(self, segment: str, metadata: MetadataStore, epoch: int, *, clock: Clock) -> None:
        self._segment = segment
        self._metadata = metadata
        self._epoch = epoch
        self._clock = clock
        self._key = stream_key(segment)
        # Until the first legacy transaction of this topic nothing is stored (invariant 2).
        self._owned = self._absent()

    @property
    def exists(self) -> bool:
        return self._owned.exists

    async def adopt(self) -> StreamRecord | None:
        """Take a former owner's record over; None: there is none."""
        # Nearly every topic: one read, no write.
        if await self._metadata.get(self._key) is None:
            return None
        self._owned = await take(
            self._metadata, self._clock, self._key, self._decoded, self._claimed, encode=encode
        )
        return self._owned.value

    async def write(self, make: Callable[[], StreamRecord], written: Callable[[], None]) -> None:
        """Store what `make` makes of the state when its turn has come, whatever becomes of the
        caller; `written` is called in the step in which it counts."""
        await self._owned.update(lambda _: make(), written)

    async def delete(self) -> None:
        await self._owned.delete()
        self._owned = self._absent()

    def _absent(self) -> OwnedRecord[StreamRecord]:
        nothing = StreamRecord(self._segment, self._epoch, _NOWHERE)
        return OwnedRecord(self._metadata, self._clock, self._key, nothing, ABSENT, encode=encode)

    def _decoded(self, value: bytes) -> StreamRecord:
        return decode_value(self._key, value, StreamRecord)

    def _claimed(self, present: StreamRecord | None) -> StreamRecord:
        # Deleted or taken by a later owner between the read and this: the
        # topic is loaded elsewhere.
        if present is None or present.epoch > self._epoch:
            raise ManagedLedgerFenced(f"{self._segment} has a later owner")
        return replace(present, epoch=self._epoch)
