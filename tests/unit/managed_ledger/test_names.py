"""Keys of managed ledgers and cursors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.managed_ledger.names import (
    chunks_directory,
    cursor_key,
    cursors_directory,
    encode_name,
    managed_ledger_key,
)
from magnetar.metadata.api import KEY_BYTES_MAX, check_key

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=400)


@given(NAMES, NAMES)
def test_keys_are_valid_and_short_enough_for_a_chunk_name(name: str, cursor: str) -> None:
    for key in (managed_ledger_key(name), cursor_key(name, cursor), chunks_directory(name, cursor)):
        check_key(key)
        assert len(key.encode()) < KEY_BYTES_MAX - 100
    assert cursor_key(name, cursor).startswith(cursors_directory(name) + "/")


@given(NAMES, NAMES)
def test_different_names_have_different_keys(name: str, other: str) -> None:
    assert (encode_name(name) == encode_name(other)) == (name == other)


def test_readable_names_stay_readable_and_long_ones_are_hashed() -> None:
    assert encode_name("public/default/persistent/a b") == "public%2Fdefault%2Fpersistent%2Fa%20b"
    assert encode_name("~") == "%7E"
    long = encode_name("x" * 181)
    assert long.startswith("x" * 100 + "~")
    assert len(long) == 165
    assert encode_name("x" * 180) == "x" * 180
