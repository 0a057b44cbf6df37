"""Recovery over several files: the chain, what is missing, and what is settled already."""

from __future__ import annotations

import pytest

from magnetar.errors import CorruptData
from magnetar.journal.format import (
    FILE_HEADER_BYTES,
    FileHeader,
    encode_batch,
    encode_file_header,
    encode_settled,
)
from tests.unit.journal.support import SALT, STORE, bodies_of, image, recovered

UNUSED = encode_file_header(FileHeader(0, 0, 0, STORE)) + bytes(4096)


def test_an_unused_journal_is_empty() -> None:
    found = recovered(UNUSED, UNUSED)
    assert (found.next_sequence, found.settled, found.records) == (1, 0, [])


def test_files_are_read_in_the_order_of_their_numbers() -> None:
    found = recovered(
        image([[b"d"], [b"e"]], first=4, salt=1),
        UNUSED,
        image([[b"a", b"b"], [b"c"]], first=1, salt=2),
        image([], first=6, salt=3),
    )
    assert bodies_of(found) == [b"a", b"b", b"c", b"d", b"e"]
    assert [record.sequence for record in found.records] == [1, 2, 3, 4, 5]
    assert found.next_sequence == 6


def test_a_torn_tail_is_cut_in_the_last_file_only() -> None:
    torn = image([[b"c"], [b"d"]], first=3)
    torn = torn[: FILE_HEADER_BYTES + 512].ljust(len(torn), b"\0")
    first = image([[b"a", b"b"]])
    assert bodies_of(recovered(first, torn)) == [b"a", b"b", b"c"]
    with pytest.raises(CorruptData, match="records 4 to 4 are missing"):
        recovered(first, torn, image([[b"e"]], first=5))


def test_a_missing_file_is_noticed() -> None:
    first, last = image([[b"a"]]), image([[b"c"]], first=3)
    with pytest.raises(CorruptData, match="records 2 to 2 are missing"):
        recovered(first, last)
    with pytest.raises(CorruptData, match="records from 1 on are missing"):
        recovered(last)


def test_a_damaged_end_of_an_earlier_file_is_noticed() -> None:
    first = bytearray(image([[b"a"], [b"b"]]))
    first[FILE_HEADER_BYTES + 512 + 40] ^= 1
    with pytest.raises(CorruptData, match="records 2 to 2 are missing"):
        recovered(bytes(first), image([[b"c"]], first=3))


def test_what_is_settled_is_not_replayed() -> None:
    first, second = image([[b"a"], [b"b"]]), image([[b"c"], [b"d"]], first=3, settled=3)
    found = recovered(first, second)
    assert bodies_of(found) == [b"d"]
    assert (found.settled, found.next_sequence) == (3, 5)


def test_a_settled_file_may_be_gone_or_damaged() -> None:
    second = image([[b"c"], [b"d"]], first=3, settled=2)
    assert bodies_of(recovered(second)) == [b"c", b"d"]
    damaged = bytearray(image([[b"a"], [b"b"]]))
    damaged[FILE_HEADER_BYTES + 40] ^= 1
    assert bodies_of(recovered(bytes(damaged), second)) == [b"c", b"d"]


def test_a_settled_record_counts_from_where_it_stands() -> None:
    data = image([[b"a"], [b"b"]], room=0)
    record = encode_settled(1)
    data += b"".join(encode_batch([record], len(record), 3, 2, SALT)) + bytes(1024)
    found = recovered(data)
    assert bodies_of(found) == [b"b"]
    assert (found.settled, found.next_sequence) == (1, 4)
