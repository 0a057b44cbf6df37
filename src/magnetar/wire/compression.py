"""Pure: compression of payloads, in the framing that every Pulsar client uses.

Owns: `Compression`, `compress` and `decompress`. LZ4 is a bare block and Snappy the raw format,
both without a size in front; zlib and Zstandard are complete streams. How large a payload was
before stands in the metadata of its message.

Invariants:
1. `decompress(kind, compress(kind, x), len(x)) == x`.
2. Never more than the announced size is written, and that is not believed: memory is taken in
   steps, as the payload really unfolds, and never for more than so few bytes can unfold into.
3. Bytes that are not of their kind, or not of the announced size, raise `UnreadableMessage`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import cramjam

from magnetar.errors import UnreadableMessage

# Far above a broker's usual limit of 5 MiB for a message, and bearable if somebody lies.
UNCOMPRESSED_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest size that a consumer believes unless it is told otherwise."""


# The first step of memory, and by how much the next is larger: what was unfolded is unfolded again,
# which costs an eighth in all.
_STEP_BYTES: Final = 256 * 1024
_STEP_FACTOR: Final = 8

# What a byte can unfold into at most, by the formats: a run of LZ4 grows by 255 with each byte of
# its length, deflate reaches 1032, a block of Zstandard has 128 KiB and 4 bytes at least, and a
# copy of Snappy 64 bytes for 3.
_GROWTH_MAX: Final = {1: 255, 2: 1032, 3: 32 * 1024, 4: 22}
_GROWTH_SLACK: Final = 64

_NO_ROOM: Final = "failed to write whole buffer"
"""What the streams say if there was more than the buffer holds."""


class Compression(IntEnum):
    """The compression of a payload; the numbers are those of the protocol.

    LZ4 and SNAPPY are fast, ZSTD and ZLIB make payloads smaller; NONE leaves them as they are.
    """

    NONE = 0
    LZ4 = 1
    ZLIB = 2
    ZSTD = 3
    SNAPPY = 4


def compress(kind: Compression, data: bytes) -> bytes:
    """The payload as it is sent."""
    match kind:
        case Compression.NONE:
            return data
        case Compression.LZ4:
            return bytes(cramjam.lz4.compress_block(data, store_size=False))
        case Compression.ZLIB:
            return bytes(cramjam.zlib.compress(data))
        case Compression.ZSTD:
            return bytes(cramjam.zstd.compress(data))
        case Compression.SNAPPY:
            return bytes(cramjam.snappy.compress_raw(data))


def decompress(
    kind: int, data: bytes, size: int, *, size_max: int = UNCOMPRESSED_BYTES_MAX
) -> bytes:
    """The payload as it was before `compress`; `size` is what its metadata announces."""
    if kind == Compression.NONE:
        return data
    # Before any memory is taken (invariant 2).
    if not 0 <= size <= size_max:
        raise UnreadableMessage(f"a payload announces {size} bytes; the limit is {size_max}")
    growth = _GROWTH_MAX.get(kind)
    if growth is None:
        raise UnreadableMessage(f"a payload is compressed in an unknown way, {kind}")
    if size > len(data) * growth + _GROWTH_SLACK:
        raise UnreadableMessage(f"a payload of {len(data)} bytes announces {size}")
    # A block knows no steps, and cannot grow far; of a stream, more is taken when it was needed.
    is_stream = kind in (Compression.ZLIB, Compression.ZSTD)
    room = min(size, _STEP_BYTES) if is_stream else size
    while True:
        unfolded = bytearray(room)
        reason = ""
        try:
            written = _unfold(kind, data, unfolded)
        except cramjam.DecompressionError as error:
            reason = str(error)
        if not reason:
            break
        # Raised out here: it may be kept for long, and must keep nothing alive.
        if room == size or _NO_ROOM not in reason:
            raise UnreadableMessage(f"a payload cannot be decompressed: {reason}")
        room = min(size, room * _STEP_FACTOR)
    if written != size:
        raise UnreadableMessage(f"a payload has {written} bytes, and announces {size}")
    return bytes(unfolded)


def _unfold(kind: int, data: bytes, into: bytearray) -> int:
    match kind:
        case Compression.LZ4:
            # An LZ4 block has one token at least, also if it is of nothing.
            if not data:
                raise UnreadableMessage("a compressed payload is empty")
            return cramjam.lz4.decompress_block_into(data, into, output_len=len(into))
        case Compression.ZLIB:
            return cramjam.zlib.decompress_into(data, into)
        case Compression.ZSTD:
            return cramjam.zstd.decompress_into(data, into)
        case Compression.SNAPPY:
            return cramjam.snappy.decompress_raw_into(data, into)
        case _:
            raise UnreadableMessage(f"a payload is compressed in an unknown way, {kind}")
