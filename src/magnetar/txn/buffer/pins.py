"""Pins by compare-and-set: the first mark of a transaction on a segment.

Owns: `place_pin`, `submit_pin` and `adopt_pin`.

Invariants:
1. A pin's bound never rises, whoever writes it.
2. An owner that meets the pin of a later owner stops; it takes nothing over.
3. What is returned is durable, and nobody else has written it since: its version says so.
"""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec.structs import replace

from magnetar.errors import BadVersion, ManagedLedgerFenced, OutcomeUnknown, Unavailable
from magnetar.metadata.api import ABSENT, Stat
from magnetar.model.ids import Position
from magnetar.runtime.background import future_of
from magnetar.runtime.metrics import TXN_OP_WRITES
from magnetar.txn.ids import from_text, to_text
from magnetar.txn.records import Pin, encode, pin_key
from magnetar.txn.store import FoundPin, StoredOp, TxnStore
from magnetar.wire.messages import TxnId

# A round is lost only to a write or a delete in between, and hardly anybody else writes a pin.
_ATTEMPTS: Final = 16


def submit_pin(
    store: TxnStore, txn: TxnId, segment: str, bound: Position, epoch: int
) -> asyncio.Future[Stat]:
    """Write the pin of a transaction, at the place in the store's order where this is called.

    BadVersion: there is one. Until it is durable nothing is certain but this order.
    """
    key, indexes = pin_key(txn, segment)
    value = encode(Pin(to_text(txn), segment, *bound, epoch))
    TXN_OP_WRITES.inc()
    # `put` takes its place in the order when it is called; the future only waits for durability.
    return future_of(store.metadata.put(key, value, expected=ABSENT, indexes=indexes))


async def place_pin(
    store: TxnStore, txn: TxnId, segment: str, bound: Position, epoch: int
) -> StoredOp:
    """Write the pin of a transaction, or adopt the one that is there."""
    wanted = Pin(to_text(txn), segment, *bound, epoch)
    for _ in range(_ATTEMPTS):
        stored = await _put(store, wanted, ABSENT)
        if stored is not None:
            return stored
        # One is there: a former owner's, or an own one of an attempt that was given up.
        found = await store.pin(txn, segment)
        # Deleted between the two looks by whoever had finished with it.
        if found is None:
            continue
        stored = await adopt_pin(store, found, bound, epoch)
        if stored is not None:
            return stored
    raise Unavailable(f"the pin of {to_text(txn)} on {segment} keeps changing")


async def adopt_pin(
    store: TxnStore, found: FoundPin, bound: Position, epoch: int
) -> StoredOp | None:
    """Make a former owner's pin the present one's; None: it is not as it was found."""
    check_epoch(found, epoch)
    # Invariant 1: the former owner's entries stand below this one's floor.
    low = min(found.pin.bound, bound)
    pin = replace(found.pin, ledger_id=low.ledger_id, entry_id=low.entry_id, epoch=epoch)
    return await _put(store, pin, found.op.version)


def check_epoch(found: FoundPin, epoch: int) -> None:
    if found.pin.epoch > epoch:
        raise ManagedLedgerFenced(f"{found.pin.segment} has a later owner")


async def _put(store: TxnStore, pin: Pin, expected: int) -> StoredOp | None:
    txn = from_text(pin.txn)
    key, indexes = pin_key(txn, pin.segment)
    value = encode(pin)
    TXN_OP_WRITES.inc()
    try:
        stat = await store.metadata.put(key, value, expected=expected, indexes=indexes)
    except BadVersion:
        # Another was faster: the caller looks at what is there now.
        return None
    except OutcomeUnknown:
        found = await store.pin(txn, pin.segment)
        # The answer was lost. An equal value is this write only if the version has moved.
        if found is None or found.pin != pin or found.op.version == expected:
            raise
        return found.op
    return StoredOp(key, stat.version)
