"""`magnetar produce TOPIC MESSAGE...`: send a few messages, for a quick try."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Sequence

import click

from magnetar.cli.admin_client import default_service_url, json_option, name_server
from magnetar.cli.link import REPLY_SECONDS, ServerConnection, checked_url, said_by
from magnetar.cli.output import print_json
from magnetar.cli.unpacked import id_text
from magnetar.cli.verbs.scalable import is_scalable
from magnetar.client.client import Client
from magnetar.client.message.message import AnyMessageId
from magnetar.errors import DeadlineExceeded, NotAllowed, RequestError, ServiceNotReady
from magnetar.model.hashing import key_hash, partition_of
from magnetar.model.names import TopicName
from magnetar.wire.commands import NAMES, TYPES
from magnetar.wire.messages import Received, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb

# Below the thousand at which a server stops reading a connection.
_IN_FLIGHT_MAX = 500
_MESSAGE_BYTES_MAX = 5 * 1024 * 1024
_STDIN = "-"


@click.command()
@click.argument("topic")
@click.argument("messages", nargs=-1, required=True, metavar="MESSAGE...")
@click.option("--key", help="The key of every message: it decides the partition and the order.")
@click.option(
    "--deliver-after",
    "after",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long consumers that share the messages wait for each.",
)
@click.option("--url", metavar="URL", help="The server.  [default: by settings]")
@json_option
def produce(
    topic: str,
    messages: tuple[str, ...],
    key: str | None,
    after: float | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Send each MESSAGE to TOPIC; `-` sends every line of the standard input."""
    name = TopicName.parse(topic)
    texts = [text for each in messages for text in (_lines() if each == _STDIN else [each])]
    send = _produce_scalable if is_scalable(topic) else _produce
    server = url or default_service_url()
    ids = asyncio.run(send(server, name, texts, key, after))
    name_server(server)
    if as_json:
        print_json(ids)
        return
    for text in ids:
        click.echo(text)


def _lines() -> list[str]:
    return sys.stdin.read().splitlines()


async def _produce(
    url: str, topic: TopicName, texts: Sequence[str], key: str | None, after: float | None
) -> list[str]:
    """Send everything, at most `_IN_FLIGHT_MAX` without receipt; the ids, in order."""
    async with ServerConnection(url) as link:
        parts = await link.partitions_of(topic)
        # One producer for each partition, with its partition as id.
        names = {number: await _open(link, number, part) for number, part in enumerate(parts)}
        ids: list[str] = []
        unconfirmed: deque[tuple[int, int]] = deque()
        found: dict[tuple[int, int], str] = {}
        for sequence_id, text in enumerate(texts):
            # Round robin without a key; messages with one stay together, which keeps their order.
            partition = sequence_id % len(parts)
            if key is not None:
                partition = partition_of(key_hash(key), len(parts))
            entry = _entry(names[partition], sequence_id, text, key, after)
            link.send(partition, sequence_id, entry)
            unconfirmed.append((partition, sequence_id))
            # Receipts of several partitions come in any order:
            # `found` keeps those whose turn it is not.
            while len(unconfirmed) >= _IN_FLIGHT_MAX:
                ids += await _confirmed(link, unconfirmed, found)
        while unconfirmed:
            ids += await _confirmed(link, unconfirmed, found)
        for number in names:
            await link.request("CLOSE_PRODUCER", producer_id=number)
        return ids


async def _produce_scalable(
    url: str, topic: TopicName, texts: Sequence[str], key: str | None, after: float | None
) -> list[str]:
    """Send as `_produce` does; the client knows the segments, and follows when they change."""
    with said_by(url):
        return await _sent(await checked_url(url), topic, texts, key, after)


async def _sent(
    url: str, topic: TopicName, texts: Sequence[str], key: str | None, after: float | None
) -> list[str]:
    ids: list[AnyMessageId] = []
    async with (
        Client(url) as client,
        # Each message an entry of its own, as on regular topics.
        await client.producer(str(topic), batching=False) as producer,
    ):
        for start in range(0, len(texts), _IN_FLIGHT_MAX):
            part = texts[start : start + _IN_FLIGHT_MAX]
            sends = [producer.send(each.encode(), key=key, deliver_after=after) for each in part]
            ids += await asyncio.gather(*sends)
    return [id_text(each) for each in ids]


async def _open(link: ServerConnection, producer_id: int, topic: TopicName) -> str:
    await link.look_up(topic)
    opened = await link.request("PRODUCER", topic=str(topic), producer_id=producer_id)
    # Another producer has the topic for itself, and the server lets us queue: the CLI does not.
    if not opened.producer_ready:
        raise NotAllowed(f"{topic} has a producer that does not share it")
    return str(opened.producer_name)


async def _confirmed(
    link: ServerConnection, unconfirmed: deque[tuple[int, int]], found: dict[tuple[int, int], str]
) -> list[str]:
    """Wait for one receipt; the ids of the messages at the front that have theirs."""
    received = await link.next_within(REPLY_SECONDS)
    if received is None:
        raise DeadlineExceeded(f"{len(unconfirmed)} messages got no receipt in time")
    if isinstance(received, Received):
        body = received.body
        if isinstance(body, pb.CommandSendReceipt):
            place = f"{body.message_id.ledgerId}:{body.message_id.entryId}"
            found[body.producer_id, body.sequence_id] = place
        # Refused: later ones may be stored, but nobody could tell which, so the verb ends.
        elif isinstance(body, pb.CommandSendError):
            raise link.refusal(body.message or f"a message was refused: error {body.error}")
        # The topic moved or was deleted while messages were in flight.
        elif received.type == TYPES["CLOSE_PRODUCER"]:
            raise ServiceNotReady("the server closed the producer; not every message was stored")
        else:
            raise RequestError(f"the server sent {NAMES[received.type]} instead of a receipt")
    ids = []
    while unconfirmed and unconfirmed[0] in found:
        ids.append(found.pop(unconfirmed.popleft()))
    return ids


def _entry(
    producer: str, sequence_id: int, text: str, key: str | None, after: float | None
) -> bytes:
    payload = text.encode()
    if len(payload) > _MESSAGE_BYTES_MAX:
        raise NotAllowed(f"a message of {len(payload)} bytes; at most {_MESSAGE_BYTES_MAX} here")
    metadata = pb.MessageMetadata(
        producer_name=producer,
        sequence_id=sequence_id,
        publish_time=time.time_ns() // 1_000_000,
    )
    if key is not None:
        metadata.partition_key = key
    if after is not None:
        metadata.deliver_at_time = metadata.publish_time + round(after * 1000)
    return encode_entry(metadata, payload)
