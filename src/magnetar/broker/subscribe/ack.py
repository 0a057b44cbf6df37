"""Pure: acknowledgements as consumers send them.

Owns: `Ack`, and runs of them. The set of a batch's open messages is in `model.batch_indexes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from magnetar.model.ids import Position


class Ack(NamedTuple):
    """One acknowledged entry; of a batch, all messages but those set in `unacked`."""

    position: Position
    unacked: int = 0


def run_end(acks: Sequence[Ack], start: int) -> int:
    """Behind the last of the consecutive entries acknowledged as a whole from `start` on."""
    at = start
    # A batch acknowledged in part ends a run: the mark-delete position cannot pass it.
    if not acks[at].unacked:
        (ledger_id, entry_id), at = acks[at].position, at + 1
        while at < len(acks):
            entry_id += 1
            if acks[at] != ((ledger_id, entry_id), 0):
                break
            at += 1
    return at
