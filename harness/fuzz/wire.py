"""Fuzz of the wire parser: `python -m harness.fuzz.wire --inputs N [--seed S]`.

Owns: the making of inputs (random bytes, valid streams, valid streams with damage) and what must
hold for each of them.

Invariants checked on every input, fed whole and in random pieces:
1. Nothing but a `ProtocolError` comes out, and both ways give equal commands and equal errors.
2. No more than one frame of the limit is kept between two calls.
3. Every message handed out can be looked into, or refuses with a `ProtocolError`.
A seed gives the same inputs everywhere; a failure prints the input's own seed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from typing import Final

from magnetar.errors import ProtocolError
from magnetar.wire.commands import NAMES, SENT_BY, TYPES, Side
from magnetar.wire.connection import Connection
from magnetar.wire.frames import SIZES, command, encode_with_payload, varint
from magnetar.wire.messages import (
    Command,
    Delivered,
    Send,
    SendRun,
    broker_entry_metadata_of,
    checksum_holds,
    encode_entry,
    metadata_of,
)
from magnetar.wire.pb import pulsar_pb2 as pb

FRAME_BYTES_MAX: Final = 4096
_REPORT_EVERY: Final = 100_000


def run_input(seed: int) -> int:
    """Check one input; how many commands it gave. Raises AssertionError with the seed."""
    chance = random.Random(seed)
    side = chance.choice((Side.SERVER, Side.CLIENT))
    stream = make_stream(chance, side)
    try:
        return _check_stream(chance, side, stream)
    except Exception as error:
        raise AssertionError(f"input of seed {seed}, {side.value} side: {error!r}") from error


def make_stream(chance: random.Random, side: Side) -> bytes:
    """Bytes as a peer of `side` might send them, damaged or not."""
    if chance.random() < 0.2:
        return chance.randbytes(chance.randrange(200))
    hello = {"client_version": "f"} if side is Side.SERVER else {"server_version": "f"}
    frames = [command("CONNECT" if side is Side.SERVER else "CONNECTED", **hello)]
    frames += [_frame(chance, side) for _ in range(chance.randrange(6))]
    stream = b"".join(frames)
    for _ in range(chance.choice((0, 0, 1, 1, 2, 5))):
        stream = chance.choice(_DAMAGES)(chance, stream)
    return stream


def _frame(chance: random.Random, side: Side) -> bytes:
    if chance.random() < 0.5:
        return _payload_frame(chance, side)
    number = chance.choice([*sorted(SENT_BY[side.peer]), 99, 200])
    name = NAMES.get(number)
    body = chance.randbytes(chance.randrange(30)) if name is None or chance.random() < 0.5 else b""
    if not body and name in ("PING", "PONG"):
        return command(name)
    if not body and name == "FLOW":
        return command("FLOW", consumer_id=chance.randrange(300), messagePermits=1000)
    # A body of random bytes in the member where this type's body belongs.
    encoded = b"\x08" + varint(number) + varint(number << 3 | 2) + varint(len(body)) + body
    return SIZES.pack(4 + len(encoded), len(encoded)) + encoded


def _payload_frame(chance: random.Random, side: Side) -> bytes:
    metadata = pb.MessageMetadata(
        producer_name="fuzz", sequence_id=chance.randrange(2**40), publish_time=1
    )
    entry = encode_entry(metadata, chance.randbytes(chance.randrange(80)))
    if side is Side.SERVER:
        send = pb.CommandSend(
            producer_id=chance.randrange(1, 2 ** chance.randrange(1, 20)),
            sequence_id=chance.randrange(2 ** chance.randrange(1, 65)),
        )
        if chance.random() < 0.3:
            send.num_messages = chance.randrange(2 ** chance.randrange(1, 31))
        if chance.random() < 0.2:
            send.highest_sequence_id = 7
        return b"".join(encode_with_payload(pb.BaseCommand(type="SEND", send=send), entry))
    body = pb.CommandMessage(consumer_id=1, message_id={"ledgerId": 1, "entryId": 2})
    return b"".join(encode_with_payload(pb.BaseCommand(type="MESSAGE", message=body), entry))


def _flip(chance: random.Random, stream: bytes) -> bytes:
    at = chance.randrange(len(stream) or 1)
    return stream[:at] + chance.randbytes(1) + stream[at + 1 :]


def _cut(chance: random.Random, stream: bytes) -> bytes:
    return stream[: chance.randrange(len(stream) + 1)]


def _insert(chance: random.Random, stream: bytes) -> bytes:
    at = chance.randrange(len(stream) + 1)
    return stream[:at] + chance.randbytes(chance.randrange(1, 9)) + stream[at:]


def _remove(chance: random.Random, stream: bytes) -> bytes:
    at = chance.randrange(len(stream) + 1)
    return stream[:at] + stream[at + chance.randrange(1, 9) :]


_DAMAGES: Final[tuple[Callable[[random.Random, bytes], bytes], ...]] = (
    _flip,
    _cut,
    _insert,
    _remove,
)


def _check_stream(chance: random.Random, side: Side, stream: bytes) -> int:
    pieces = []
    offset = 0
    while offset < len(stream):
        size = chance.choice((1, 1, 2, 7, 64))
        pieces.append(stream[offset : offset + size])
        offset += size
    whole = _fed(side, _after_handshake([stream], stream))
    in_pieces = _fed(side, _after_handshake(pieces, stream))
    assert whole == in_pieces, f"whole: {whole}; in pieces: {in_pieces}"
    for each in whole[0]:
        _look_into(each)
    return len(whole[0])


def _after_handshake(pieces: list[bytes], stream: bytes) -> list[bytes]:
    """Cut where the first frame ends: a server opens the connection there, after that call."""
    first = 4 + int.from_bytes(stream[:4], "big")
    cut: list[bytes] = []
    offset = 0
    for piece in pieces:
        inside = first - offset
        if 0 < inside < len(piece):
            cut += [piece[:inside], piece[inside:]]
        else:
            cut.append(piece)
        offset += len(piece)
    return cut


def _fed(side: Side, pieces: list[bytes]) -> tuple[list[Command], str]:
    connection = Connection(FRAME_BYTES_MAX, handshake_frame_bytes=512, side=side)
    commands: list[Command] = []
    raised: ProtocolError | None = None
    try:
        for piece in pieces:
            commands += connection.receive(piece)
            assert connection.buffered_bytes <= FRAME_BYTES_MAX + 4, "kept more than a frame"
            if connection.error is not None:
                break
            if connection.state.value == "handshake" and side is Side.SERVER:
                connection.open()
    except ProtocolError as error:
        raised = error
    assert raised in (None, connection.error), "raised is not what broke the stream"
    return commands, "" if connection.error is None else str(connection.error)


def _look_into(received: Command) -> None:
    assert not isinstance(received, SendRun), "nobody asked for runs"
    if not isinstance(received, Send | Delivered):
        assert received.type in NAMES or received.type not in TYPES.values()
        return
    for look in (metadata_of, broker_entry_metadata_of, checksum_holds):
        try:
            look(received.headers_and_payload)
        except ProtocolError:
            continue


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz the parser of the wire protocol.")
    parser.add_argument("--inputs", type=int, default=10_000, help="how many inputs (10000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first input (0)")
    options = parser.parse_args(arguments)
    commands = 0
    for number in range(options.inputs):
        commands += run_input(options.seed + number)
        if (number + 1) % _REPORT_EVERY == 0:
            print(f"{number + 1} inputs", flush=True)
    print(f"{options.inputs} inputs from seed {options.seed}: {commands} commands, 0 violations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
