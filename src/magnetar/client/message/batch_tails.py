"""Pure: what follows the payload size in the metadata of many messages, read all at once.

Owns: `Tails` and `read_tails`. The tail of a message is `event_time`, `partition_key_b64_encoded`,
`ordering_key`, `sequence_id` and `null_value`, as far as it has them, in this order. Tails of one
length nearly always have one form: that of the first is taken apart field by field, all others are
compared with it in one step, as one large number, and the numbers are taken out of all in another.

Invariants:
1. What is read is what protobuf reads. Anything else (another order, a field twice, longer numbers,
   a form that differs from that of the first) is not read here: the answer is None.
2. The cost for a message is some bytes of arithmetic on long integers, and no object.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

# Tags of SingleMessageMetadata; protobuf writes fields in ascending order, so these do as well.
EVENT_TIME: Final = 0x28
KEY_IS_BASE64: Final = 0x30
ORDERING_KEY: Final = 0x3A
SEQUENCE_ID: Final = 0x40
NULL_VALUE: Final = 0x48

_WORD_BYTES: Final = 8
_MORE: Final = 0x80
_IS_BIG_ENDIAN: Final = sys.byteorder == "big"


@dataclass(slots=True)
class Tails:
    """The tails of a batch, a row each."""

    event_times: array[int] = field(default_factory=lambda: array("q"))
    """0: it has none. Empty: none has."""
    sequence_ids: array[int] = field(default_factory=lambda: array("q"))
    """-1, which none is: it has none. Empty: none has."""
    lacks_sequence_ids: bool = False
    """Some rows have none."""
    base64_keys: list[int] = field(default_factory=list)
    """Rows whose key, if they have one, is base64."""
    null_values: list[int] = field(default_factory=list)
    """Rows without a value."""
    ordering_keys: dict[int, bytes] = field(default_factory=dict)
    """By row, if they were asked for: most have none."""


class _Form:
    """The places of the fields in a tail, and the bits that all tails of its form share."""

    __slots__ = (
        "event_time",
        "is_base64",
        "is_null",
        "mask",
        "ordering_key",
        "sequence_id",
        "want",
    )

    def __init__(self, size: int) -> None:
        self.mask = bytearray(size)
        """The bits that are the same in all tails of this form."""
        self.want = bytearray(size)
        self.event_time: range | None = None
        self.sequence_id: range | None = None
        self.ordering_key: slice | None = None
        self.is_base64 = False
        self.is_null = False

    def fits_all(self, joined: bytes, count: int) -> bool:
        """Whether `count` tails, one behind the other, are of this form."""
        # All tails as one number: one AND and one comparison, however many messages there are
        # (invariant 2).
        number = int.from_bytes(joined, "little")
        mask = int.from_bytes(self.mask * count, "little")
        return number & mask == int.from_bytes(self.want * count, "little")

    def _exactly(self, tail: bytes, at: int, end: int) -> None:
        self.mask[at:end] = b"\xff" * (end - at)
        self.want[at:end] = tail[at:end]

    def _number(self, tail: bytes, at: int) -> range | None:
        """Where the number is that begins here; None: it is too long, or has no end."""
        end = at
        # Of a varint only the continuation bits are part of the form: its digits may differ.
        while tail[end] >= _MORE:
            self.mask[end] = self.want[end] = _MORE
            end += 1
        self.mask[end] = _MORE
        return range(at, end + 1) if end - at < _WORD_BYTES else None

    def read(self, tail: bytes) -> bool:
        """Take the first tail apart; False: it has something else, or is broken."""
        # Five fields, ascending, each at most once (invariant 1); anything else gives the batch to
        # protobuf.
        at = last = 0
        while at < len(tail):
            tag = tail[at]
            if tag <= last:
                return False
            self._exactly(tail, at, at + 1)
            last = tag
            at += 1
            if tag in (EVENT_TIME, SEQUENCE_ID):
                found = self._number(tail, at)
                if found is None:
                    return False
                if tag == EVENT_TIME:
                    self.event_time = found
                else:
                    self.sequence_id = found
                at = found.stop
            # Its length is part of the form, its bytes are not.
            elif tag == ORDERING_KEY and tail[at] < _MORE:
                self._exactly(tail, at, at + 1)
                self.ordering_key = slice(at + 1, at + 1 + tail[at])
                at += 1 + tail[at]
            elif tag in (KEY_IS_BASE64, NULL_VALUE) and tail[at] <= 1:
                self._exactly(tail, at, at + 1)
                if tag == NULL_VALUE:
                    self.is_null = tail[at] == 1
                else:
                    self.is_base64 = tail[at] == 1
                at += 1
            else:
                return False
        return at == len(tail)


def read_tails(tails: Sequence[bytes], *, with_ordering_keys: bool = False) -> Tails | None:
    """Read them; None: protobuf must."""
    found = Tails()
    # Within one length, all must have the form of the first; sequence ids that grow a byte in the
    # middle of a batch make two lengths.
    for rows in _by_length(tails):
        chosen = tails if len(rows) == len(tails) else [tails[row] for row in rows]
        form = _Form(len(chosen[0]))
        try:
            if not form.read(chosen[0]):
                return None
        except IndexError:
            return None
        joined = b"".join(chosen)
        if not form.fits_all(joined, len(chosen)):
            return None
        size = len(chosen[0])
        if form.event_time is not None:
            _put(found.event_times, rows, len(tails), 0, _numbers(joined, size, form.event_time))
        if form.sequence_id is None:
            found.lacks_sequence_ids = True
        else:
            _put(found.sequence_ids, rows, len(tails), -1, _numbers(joined, size, form.sequence_id))
        if form.is_base64:
            found.base64_keys += rows
        if form.is_null:
            found.null_values += rows
        if form.ordering_key is not None and with_ordering_keys:
            found.ordering_keys.update({row: tails[row][form.ordering_key] for row in rows})
    return found


def _by_length(tails: Sequence[bytes]) -> Iterator[Sequence[int]]:
    """The rows of each length."""
    lengths = set(map(len, tails))
    if len(lengths) == 1:
        yield range(len(tails))
        return
    rows: dict[int, list[int]] = {length: [] for length in lengths}
    for row, tail in enumerate(tails):
        rows[len(tail)].append(row)
    yield from rows.values()


def _put(
    column: array[int], rows: Sequence[int], count: int, absent: int, numbers: array[int]
) -> None:
    # The usual case, one form for all; else each form fills in its rows.
    if len(rows) == count:
        column.extend(numbers)
        return
    if not column:
        column.extend(array("q", (absent,)) * count)
    for row, number in zip(rows, numbers, strict=True):
        column[row] = number


def _numbers(joined: bytes, size: int, place: range) -> array[int]:
    """The number that stands in this place of each record of `size` bytes."""
    count = len(joined) // size
    # The n-th bytes of all numbers are copied with one strided slice, then seven bits of each are
    # shifted together: digits of seven bits become one number, for all rows at once.
    words = bytearray(_WORD_BYTES * count)
    for digit, at in enumerate(place):
        words[digit::_WORD_BYTES] = joined[at::size]
    wide = int.from_bytes(words, "little")
    number = 0
    for digit in range(len(place)):
        number |= (wide & _digits(count.bit_length(), digit)) >> digit
    found = array("q")
    found.frombytes(number.to_bytes(len(words), "little"))
    # `array` has the machine's order, the arithmetic above is little-endian.
    if _IS_BIG_ENDIAN:
        found.byteswap()
    return found


@lru_cache(maxsize=512)
def _digits(count_bits: int, digit: int) -> int:
    """One digit, of seven bits, of each of so many words (less than 1 << `count_bits`)."""
    # Kept by the number of bits of the count: a few masks serve batches of all sizes.
    word = (0x7F << 8 * digit).to_bytes(_WORD_BYTES, "little")
    return int.from_bytes(word * (1 << count_bits), "little")
