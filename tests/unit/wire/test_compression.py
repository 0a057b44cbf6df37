"""Compression: golden bytes, round trips, garbage, announced sizes."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import UnreadableMessage
from magnetar.wire.compression import Compression, compress, decompress

KINDS = [kind for kind in Compression if kind is not Compression.NONE]
_DATA = st.binary(max_size=2000) | st.builds(
    lambda b, n: b * n, st.binary(max_size=20), st.just(99)
)


_TEXT = b"abcdef" * 4 + b"a" + b"vwxyz"

# Written by hand from the two formats. LZ4: six literals and a copy of 19, then five literals.
# Snappy: the length 30, six literals, a copy of 19 from 6 back, five literals.
GOLDEN = {
    Compression.LZ4: "6f616263646566 060000 50767778797a",
    Compression.SNAPPY: "1e 14616263646566 4a0600 10767778797a",
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_bytes_have_no_size_in_front(kind: Compression) -> None:
    assert decompress(kind, bytes.fromhex(GOLDEN[kind]), len(_TEXT)) == _TEXT


def test_zlib_is_a_complete_stream() -> None:
    assert zlib.decompress(compress(Compression.ZLIB, _TEXT)) == _TEXT
    assert decompress(Compression.ZLIB, zlib.compress(_TEXT), len(_TEXT)) == _TEXT


def test_zstd_is_a_complete_frame() -> None:
    assert compress(Compression.ZSTD, _TEXT).startswith(bytes.fromhex("28b52ffd"))


@given(st.sampled_from(Compression), _DATA)
def test_round_trip(kind: Compression, data: bytes) -> None:
    assert decompress(kind, compress(kind, data), len(data)) == data


@given(st.sampled_from(KINDS), _DATA, st.integers(-3, 3).filter(bool))
def test_another_size_than_announced_is_refused(kind: Compression, data: bytes, off: int) -> None:
    with pytest.raises(UnreadableMessage):
        decompress(kind, compress(kind, data), len(data) + off)


@given(st.integers(1, 9), st.binary(max_size=200), st.integers(0, 500))
def test_garbage_is_refused_or_of_the_announced_size(kind: int, data: bytes, size: int) -> None:
    try:
        unfolded = decompress(kind, data, size)
    except UnreadableMessage:
        return
    assert len(unfolded) == size


@pytest.mark.parametrize("kind", KINDS)
def test_what_unfolds_too_far_is_refused_before_memory_is_taken(kind: Compression) -> None:
    bomb = compress(kind, bytes(1_000_000))
    with pytest.raises(UnreadableMessage, match="the limit is 1000"):
        decompress(kind, bomb, 1_000_000, size_max=1000)
    with pytest.raises(UnreadableMessage):
        decompress(kind, bomb, 1000, size_max=1000)


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_that_does_not_come_true_takes_no_memory(kind: Compression) -> None:
    """One byte that says it is 64 MiB, and 4 KiB of a stream that could be."""
    claim = 64 * 1024 * 1024
    honest = compress(kind, bytes(range(256)) * 16)
    tracemalloc.start()
    try:
        for data in (b"\x00", b"(", honest, honest[:-1]):
            with pytest.raises(UnreadableMessage):
                decompress(kind, data, claim)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_large_payloads_unfold_in_steps(kind: Compression) -> None:
    data = bytes(3 * 1024 * 1024)
    assert decompress(kind, compress(kind, data), len(data)) == data
    with pytest.raises(UnreadableMessage):
        decompress(kind, compress(kind, data), len(data) - 1)
