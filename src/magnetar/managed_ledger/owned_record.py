"""A metadata record that one owner at a time may change, by compare-and-set.

Owns: `OwnedRecord`, the record's present value and version, and `take`, which makes a record ours.

Invariants:
1. Every write expects the version that this object wrote or read last; losing that race means
   that another owner took the record, and nothing is written ever again.
2. Changes happen one after the other, in call order. `change` sees the value of the moment it is
   written, and `applied` runs in the same step in which the new value becomes the present one:
   memory that mirrors the record cannot fall behind it, even if the caller is cancelled.
3. A write of unknown outcome is settled by reading, before anything else is written.

Relies on: a store in which nothing sent before an unknown outcome arrives after a later read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from magnetar.errors import (
    BadVersion,
    MagnetarError,
    ManagedLedgerFenced,
    OutcomeUnknown,
    Unavailable,
)
from magnetar.metadata.api import ABSENT, MetadataStore
from magnetar.runtime.clock import Clock

Owned = TypeVar("Owned", bound=msgspec.Struct)

TAKE_ATTEMPTS: Final = 8
# Pauses that double from 0.05 s: about three seconds in all.
SETTLE_ATTEMPTS: Final = 6
SETTLE_FIRST_PAUSE_S: Final = 0.05


class OwnedRecord(Generic[Owned]):
    """The owner's view of one record."""

    def __init__(
        self,
        metadata: MetadataStore,
        clock: Clock,
        key: str,
        value: Owned,
        version: int,
        *,
        encode: Callable[[Owned], bytes],
    ) -> None:
        self.key = key
        self.value: Owned = value
        self._encode = encode
        self._metadata = metadata
        self._clock = clock
        self._version = version
        self._lock = asyncio.Lock()
        self._failure: MagnetarError | None = None

    @property
    def exists(self) -> bool:
        """Whether it was ever written; until then `value` says what is known without it."""
        return self._version != ABSENT

    async def update(
        self, change: Callable[[Owned], Owned], applied: Callable[[], None] | None = None
    ) -> None:
        """Write a changed value. Cancelling the caller does not stop it half-way.

        Raises ManagedLedgerFenced (for good), a retryable MetadataError (nothing was written), or
        OutcomeUnknown (for good: the store could not be asked either).
        """
        await asyncio.shield(asyncio.create_task(self._update(change, applied)))

    async def delete(self) -> None:
        """Remove the record, if it is still ours."""
        async with self._lock:
            self._check()
            try:
                await self._metadata.delete(self.key, expected=self._version)
            except BadVersion as error:
                raise self._lost() from error

    async def _update(
        self, change: Callable[[Owned], Owned], applied: Callable[[], None] | None
    ) -> None:
        async with self._lock:
            self._check()
            value = change(self.value)
            # No change, no write; but a record that was never there is written whatever it says.
            if value != self.value or self._version == ABSENT:
                self._version = await self._write(self._encode(value))
                self.value = value
            if applied is not None:
                applied()

    async def _write(self, data: bytes) -> int:
        try:
            return (await self._metadata.put(self.key, data, expected=self._version)).version
        except BadVersion as error:
            raise self._lost() from error
        # Sent, and no answer: it may be stored. Nothing is written before that
        # is known (invariant 3).
        except OutcomeUnknown as error:
            return await self._settle(data, error)

    async def _settle(self, data: bytes, unknown: OutcomeUnknown) -> int:
        """Find out whether a write happened; the version it got."""
        pause = SETTLE_FIRST_PAUSE_S
        for _ in range(SETTLE_ATTEMPTS):
            try:
                await self._metadata.sync(self.key)
                found = await self._metadata.get(self.key)
            except Unavailable:
                await self._clock.sleep(pause)
                pause *= 2
                continue
            # As it was before: the write did not happen, and will not (see what this relies on).
            if found is None and self._version == ABSENT:
                raise Unavailable(f"{self.key}: the write was not applied") from unknown
            if found is not None and found.version == self._version:
                raise Unavailable(f"{self.key}: the write was not applied") from unknown
            # Our own bytes: it happened, and only the answer was lost.
            if found is not None and found.value == data:
                return found.version
            # It may have been applied, and then taken over with what it wrote.
            raise self._lost() from unknown
        # The store stayed away. What it holds is unknown, so nothing may be written on top of it.
        self._failure = unknown
        raise unknown

    def _lost(self) -> ManagedLedgerFenced:
        self._failure = ManagedLedgerFenced(f"{self.key} was taken over by another owner")
        return self._failure

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)


def may_be_applied(error: MagnetarError) -> bool:
    """Whether an update that failed so could still have been written, and be seen by others."""
    # A plain lost race wrote nothing. One that was found by settling may have been written, and
    # then overwritten by the next owner.
    if isinstance(error, ManagedLedgerFenced):
        return not isinstance(error.__cause__, BadVersion)
    return isinstance(error, OutcomeUnknown)


async def take(
    metadata: MetadataStore,
    clock: Clock,
    key: str,
    decode: Callable[[bytes], Owned],
    claim: Callable[[Owned | None], Owned],
    *,
    encode: Callable[[Owned], bytes],
) -> OwnedRecord[Owned]:
    """Make a record ours: write what `claim` makes of the present one (None: there is none).

    A former owner may still be writing, so a lost race is tried again with the newer record;
    `claim` raises if that shows that somebody else came first.
    """
    # A read that lags behind would lose the first race for sure.
    await metadata.sync(key)
    for _ in range(TAKE_ATTEMPTS):
        found = await metadata.get(key)
        present = None if found is None else decode(found.value)
        claimed: Owned = claim(present)
        version = ABSENT if found is None else found.version
        value = claimed if present is None else present
        record = OwnedRecord(metadata, clock, key, value, version, encode=encode)
        try:
            await record.update(_becoming(claimed))
        # Somebody wrote in between: read again, and let `claim` judge who.
        except ManagedLedgerFenced:
            continue
        return record
    raise Unavailable(f"{key} changed {TAKE_ATTEMPTS} times while it was being taken over")


def _becoming(value: Owned) -> Callable[[Owned], Owned]:
    return lambda _: value
