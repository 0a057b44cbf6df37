"""Pure: a bounded cache of entries read from ledger files.

Owns: blocks of consecutive payloads, the least recently used dropped first. A block is aligned
and complete, so that readers who follow each other through a ledger share it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

BLOCK_ENTRIES: Final = 64

# What a payload costs beyond its bytes: the object and its place in the block.
_OVERHEAD: Final = 48


class EntryCache:
    """Payloads by (ledger, block); `bytes_used` never exceeds the limit."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[tuple[int, int], Sequence[bytes]] = OrderedDict()
        self.bytes_used = 0

    def get(self, ledger_id: int, first: int, last: int, bytes_max: int) -> Sequence[bytes]:
        """Cached payloads from entry `first` on, up to `last` or one that is not cached.

        Those of the block in which `bytes_max` is reached are the last ones.
        """
        blocks, room = self._blocks, bytes_max
        found: list[bytes] = []
        block, place = divmod(first, BLOCK_ENTRIES)
        for number in range(block, last // BLOCK_ENTRIES + 1):
            payloads = blocks.get((ledger_id, number))
            if payloads is None:
                break
            blocks.move_to_end((ledger_id, number))
            found += payloads[place:] if place else payloads
            room -= sum(map(len, payloads))
            if room <= 0:
                break
            place = 0
        del found[last + 1 - first :]
        return found

    def add(self, ledger_id: int, first: int, payloads: Sequence[bytes]) -> None:
        """Keep the complete blocks of a run of payloads that begins with entry `first`."""
        # The run may begin and end within a block. Those parts are left out: a partial block would
        # keep the whole one from being added later.
        skipped = -first % BLOCK_ENTRIES
        for place in range(skipped, len(payloads) - BLOCK_ENTRIES + 1, BLOCK_ENTRIES):
            key = (ledger_id, (first + place) // BLOCK_ENTRIES)
            if key not in self._blocks:
                self._insert(key, payloads[place : place + BLOCK_ENTRIES])

    def drop(self, ledger_id: int) -> None:
        for key in [key for key in self._blocks if key[0] == ledger_id]:
            self.bytes_used -= _cost(self._blocks.pop(key))

    def _insert(self, key: tuple[int, int], payloads: Sequence[bytes]) -> None:
        cost = _cost(payloads)
        # Larger than the whole cache: it would push everything else out and then go itself.
        if cost > self._bytes_max:
            return
        self._blocks[key] = payloads
        self.bytes_used += cost
        while self.bytes_used > self._bytes_max:
            self.bytes_used -= _cost(self._blocks.popitem(last=False)[1])


def _cost(payloads: Sequence[bytes]) -> int:
    return sum(map(len, payloads)) + _OVERHEAD * len(payloads)
