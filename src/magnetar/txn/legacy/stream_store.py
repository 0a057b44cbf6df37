"""The record of a stream's legacy transactions in the metadata store.

Owns: `StreamStore`: the one record of one stream, as one owner writes it.

Invariants:
1. Every write is a compare-and-set of the version that this owner knows. `adopt` writes the record
   with its own epoch: from then on no former owner's write gets through.
2. One write at a time, in the order of the calls; what is written is made when its turn has come.
3. ManagedLedgerFenced: another owner has written. Nothing of this owner counts any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from magnetar.errors import BadVersion, ManagedLedgerFenced, OutcomeUnknown, Unavailable
from magnetar.metadata.api import ABSENT, MetadataStore
from magnetar.txn.legacy.stream_state import StreamRecord, stream_key
from magnetar.txn.records import decode, encode

_ATTEMPTS: Final = 16


class StreamStore:
    """Adopted before anything else."""

    def __init__(self, segment: str, metadata: MetadataStore, epoch: int) -> None:
        self._segment = segment
        self._metadata = metadata
        self._epoch = epoch
        self._key = stream_key(segment)
        self._version = ABSENT
        self._turn = asyncio.Lock()

    @property
    def exists(self) -> bool:
        return self._version != ABSENT

    async def adopt(self) -> StreamRecord | None:
        """Take a former owner's record over; None: there is none."""
        for _ in range(_ATTEMPTS):
            found = await self._metadata.get(self._key)
            if found is None:
                return None
            record = decode(found, StreamRecord)
            if record.epoch > self._epoch:
                raise ManagedLedgerFenced(f"{self._segment} has a later owner")
            self._version = found.version
            record = replace(record, epoch=self._epoch)
            try:
                await self._put(encode(record))
            except BadVersion:
                continue
            return record
        raise Unavailable(f"{self._key} keeps changing")

    async def write(self, make: Callable[[], StreamRecord]) -> StreamRecord:
        """Store what `make` makes of the present state."""
        async with self._turn:
            record = make()
            try:
                await self._put(encode(record))
            except BadVersion as error:
                raise ManagedLedgerFenced(f"{self._segment} has another owner") from error
            return record

    async def delete(self) -> None:
        await self._metadata.delete(self._key)
        self._version = ABSENT

    async def _put(self, value: bytes) -> None:
        try:
            stat = await self._metadata.put(self._key, value, expected=self._version)
        except OutcomeUnknown:
            found = await self._metadata.get(self._key)
            if found is None or found.value != value:
                raise
            self._version = found.version
        else:
            self._version = stat.version
