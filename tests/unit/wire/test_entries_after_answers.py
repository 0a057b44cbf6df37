"""Answers that whole entries follow: RANGE_READ_RESPONSE."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import RemoteProtocolError
from magnetar.wire.commands import TYPES
from magnetar.wire.frames import base_command, command, encode_with_entries
from magnetar.wire.messages import ReceivedEntries
from tests.unit.wire.support import open_client, open_server

NEXT = {"ledger_id": 3, "entry_id": 9}


def answer(entries: list[bytes], **fields: object) -> bytes:
    run = {"ledger_id": 3, "first_entry_id": 1, "count": len(entries)}
    given: dict[str, object] = {
        "request_id": 1,
        "runs": [run],
        "sizes": [len(each) for each in entries],
        "next": NEXT,
    }
    return b"".join(
        encode_with_entries(base_command("RANGE_READ_RESPONSE", **(given | fields)), entries)
    )


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 40))
def test_entries_arrive_however_the_bytes_are_cut(entries: list[bytes], step: int) -> None:
    data = answer(entries) + command("PING")
    connection = open_client()
    found = [
        each
        for at in range(0, len(data), step)
        for each in connection.receive(data[at : at + step])
    ]
    received = found[0]
    assert isinstance(received, ReceivedEntries)
    assert received.type == TYPES["RANGE_READ_RESPONSE"]
    assert received.data == b"".join(entries)
    assert list(received.body.sizes) == [len(each) for each in entries]
    assert len(found) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": [3]},
        {"sizes": [5, 5]},
        {"runs": []},
        {"runs": [{"ledger_id": 1, "first_entry_id": 1, "count": 3}]},
    ],
)
def test_other_bytes_than_announced_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError, match="announced"):
        open_client().receive(answer([b"a", b"bc"], **fields))


def test_only_a_server_sends_them() -> None:
    with pytest.raises(RemoteProtocolError):
        open_server().receive(answer([b"a"]))
