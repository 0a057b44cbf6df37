"""Chunked messages in ranges: a message is where its last chunk is, and comes as a whole.

Owns: `chunk_of`, and `whole_message`, the chunks of a message whose last one is given.

A range may begin between two chunks of one message, and chunks of several producers stand among
each other. So the earlier ones are no part of a range by themselves: whoever reads the last chunk
is given all of them, looked for backwards from there.

Invariants:
1. The chunks come in their order, the last one included; if one cannot be found (it was trimmed, or
   never stored) or they are too much for one answer, the last one comes alone, and its reader sees
   that it is incomplete.
2. Others have their turn after each read.
"""

from __future__ import annotations

import asyncio
from typing import Final

from magnetar.broker.entries import EntryView
from magnetar.broker.ranges.view import RangeView
from magnetar.ledger.api import Entry
from magnetar.model.ids import Position
from magnetar.wire.messages import payload_offset

MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of all chunks of a message that is answered as a whole."""

_LOOK_BACK_ENTRIES: Final = 20_000
_WINDOW_ENTRIES: Final = 32
_READ_BYTES: Final = 8 * 1024 * 1024
_NOWHERE: Final = Position(0, 0)
_CHUNKS_TAG: Final = b"\xd8\x01"
"""The bytes with which field 27 (num_chunks_from_msg, a number) begins in MessageMetadata."""


def chunk_of(payload: bytes) -> EntryView | None:
    """An entry that is a chunk; None: it is none. Those that cannot be one are not parsed."""
    if payload.find(_CHUNKS_TAG, 0, payload_offset(payload)) < 0:
        return None
    view = EntryView(_NOWHERE, payload)
    return view if view.is_chunk else None


async def whole_message(view: RangeView, last: Entry) -> list[Entry]:
    """All chunks of the message that ends with this one."""
    metadata = EntryView.of(last).metadata
    found: dict[int, Entry] = {}
    size, looked_at, end = len(last.payload), 0, last.position.previous
    while len(found) < metadata.chunk_id and looked_at < _LOOK_BACK_ENTRIES:
        before = view.ledger.last_valid(end)
        if before is None or size > MESSAGE_BYTES_MAX:
            return [last]
        first = Position(before.ledger_id, max(before.entry_id - _WINDOW_ENTRIES + 1, 0))
        for entry in await _between(view, first, before):
            chunk = chunk_of(entry.payload)
            if chunk is not None and chunk.metadata.uuid == metadata.uuid:
                number = chunk.metadata.chunk_id
                if number < metadata.chunk_id and number not in found:
                    found[number] = entry
                    size += len(entry.payload)
        looked_at += _WINDOW_ENTRIES
        end = first.previous
    if len(found) < metadata.chunk_id or size > MESSAGE_BYTES_MAX:
        return [last]
    return [*(found[number] for number in sorted(found)), last]


async def _between(view: RangeView, first: Position, last: Position) -> list[Entry]:
    """Entries of one ledger; those that were trimmed meanwhile are left out."""
    found: list[Entry] = []
    while first <= last:
        count = last.entry_id - first.entry_id + 1
        part = await view.ledger.read(first, count, _READ_BYTES)
        found += [each for each in part if each.position <= last]
        if not part or part[-1].position > last:
            break
        first = part[-1].position.next
        await asyncio.sleep(0)
    return found
