"""`magnetar subscriptions ...`: the reading positions of a topic, and how to move them."""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import click

from magnetar.cli.admin_client import (
    NOT_FOUND,
    AdminClient,
    Answer,
    admin_options,
    ask,
    check,
    json_option,
    topic_path,
)
from magnetar.cli.isolation import isolation_properties, read_uncommitted_option
from magnetar.cli.output import print_json, print_table
from magnetar.cli.unpacked import split_batch
from magnetar.cli.verbs.scalable import is_scalable, scalable_path, subscription_path
from magnetar.errors import NotAllowed
from magnetar.model.ids import EARLIEST, LATEST
from magnetar.model.isolation import ReadIsolation

_ID: Final = re.compile(r"(\d+):(\d+)")
_AGO: Final = re.compile(r"(\d+)([smhd])")
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
# The forms of a place, as help texts and errors name them; `_place` understands them.
_PLACES: Final = "earliest, latest, LEDGER:ENTRY, a time (2026-01-31T12:00:00Z) or an age (90m)"


@click.group()
def subscriptions() -> None:
    """Subscriptions of a topic."""


@subscriptions.command("list")
@click.argument("topic")
@admin_options
@json_option
def list_subscriptions(topic: str, admin_url: str | None, as_json: bool) -> None:
    """List the subscriptions of TOPIC with their backlog."""
    scalable = is_scalable(topic)
    path = scalable_path(topic) if scalable else topic_path(topic)

    async def work(admin: AdminClient) -> Any:
        if scalable:
            return (await admin.get(f"{path}/subscriptions"))["subscriptions"]
        # A partitioned topic has no statistics of its own, only the sum of its partitions.
        counted = await admin.get(f"{path}/partitions")
        which = "partitioned-stats" if counted["partitions"] else "stats"
        return (await admin.get(f"{path}/{which}"))["subscriptions"]

    found = ask(admin_url, work)
    if as_json:
        print_json(found)
        return
    # Servers leave out what does not apply, hence the defaults.
    rows = [
        (
            name,
            each.get("type"),
            each.get("msgBacklog", 0),
            each.get("consumerCount", len(each.get("consumers", ()))),
            each.get("isDurable", True),
            each.get("readIsolation", ReadIsolation.COMMITTED.value),
        )
        for name, each in sorted(found.items())
    ]
    headings = ("subscription", "type", "backlog", "consumers", "durable", "isolation")
    print_table(headings, rows, none=f"{topic} has no subscriptions")


@subscriptions.command()
@click.argument("topic")
@click.argument("subscription")
@click.option("--from", "start", default="latest", show_default=True, help=f"{_PLACES}.")
@click.option(
    "--type",
    "kind",
    type=click.Choice(("stream", "queue")),
    help="Of a topic:// name: in order by key (stream), or each message on its own.  [stream]",
)
@read_uncommitted_option
@admin_options
def create(
    topic: str,
    subscription: str,
    start: str,
    kind: str | None,
    read_uncommitted: bool,
    admin_url: str | None,
) -> None:
    """Create SUBSCRIPTION of TOPIC."""
    path = subscription_path(topic, subscription)
    place = _place(start, topic)
    scalable = is_scalable(topic)
    if kind is not None and not scalable:
        raise click.UsageError("--type is for scalable topics; here the first consumer decides")
    asked = isolation_properties(read_uncommitted)
    properties = {"properties": asked}

    async def work(admin: AdminClient) -> None:
        if scalable:
            await _create_scalable(admin, path, kind or "stream", place, asked)
        # A time cannot be given at the creation: it starts at the
        # first message and is moved at once.
        elif isinstance(place, int):
            await admin.put(path, _id(*EARLIEST.position) | properties)
            await admin.post(f"{path}/resetcursor/{place}")
        else:
            await admin.put(path, place | properties)

    ask(admin_url, work)
    marked = ", reads what is not committed too" if read_uncommitted else ""
    click.echo(f"created {subscription}, which starts at {start}{marked}")


@subscriptions.command()
@click.argument("topic")
@click.argument("subscription")
@click.option("--force", is_flag=True, help="Even while it has consumers: they are closed.")
@admin_options
def delete(topic: str, subscription: str, force: bool, admin_url: str | None) -> None:
    """Delete SUBSCRIPTION of TOPIC."""

    async def work(admin: AdminClient) -> None:
        check(await deletion(admin, topic, subscription, force=force))

    ask(admin_url, work)
    click.echo(f"deleted {subscription}")


async def deletion(admin: AdminClient, topic: str, subscription: str, *, force: bool) -> Answer:
    """The answer to the wish to delete a subscription of a topic of any kind."""
    path = subscription_path(topic, subscription)
    # Of a scalable topic the server deletes it whoever uses it: the operator is asked here.
    if is_scalable(topic) and not force:
        found = await admin.get_or_none(path) or {}
        if count := found.get("consumerCount", 0):
            raise NotAllowed(
                f"{subscription} of {topic} has {count} consumers",
                hint="close them first, or use --force",
            )
    return await admin.exchange("DELETE", path, query={"force": "true" if force else "false"})


@subscriptions.command()
@click.argument("topic")
@click.argument("subscription")
@click.option("--to", "target", required=True, help=f"{_PLACES}.")
@admin_options
def reset(topic: str, subscription: str, target: str, admin_url: str | None) -> None:
    """Move SUBSCRIPTION of TOPIC back or forth; its consumers reconnect."""
    path = subscription_path(topic, subscription)
    place = _place(target, topic)
    scalable = is_scalable(topic)

    async def work(admin: AdminClient) -> None:
        if scalable:
            await _move_scalable(admin, path, place)
        # The admin interface has two forms: by time in the path, by message id in the body.
        elif isinstance(place, int):
            await admin.post(f"{path}/resetcursor/{place}")
        else:
            await admin.post(f"{path}/resetcursor", place)

    ask(admin_url, work)
    click.echo(f"{subscription} goes on at {target}")


@subscriptions.command()
@click.argument("topic")
@click.argument("subscription")
@click.option("--count", type=click.IntRange(1), help="So many messages.")
@click.option("--all", "everything", is_flag=True, help="All that is there now.")
@admin_options
def skip(
    topic: str, subscription: str, count: int | None, everything: bool, admin_url: str | None
) -> None:
    """Leave messages of SUBSCRIPTION out, as if they were acknowledged."""
    # Neither and both are refused: leaving messages out cannot be taken back.
    if (count is None) != everything:
        raise click.UsageError("give --count N or --all")
    path = subscription_path(topic, subscription)
    which = "skip_all" if everything else f"skip/{count}"
    if is_scalable(topic):
        if not everything:
            raise NotAllowed(
                f"{topic} has segments side by side: there is no order by which to count",
                hint="use --all, or `subscriptions reset --to` a time",
            )
        which = "skip-all"
    ask(admin_url, lambda admin: admin.post(f"{path}/{which}"))
    click.echo(f"skipped {'everything' if everything else f'{count} messages'}")


@subscriptions.command()
@click.argument("topic")
@click.argument("subscription")
@click.option("--seconds", type=click.IntRange(1), required=True, help="Older than so many.")
@admin_options
def expire(topic: str, subscription: str, seconds: int, admin_url: str | None) -> None:
    """Leave messages of SUBSCRIPTION out that are older than some time."""
    path = subscription_path(topic, subscription)
    ask(admin_url, lambda admin: admin.post(f"{path}/expireMessages/{seconds}"))
    click.echo(f"expired what is older than {seconds} s")


@subscriptions.command()
@click.argument("topic")
@click.argument("subscription")
@click.option("--count", type=click.IntRange(1, 100), default=1, show_default=True)
@admin_options
@json_option
def peek(topic: str, subscription: str, count: int, admin_url: str | None, as_json: bool) -> None:
    """Show the next messages of SUBSCRIPTION; they stay unacknowledged."""
    path = subscription_path(topic, subscription)
    scalable = is_scalable(topic)

    async def work(admin: AdminClient) -> list[dict[str, Any]]:
        if not scalable:
            return await _peeked(admin, path, count)
        found: list[dict[str, Any]] = []
        backlog = (await admin.get(path))["backlog"]
        # Segment by segment, parents before children; one without a backlog has none to show.
        for number, behind in backlog.items():
            if behind and len(found) < count:
                shown = await _peeked(admin, f"{path}/segment/{number}", count - len(found))
                found += [each | {"id": f"{number}:{each['id']}"} for each in shown]
        return found

    found = ask(admin_url, work)
    if as_json:
        print_json(found)
        return
    rows = [(each["id"], each.get("key"), _first(each, "note", "text", "base64")) for each in found]
    print_table(("id", "key", "message"), rows, none="no messages")


async def _peeked(admin: AdminClient, path: str, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    # The interface shows one entry at a time: the n-th from the subscription's place on.
    for place in range(1, count + 1):
        answer = await admin.exchange("GET", f"{path}/position/{place}")
        # For the first one a 404 is about the topic or the subscription, and is an error.
        if answer.status == NOT_FOUND and place > 1:
            break  # there are fewer
        check(answer)
        found += _shown(answer.headers, answer.data)
    return found


async def _create_scalable(
    admin: AdminClient, path: str, kind: str, place: dict[str, Any] | int, asked: dict[str, str]
) -> None:
    position = "latest" if place == _LATEST else "earliest"
    await admin.put(path, asked, type=kind, position=position)
    if isinstance(place, int):
        await _move_scalable(admin, path, place)


async def _move_scalable(admin: AdminClient, path: str, place: dict[str, Any] | int) -> None:
    if place == _LATEST:
        await admin.post(f"{path}/skip-all")
    else:
        # Before the first message of all is the earliest place.
        moment = place if isinstance(place, int) else 0
        await admin.post(f"{path}/seek", timestamp=str(moment))


def _first(found: Mapping[str, Any], *names: str) -> object:
    return next((found[name] for name in names if name in found), None)


def _place(text: str, topic: str) -> dict[str, Any] | int:
    """A place in a topic: a message id as the admin interface takes it, or a time in ms."""
    # From the strictest form to the loosest: an ISO time comes last.
    if text in ("earliest", "latest"):
        return _id(*(EARLIEST if text == "earliest" else LATEST).position)
    if match := _ID.fullmatch(text):
        if is_scalable(topic):
            raise NotAllowed(
                f"{text} is a place in one segment, and {topic} may have several",
                hint="use earliest, latest, a time (2026-01-31T12:00:00Z) or an age (90m); "
                "a consumer's seek takes ids",
            )
        return _id(int(match[1]), int(match[2]))
    if match := _AGO.fullmatch(text):
        return int((time.time() - int(match[1]) * _UNIT_SECONDS[match[2]]) * 1000)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no place in a topic: use {_PLACES}") from None
    # Without a zone: UTC, which servers and their logs use.
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def _id(ledger_id: int, entry_id: int) -> dict[str, Any]:
    return {"ledgerId": ledger_id, "entryId": entry_id, "partitionIndex": -1}


_LATEST: Final = _id(*LATEST.position)


def _shown(headers: Mapping[str, str], data: bytes) -> list[dict[str, Any]]:
    """The messages of an entry that the server showed."""
    where = headers.get("X-Pulsar-Message-ID", "")
    # The interface gives payloads as they are stored: only plain ones can be opened here.
    if compression := headers.get("X-Pulsar-compression"):
        note = f"{len(data)} bytes, compressed with {compression}"
        return [{"id": where, "note": note, **_content(data, is_text=False)}]
    # A batch: each message has its key and properties inside, not in headers.
    if count := headers.get("X-Pulsar-num-batch-message"):
        return [
            _with_key(
                {"id": f"{where}:{index}", **_content(payload)},
                single.partition_key,
                {pair.key: pair.value for pair in single.properties},
            )
            for index, (single, payload) in enumerate(split_batch(data, int(count)))
        ]
    properties = json.loads(headers.get("X-Pulsar-PROPERTY", "{}"))
    key = headers.get("X-Pulsar-partition-key", "")
    return [_with_key({"id": where, **_content(data)}, key, properties)]


def _content(data: bytes, *, is_text: bool = True) -> dict[str, Any]:
    if is_text:
        # JSON holds text only: bytes that are none go as base64.
        with suppress(UnicodeDecodeError):
            return {"text": data.decode()}
    return {"base64": b64encode(data).decode()}


def _with_key(shown: dict[str, Any], key: str, properties: Mapping[str, str]) -> dict[str, Any]:
    if key:
        shown["key"] = key
    if properties:
        shown["properties"] = dict(properties)
    return shown
