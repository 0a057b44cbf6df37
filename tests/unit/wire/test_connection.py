"""The connection's states, its limits, and bytes that come in any pieces."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import FrameTooLarge, LocalProtocolError, ProtocolError, RemoteProtocolError
from magnetar.wire.commands import TYPES, Side
from magnetar.wire.connection import (
    RUN_BYTES_MAX,
    RUN_SENDS_MAX,
    Connection,
    State,
    _parsed_txn,
    _txn_of,
)
from magnetar.wire.frames import SIZES, base_command, command, encode_message, encode_with_payload
from magnetar.wire.messages import (
    Command,
    Delivered,
    Received,
    Send,
    SendRun,
    TxnId,
    TxnSend,
    Unknown,
)
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.wire.support import (
    CONNECT,
    CONNECTED,
    entry,
    open_client,
    open_server,
    send_frame,
)

FLOW = command("FLOW", consumer_id=1, messagePermits=1000)
TWO_GB_PREFIX = (2**31).to_bytes(4, "big")


def test_a_server_connection_opens() -> None:
    connection = Connection()
    [received] = connection.receive(CONNECT)
    assert isinstance(received, Received)
    assert received.type == TYPES["CONNECT"]
    connection.receive(command("AUTH_RESPONSE"))
    connection.open()
    assert connection.state is State.OPEN
    assert connection.receive(FLOW + command("PING")) == [
        Received(TYPES["FLOW"], base_command("FLOW", consumer_id=1, messagePermits=1000).flow),
        Received(TYPES["PING"], base_command("PING").ping),
    ]


def test_a_client_connection_opens() -> None:
    connection = Connection(side=Side.CLIENT)
    connection.receive(command("AUTH_CHALLENGE"))
    connection.receive(CONNECTED)
    assert connection.state is State.OPEN


@pytest.mark.parametrize(
    ("before", "frame"),
    [
        (b"", FLOW),
        (b"", command("PING")),
        (b"", CONNECTED),
        (CONNECT, CONNECT),
        (CONNECT, FLOW),
        (CONNECT, send_frame(entry(), producer_id=1, sequence_id=1)),
    ],
)
def test_what_a_server_refuses_before_it_opened(before: bytes, frame: bytes) -> None:
    connection = Connection()
    if before:
        connection.receive(before)
    with pytest.raises(RemoteProtocolError):
        connection.receive(frame)
    assert connection.state is State.CLOSED


@pytest.mark.parametrize("frame", [CONNECT, CONNECTED, command("SUCCESS", request_id=1)])
def test_what_an_open_server_refuses(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        open_server().receive(frame)


@pytest.mark.parametrize("frame", [CONNECTED, FLOW])
def test_what_an_open_client_refuses(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        open_client().receive(frame)


def test_opening_needs_a_handshake() -> None:
    with pytest.raises(LocalProtocolError):
        Connection().open()
    closed = Connection()
    closed.close()
    closed.open()
    assert closed.state is State.CLOSED


def test_after_an_error_nothing_is_received() -> None:
    connection = open_server()
    with pytest.raises(RemoteProtocolError) as first:
        connection.receive(CONNECT)
    with pytest.raises(RemoteProtocolError) as second:
        connection.receive(FLOW)
    assert second.value is first.value is connection.error


def test_commands_before_a_broken_frame_are_handed_out() -> None:
    connection = open_server()
    assert len(connection.receive(FLOW + FLOW + CONNECT + FLOW)) == 2
    assert connection.state is State.CLOSED
    assert connection.error is not None
    with pytest.raises(RemoteProtocolError):
        connection.receive(b"")


@pytest.mark.parametrize("most", [1, 2, 5, 6, 100])
def test_what_goes_beyond_a_limit_is_given_by_the_next_calls_in_order(most: int) -> None:
    sends = [send_frame(entry(), producer_id=1, sequence_id=each) for each in range(2)]
    data = FLOW + command("PING") + FLOW + b"".join(sends) + FLOW + command("PING")
    whole = open_server().receive(data)
    connection = open_server()
    found = connection.receive(data + FLOW[:5], most)
    assert len(found) <= most + 1, "a run of sends goes on to its end"
    while connection.is_more:
        more = connection.receive(b"", most)
        assert more
        found += more
    assert found == whole
    assert connection.buffered_bytes == 5
    assert connection.receive(FLOW[5:], most) == whole[:1]


def test_a_huge_frame_is_refused_by_its_first_four_bytes() -> None:
    for connection in (Connection(), open_server(), open_client()):
        for byte in TWO_GB_PREFIX[:3]:
            connection.receive(bytes([byte]))
        with pytest.raises(FrameTooLarge):
            connection.receive(TWO_GB_PREFIX[3:])
        assert connection.buffered_bytes == 0


def test_frames_are_small_until_the_handshake_is_done() -> None:
    connection = Connection(100_000, handshake_frame_bytes=1000)
    with pytest.raises(FrameTooLarge):
        connection.receive((1001).to_bytes(4, "big"))
    connection = Connection(100_000, handshake_frame_bytes=1000)
    connection.receive(CONNECT)
    with pytest.raises(FrameTooLarge):
        connection.receive((1001).to_bytes(4, "big"))
    open_server(100_000).receive((100_000).to_bytes(4, "big"))
    with pytest.raises(FrameTooLarge):
        open_server(100_000).receive((100_001).to_bytes(4, "big"))


def test_a_connect_with_a_large_token_fits() -> None:
    token = command(
        "CONNECT", client_version="c", auth_method_name="token", auth_data=b"t" * 60_000
    )
    assert len(Connection().receive(token)) == 1


def test_the_largest_send_passes_and_one_byte_more_does_not() -> None:
    frame = send_frame(entry(bytes(50_000)), producer_id=1, sequence_id=1)
    assert len(open_server(len(frame) - 4).receive(frame)) == 1
    with pytest.raises(FrameTooLarge):
        open_server(len(frame) - 5).receive(frame)


@pytest.mark.parametrize(
    "frame",
    [
        (3).to_bytes(4, "big") + bytes(3),
        SIZES.pack(6, 3) + b"\x08\x12",
        SIZES.pack(4, 0),
        SIZES.pack(6, 2) + b"\x08\x12",
        SIZES.pack(6, 2) + b"\xff\xff",
        SIZES.pack(8, 4) + b"\x08\x0b\x5a\x00",
        command("LOOKUP", topic="t", request_id=1).replace(b"t", b"\xff"),
        SIZES.pack(len(FLOW) - 3, len(FLOW) - 8) + FLOW[8:] + b"x",
    ],
)
def test_broken_frames(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        open_server().receive(frame)


def test_an_unknown_command_is_told_from_a_broken_one() -> None:
    encoded = b"\x08\x8f\x01\xfa\x08\x02\x08\x01"
    frame = SIZES.pack(4 + len(encoded), len(encoded)) + encoded
    assert open_server().receive(frame + FLOW)[0] == Unknown(143)
    handshake = Connection()
    handshake.receive(CONNECT)
    with pytest.raises(RemoteProtocolError):
        handshake.receive(frame)


def test_a_send_in_full() -> None:
    frame = send_frame(
        entry(),
        producer_id=2,
        sequence_id=10,
        num_messages=5,
        highest_sequence_id=14,
        txnid_least_bits=8,
        txnid_most_bits=0,
        is_chunk=True,
        marker=True,
    )
    [sent] = open_server().receive(frame)
    assert isinstance(sent, Send)
    assert (sent.producer_id, sent.sequence_id, sent.num_messages) == (2, 10, 5)
    assert (sent.highest_sequence_id, sent.txn_id) == (14, TxnId(0, 8))
    assert sent.is_chunk
    assert sent.marker
    assert sent.checksum_ok
    assert sent.headers_and_payload == entry()


def test_one_half_of_a_transaction_id_is_none() -> None:
    frame = send_frame(entry(), producer_id=2, sequence_id=10, txnid_least_bits=8)
    [sent] = open_server().receive(frame)
    assert isinstance(sent, Send)
    assert sent.txn_id is None


def test_a_send_with_a_wrong_checksum_is_marked() -> None:
    damaged = entry()[:-1] + b"?"
    frames = send_frame(damaged, producer_id=1, sequence_id=1) + FLOW
    sent, flow = open_server().receive(frames)
    assert isinstance(sent, Send)
    assert not sent.checksum_ok
    assert sent.headers_and_payload == damaged
    assert isinstance(flow, Received)


def test_a_message_is_delivered() -> None:
    frame = b"".join(encode_message(7, (1, 2), 0, 3, [-1, 5], entry()))  # type: ignore[arg-type]
    [delivered] = open_client().receive(frame)
    assert isinstance(delivered, Delivered)
    assert delivered.body.message_id.entryId == 2
    assert list(delivered.body.ack_set) == [-1, 5]
    assert delivered.headers_and_payload == entry()
    assert delivered.checksum_ok


FRAMES = st.lists(
    st.sampled_from(
        [
            FLOW,
            command("PING"),
            command("LOOKUP", topic="t", request_id=300),
            send_frame(entry(), producer_id=1, sequence_id=2),
            send_frame(entry(bytes(300)), producer_id=1, sequence_id=2**20, num_messages=9),
            send_frame(entry(checksum=False), producer_id=1, sequence_id=2),
            send_frame(entry()[:-1], producer_id=1, sequence_id=3),
            send_frame(entry(), producer_id=1, sequence_id=2, highest_sequence_id=4),
            CONNECT,
            b"\xff" * 9,
        ]
    ),
    max_size=8,
)


@given(FRAMES, st.data())
def test_pieces_give_what_the_whole_gives(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frames)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    edges = [0, *sorted(cuts), len(stream)]
    whole = _fed([stream])
    assert _fed([stream[a:b] for a, b in pairwise(edges)]) == whole
    assert _fed([stream[at : at + 1] for at in range(len(stream))]) == whole
    # Put aside first, as while others have used up a turn of the loop.
    kept = data.draw(st.sets(st.integers(0, len(edges))))
    assert _fed([stream[a:b] for a, b in pairwise(edges)], kept) == whole


def test_a_large_frame_in_small_pieces_is_kept_once() -> None:
    frame = send_frame(entry(bytes(90_000)), producer_id=1, sequence_id=2)
    connection = open_server()
    for at in range(0, len(frame) - 1, 3):
        assert connection.receive(frame[at : min(at + 3, len(frame) - 1)]) == []
        assert connection.buffered_bytes <= at + 3
    assert len(connection.receive(frame[-1:])) == 1
    assert connection.buffered_bytes == 0


def test_small_pieces_are_not_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    take_frames = Connection._take_frames

    def counted(self: Connection, data: bytes, commands: list[Command], most: int | None) -> int:
        nonlocal looks
        looks += 1
        return take_frames(self, data, commands, most)

    frame = send_frame(entry(bytes(10_000)), producer_id=1, sequence_id=2)
    connection = open_server()
    monkeypatch.setattr(Connection, "_take_frames", counted)
    for at in range(len(frame)):
        connection.receive(frame[at : at + 1])
    # At its first byte, at the four that hold its size, and once it is whole.
    assert looks <= 3


SEND_FIELDS = st.fixed_dictionaries(
    {
        "producer_id": st.integers(0, 300) | st.integers(0, 2**64 - 1),
        "sequence_id": st.integers(0, 2**22) | st.integers(0, 2**64 - 1),
    },
    optional={
        "num_messages": st.integers(0, 20_000) | st.integers(-(2**31), 2**31 - 1),
        "highest_sequence_id": st.integers(0, 2**64 - 1),
        "txnid_least_bits": st.integers(0, 2**64 - 1),
        "txnid_most_bits": st.integers(0, 2**64 - 1),
        "is_chunk": st.booleans(),
    },
)
UNKNOWN_FIELDS = st.sampled_from(
    [b"", b"", b"\xa0\x06\x01", b"\xa2\x06\x02hi", b"\x08\x05", b"\x18\x02"]
)


@given(SEND_FIELDS, UNKNOWN_FIELDS, st.binary(max_size=40), st.booleans(), st.booleans())
def test_the_fast_path_equals_protobuf(
    fields: dict[str, object], more: bytes, payload: bytes, checksum: bool, damaged: bool
) -> None:
    headers_and_payload = entry(payload, checksum=checksum)
    if damaged:
        headers_and_payload = headers_and_payload[:-1] + b"\xee"
    # Fields that nobody knows, and known ones repeated: the last one counts.
    body = base_command("SEND", **fields).send.SerializeToString() + more
    encoded = b"\x08\x06\x32" + bytes([len(body)]) + body
    total = 4 + len(encoded) + len(headers_and_payload)
    frame = SIZES.pack(total, len(encoded)) + encoded + headers_and_payload
    [fast] = open_server().receive(frame)
    # The type behind the body is as valid, and nothing that the fast path knows.
    swapped = SIZES.pack(total, len(encoded)) + encoded[2:] + encoded[:2] + headers_and_payload
    [slow] = open_server().receive(swapped)
    assert fast == slow


def test_the_fast_path_at_the_edges_of_its_numbers() -> None:
    lengths = [2**n + d for n in (7, 14, 21, 28, 56, 63) for d in (-1, 0)]
    for producer_id in (0, 1, 300, 2**64 - 1, *lengths):
        for sequence_id in (0, 5, 2**64 - 1, *lengths):
            for num_messages in (None, 0, 1, 127, 128, 16_383, 16_384, -1):
                fields = {
                    "producer_id": producer_id,
                    "sequence_id": sequence_id,
                    "num_messages": num_messages,
                }
                [sent] = open_server().receive(send_frame(entry(), **fields))
                assert isinstance(sent, Send)
                fields["num_messages"] = 1 if num_messages is None else num_messages
                assert {name: getattr(sent, name) for name in fields} == fields


@pytest.mark.parametrize(
    "body",
    [
        b"\x08\x81\x00\x10\x82\x80\x00",
        b"\x08\x01\x10" + b"\xff" * 9 + b"\x7f",
        b"\x08\x01\x10" + b"\xff" * 10,
        b"\x08\xff",
        b"\x08\xff\xff",
        b"\x08\x01\x10\xff",
        b"\x08\x01\x10\x01\x18",
        b"\x08\x01\x10\x01\x18\xff",
        b"\x08\x01\x10\x01\x18\xff\xff",
    ],
)
@pytest.mark.parametrize("after", [b"", b"\xff" * 3, b"\xff" * 40, entry()])
def test_numbers_of_odd_length_and_numbers_cut_short(body: bytes, after: bytes) -> None:
    encoded = b"\x08\x06\x32" + bytes([len(body)]) + body
    sizes = SIZES.pack(4 + len(encoded) + len(after), len(encoded))
    swapped = encoded[2:] + encoded[:2]
    assert _fed([sizes + encoded + after]) == _fed([sizes + swapped + after])


def test_the_reference_of_the_fast_path() -> None:
    """The comparison above compares two paths: a common SEND takes the fast one only in order."""
    body = base_command("SEND", producer_id=1, sequence_id=2)
    frame = b"".join(encode_with_payload(body, entry()))
    [fast] = open_server().receive(frame)
    swapped = frame[:8] + frame[10:16] + frame[8:10] + frame[16:]
    [slow] = open_server().receive(swapped)
    assert type(fast) is Send
    assert type(slow) is not Send
    assert fast == slow


def _fed(pieces: list[bytes], kept: Collection[int] = ()) -> tuple[list[Command], str]:
    connection = open_server()
    commands: list[Command] = []
    try:
        for number, piece in enumerate(pieces):
            if number in kept:
                connection.keep(piece)
            else:
                commands += connection.receive(piece)
        if connection.is_more:
            commands += connection.receive(b"")
    except ProtocolError as error:
        return commands, str(error)
    return commands, str(connection.error or "")


@given(st.lists(st.none() | st.integers(0, 2), max_size=12), st.booleans())
def test_sends_of_several_transactions_in_one_piece(whose: list[int | None], counted: bool) -> None:
    txns = [TxnId(0, 2**63 + 5), TxnId(0, 2**63 + 500), TxnId(15, 0)]
    frames, expected = [], []
    for number, each in enumerate(whose):
        fields: dict[str, object] = {"producer_id": 1, "sequence_id": number}
        if counted:
            fields["num_messages"] = 1
        if each is not None:
            fields |= {"txnid_least_bits": txns[each].least, "txnid_most_bits": txns[each].most}
        frames.append(send_frame(entry(), **fields))
        expected.append((number, None if each is None else txns[each]))
    received = open_server().receive(b"".join(frames))
    assert all(type(each) in (Send, TxnSend) for each in received)
    found = [(each.sequence_id, each.txn_id) for each in received if isinstance(each, Send)]
    assert found == expected


# --- runs of SENDs

SENDS = st.lists(
    st.tuples(
        st.sampled_from(
            ["plain", "plain", "plain", "txn 1", "txn 2", "highest", "ping", "damaged"]
        ),
        st.integers(1, 2),
        st.integers(0, 300),
        st.integers(1, 3),
    ),
    max_size=30,
)


def frames_of(steps: list[tuple[str, int, int, int]]) -> bytes:
    frames = []
    for kind, producer_id, sequence_id, num_messages in steps:
        fields: dict[str, object] = {
            "producer_id": producer_id,
            "sequence_id": sequence_id,
            "num_messages": num_messages,
        }
        data = entry(b"%d" % sequence_id)
        if kind == "ping":
            frames.append(command("PING"))
            continue
        if kind.startswith("txn"):
            fields |= {"txnid_most_bits": 0, "txnid_least_bits": int(kind[-1])}
        elif kind == "highest":
            fields["highest_sequence_id"] = sequence_id + 1
        elif kind == "damaged":
            data = data[:-1] + b"\xee"
        frames.append(send_frame(data, **fields))
    return b"".join(frames)


def gathering_server() -> Connection:
    server = Connection(gathers_runs=True)
    server.receive(CONNECT)
    server.open()
    return server


@given(SENDS, st.lists(st.integers(1, 2000), max_size=6))
def test_runs_hold_the_sends_that_come_one_by_one_without_them(
    steps: list[tuple[str, int, int, int]], cuts: list[int]
) -> None:
    data = frames_of(steps)
    expected = open_server().receive(data)
    server, found, start = gathering_server(), [], 0
    for cut in [*cuts, len(data)]:
        for each in server.receive(data[start : start + cut]):
            if not isinstance(each, SendRun):
                found.append(each)
                continue
            found += each.sends()
            assert len(each.sequence_ids) > 1, "a SEND alone is no run"
            assert all(a < b for a, b in pairwise(each.sequence_ids))
            assert each.size == sum(map(len, each.payloads))
        start += cut
    assert found == expected


def test_what_comes_together_is_one_run_up_to_its_limits() -> None:
    count = 2 * RUN_SENDS_MAX + 1
    data = b"".join(send_frame(entry(), producer_id=1, sequence_id=n) for n in range(count))
    *runs, last = gathering_server().receive(data)
    assert [len(each.sequence_ids) for each in runs if isinstance(each, SendRun)] == [
        RUN_SENDS_MAX,
        RUN_SENDS_MAX,
    ]
    assert isinstance(last, Send)
    large = entry(bytes(RUN_BYTES_MAX // 2 + 1))
    data = b"".join(send_frame(large, producer_id=1, sequence_id=n) for n in range(4))
    one, two = gathering_server().receive(data)
    assert isinstance(one, SendRun)
    assert isinstance(two, SendRun)
    assert one.sequence_ids + two.sequence_ids == [0, 1, 2, 3]


TXN_HALVES = st.sampled_from([0, 1, 127, 128, 2**62, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
TXN_FIELDS = st.builds(
    lambda least, most: pb.CommandSend(
        txnid_least_bits=least, txnid_most_bits=most
    ).SerializePartialToString(),
    TXN_HALVES,
    TXN_HALVES,
)


@given(
    TXN_FIELDS
    | st.builds(
        lambda fields, at, byte: fields[: at % len(fields)] + byte + fields[at % len(fields) :],
        TXN_FIELDS,
        st.integers(0, 30),
        st.sampled_from([b"\x00", b"\x80", b"\x01", b"\x20", b"\x28", b"\xff"]),
    )
    | st.builds(lambda fields, at: fields[:at], TXN_FIELDS, st.integers(1, 12))
    | st.binary(min_size=1, max_size=24)
)
def test_the_transaction_of_a_send_is_that_of_protobuf(fields: bytes) -> None:
    assert _txn_of(fields) == _parsed_txn(fields)
