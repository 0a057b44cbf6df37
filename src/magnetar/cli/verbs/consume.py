"""`magnetar consume TOPIC --subscription S`: print messages as they come, and acknowledge them."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Mapping
from typing import Final

import click

from magnetar.cli.admin_client import default_service_url, name_server
from magnetar.cli.isolation import isolation_properties, read_uncommitted_option
from magnetar.cli.link import ServerConnection, checked_url, said_by
from magnetar.cli.unpacked import Chunks, UnpackedMessage, received, unpacked
from magnetar.cli.verbs.scalable import is_scalable
from magnetar.client.client import Client
from magnetar.client.consume.queue import QueueConsumer
from magnetar.client.consume.stream import StreamConsumer
from magnetar.client.consumer_factory import SubscribingOptions
from magnetar.errors import DeadlineExceeded, ServiceNotReady
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import InitialPosition
from magnetar.wire.commands import TYPES
from magnetar.wire.frames import command
from magnetar.wire.messages import Delivered, Received
from magnetar.wire.pb import pulsar_pb2 as pb

# What may be on its way: enough to be fast, little enough to be given back when the verb ends.
_PERMITS_MAX: Final = 100
_TYPES: Final = {
    "exclusive": pb.CommandSubscribe.Exclusive,
    "shared": pb.CommandSubscribe.Shared,
    "failover": pb.CommandSubscribe.Failover,
    "key-shared": pb.CommandSubscribe.Key_Shared,
}
_SCALABLE_TYPES: Final = ("stream", "queue")
_STARTS: Final = {
    "earliest": pb.CommandSubscribe.Earliest,
    "latest": pb.CommandSubscribe.Latest,
}


@click.command()
@click.argument("topic")
@click.option("--subscription", "-s", required=True, help="Its name; it is created if need be.")
@click.option("--count", type=click.IntRange(1), help="Stop after so many messages.")
@click.option(
    "--from",
    "start",
    type=click.Choice(tuple(_STARTS)),
    default="latest",
    show_default=True,
    help="Where a new subscription starts.",
)
@click.option(
    "--type",
    "kind",
    type=click.Choice((*_TYPES, *_SCALABLE_TYPES)),
    help="How consumers of the subscription share its messages; stream (in order by key) and queue"
    " are for topic:// names.  [exclusive; of a topic:// name stream]",
)
@read_uncommitted_option
@click.option("--wait", type=click.FloatRange(0.0), help="Stop once nothing came for so long (s).")
@click.option("--url", metavar="URL", help="The server.  [default: by settings]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per message.")
def consume(
    topic: str,
    subscription: str,
    count: int | None,
    start: str,
    kind: str | None,
    read_uncommitted: bool,
    wait: float | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Print messages of TOPIC and acknowledge them, until --count, --wait or Ctrl-C."""
    wanted = _wanted_type(topic, kind)
    server = url or default_service_url()
    properties = isolation_properties(read_uncommitted)
    # Made here: its count is needed after Ctrl-C has ended the coroutine.
    consumption = _Consumption(count, wait, as_json)
    if read_uncommitted:
        # On stderr: stdout has the messages alone.
        click.echo("reading what is not committed too", err=True)
    pairs = [{"key": key, "value": value} for key, value in properties.items()]
    try:
        if wanted in _SCALABLE_TYPES:
            position = InitialPosition[start.upper()]
            work = consumption.run_scalable(
                server, topic, subscription, wanted, position, properties
            )
        else:
            options: dict[str, object] = {
                "subscription": subscription,
                "subType": _TYPES[wanted],
                "initialPosition": _STARTS[start],
                "subscription_properties": pairs,
            }
            work = consumption.run(server, TopicName.parse(topic), options)
        with said_by(server):
            asyncio.run(work)
    # The usual end of this verb, and no error.
    except KeyboardInterrupt:
        click.echo(f"stopped after {consumption.printed} messages", err=True)


def _wanted_type(topic: str, kind: str | None) -> str:
    scalable = is_scalable(topic)
    if kind is None:
        return "stream" if scalable else "exclusive"
    # The names differ because the things do: none is translated silently.
    if scalable and kind not in _SCALABLE_TYPES:
        raise click.UsageError(f"a scalable topic has --type {' or '.join(_SCALABLE_TYPES)}")
    if not scalable and kind in _SCALABLE_TYPES:
        raise click.UsageError(f"--type {kind} is for scalable topics; use {', '.join(_TYPES)}")
    return kind


class _Consumption:
    """One run of the verb."""

    def __init__(self, count: int | None, wait: float | None, as_json: bool) -> None:
        self.printed = 0
        self._count = count
        self._wait = wait
        self._as_json = as_json
        self._chunks = Chunks()

    async def run(self, url: str, topic: TopicName, options: dict[str, object]) -> None:
        async with ServerConnection(url) as link:
            parts = await link.partitions_of(topic)
            # One consumer for each partition, all on this connection.
            for number, part in enumerate(parts):
                await link.look_up(part)
                await link.request("SUBSCRIBE", topic=str(part), consumer_id=number, **options)
                link.write(command("FLOW", consumer_id=number, messagePermits=self._permits()))
            name_server(url)
            while not self._is_done:
                received = await link.next_within(self._wait)
                # Nothing for as long as --wait says.
                if received is None:
                    break
                if isinstance(received, Delivered):
                    self._take(link, received)
                # The topic moved or was deleted: the CLI does not look it up again.
                elif isinstance(received, Received) and received.type == TYPES["CLOSE_CONSUMER"]:
                    raise ServiceNotReady(f"the server closed the consumer of {topic}")
            # Closed in order, so that what was delivered and not
            # acknowledged goes to others at once.
            for number in range(len(parts)):
                await link.request("CLOSE_CONSUMER", consumer_id=number)

    async def run_scalable(
        self,
        url: str,
        topic: str,
        subscription: str,
        kind: str,
        start: InitialPosition,
        properties: Mapping[str, str],
    ) -> None:
        """Consume by our client, which knows the segments of a topic and follows their changes."""
        options = SubscribingOptions(
            queue_size=self._permits(),
            initial_position=start,
            subscription_properties=properties,
        )
        async with Client(await checked_url(url)) as client:
            consumer: QueueConsumer[bytes] | StreamConsumer[bytes]
            if kind == "queue":
                consumer = await client.queue_consumer(topic, subscription, **options)
            else:
                consumer = await client.stream_consumer(topic, subscription, **options)
            # Closing it sends what was acknowledged and gives the rest back.
            async with consumer:
                name_server(url)
                while not self._is_done:
                    try:
                        message = await consumer.receive(self._wait)
                    # Nothing for as long as --wait says.
                    except DeadlineExceeded:
                        break
                    self._print(received(message))
                    if isinstance(consumer, QueueConsumer):
                        consumer.ack(message)
                    else:
                        consumer.ack_cumulative(message)

    @property
    def _is_done(self) -> bool:
        return self._count is not None and self.printed >= self._count

    def _permits(self) -> int:
        # Never more than is still wanted: other consumers would wait for what we hold.
        left = _PERMITS_MAX if self._count is None else self._count - self.printed
        return min(left, _PERMITS_MAX)

    def _take(self, link: ServerConnection, delivered: Delivered) -> None:
        """Print what is still wanted of an entry and acknowledge just that."""
        consumer_id = delivered.body.consumer_id
        messages = unpacked(delivered, self._chunks)
        # Messages of a batch that were acknowledged before come again with the others: not shown.
        taken = [message for message in messages if message.is_open][: self._wanted()]
        for message in taken:
            self._print(message)
        if not messages:  # a chunk: acknowledged with the last one
            link.write(command("FLOW", consumer_id=consumer_id, messagePermits=1))
            return
        # --count may end within a batch: what was not printed stays unacknowledged.
        open_after = {m.index for m in messages if m.is_open} - {m.index for m in taken}
        ids = [*messages[0].earlier_chunks, delivered.body.message_id]
        link.write(ack_frame(consumer_id, ids, open_after, len(messages)))
        # Permits for what was used, so that the window stays as it is; none once it is enough.
        if not self._is_done:
            used = sum(message.permits for message in messages if message.is_open)
            link.write(command("FLOW", consumer_id=consumer_id, messagePermits=max(used, 1)))

    def _wanted(self) -> int | None:
        return None if self._count is None else self._count - self.printed

    def _print(self, message: UnpackedMessage) -> None:
        self.printed += 1
        if not self._as_json:
            click.echo(message.text if message.text is not None else f"<{message.note}>")
            return
        shown: dict[str, object] = {"id": message.id, "publish_time": message.publish_time}
        if message.key is not None:
            shown["key"] = message.key
        if message.properties:
            shown["properties"] = message.properties
        if message.redelivery_count:
            shown["redelivery_count"] = message.redelivery_count
        # Bytes that are no text, or that cannot be opened here: why, and the bytes themselves.
        if message.text is None:
            shown["note"] = message.note
            shown["base64"] = b64encode(message.payload).decode()
        else:
            shown["text"] = message.text
        click.echo(json.dumps(shown))


def ack_frame(
    consumer_id: int, ids: list[pb.MessageIdData], still_open: set[int], batch_size: int
) -> bytes:
    acked = []
    for each in ids:
        copy = pb.MessageIdData(ledgerId=each.ledgerId, entryId=each.entryId)
        if each.HasField("partition"):
            copy.partition = each.partition
        acked.append(copy)
    # Only the last id can be a batch: earlier chunks are whole entries.
    if still_open:
        bits = sum(1 << index for index in still_open)
        words = (batch_size + 63) // 64
        values = [bits >> 64 * word & (2**64 - 1) for word in range(words)]
        # The field is signed: the highest bit of a word makes it negative.
        acked[-1].ack_set.extend(v - 2**64 if v >= 2**63 else v for v in values)
    return command(
        "ACK",
        consumer_id=consumer_id,
        ack_type=pb.CommandAck.Individual,
        message_id=acked,
    )
