"""Batch-index sets, the open messages of a batch, in two forms: protocol words and an integer.

Pure. Owns: the change from one form to the other.

Invariants:
1. A batch-index set has bit i set if message i of the batch is **still unacknowledged**. On the
   wire it is a list of 64-bit words, lowest first, signed, without zero words at its end.
2. `unacked_of(words_of(x)) == x`; no words and words of zeros mean the whole entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from magnetar.errors import NotAllowed

_WORD_BITS: Final = 64
_WORD_BYTES: Final = 8
_WORD_MASK: Final = (1 << _WORD_BITS) - 1


def unacked_of(words: Sequence[int], words_max: int) -> int:
    """The batch-index set of the protocol's words (signed or not)."""
    # The peer chooses how many words it sends: without a limit one ACK makes us build any integer.
    if len(words) > words_max:
        raise NotAllowed(f"an acknowledgement with {len(words)} words; the limit is {words_max}")
    # A batch of up to 64 messages: a single word needs no bytes in between.
    if len(words) == 1:
        return words[0] & _WORD_MASK
    packed = b"".join([(word & _WORD_MASK).to_bytes(_WORD_BYTES, "little") for word in words])
    return int.from_bytes(packed, "little")


def words_of(unacked: int) -> tuple[int, ...]:
    """The protocol's words of a batch-index set; none for 0."""
    # Whole words up to the highest set bit, so no zero word ends the list (invariant 1).
    size = (unacked.bit_length() + _WORD_BITS - 1) // _WORD_BITS * _WORD_BYTES
    packed = unacked.to_bytes(size, "little")
    return tuple(
        int.from_bytes(packed[at : at + _WORD_BYTES], "little", signed=True)
        for at in range(0, size, _WORD_BYTES)
    )
