"""The verbs of `magnetar topics` for scalable topics (`topic://` names).

Owns: the verbs that only they have, and how their lists, layouts and statistics are shown.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine
from typing import Any, Final

import click

from magnetar.cli.admin_client import (
    AdminClient,
    admin_options,
    ask,
    json_option,
    part,
    topic_path,
)
from magnetar.cli.dag import draw
from magnetar.cli.output import print_json, print_table, retention_text
from magnetar.errors import InvalidTopicName
from magnetar.model.names import Domain, TopicName

_OK: Final = 200


def is_scalable(topic: str) -> bool:
    """Whether it is a scalable topic; a segment, which is a part of one, is refused."""
    name = TopicName.parse(topic)
    if name.domain is Domain.SEGMENT:
        raise InvalidTopicName(f"{name} is a segment", hint=f"use {name.scalable_topic()}")
    return name.domain is Domain.TOPIC


def subscription_path(topic: str, subscription: str) -> str:
    """The path of a subscription of a topic, regular or scalable."""
    if is_scalable(topic):
        return f"{scalable_path(topic)}/subscriptions/{part(subscription)}"
    return f"{topic_path(topic)}/subscription/{part(subscription)}"


def scalable_path(topic: str) -> str:
    """The path of a scalable topic below the prefix."""
    name = TopicName.parse(topic)
    # A regular topic of the same name may exist: a verb must not change the other one.
    if name.domain is not Domain.TOPIC:
        raise InvalidTopicName(
            f"{name} is not a scalable topic", hint="use topic://tenant/namespace/name"
        )
    return _path(name)


def unload_path(topic: str) -> str:
    """The path that unloads a scalable topic, or the one segment that is named."""
    name = TopicName.parse(topic)
    path = f"{_path(name)}/unload"
    return path if name.descriptor is None else f"{path}/{name.descriptor.segment_id}"


def delete_path(topic: str) -> str:
    """The path that deletes a scalable topic, or the one segment that is named."""
    name = TopicName.parse(topic)
    path = _path(name)
    return path if name.descriptor is None else f"{path}/segment/{name.descriptor.segment_id}"


def _path(name: TopicName) -> str:
    return f"scalable/{name.namespace}/{part(name.local_name)}"


async def listed_topics(admin: AdminClient, namespace: str) -> list[dict[str, Any]]:
    """The scalable topics of a namespace; none where they are switched off."""
    found = []
    answer = await admin.exchange("GET", f"scalable/{namespace}")
    # A server without scalable topics refuses the path: it has none of them.
    names = json.loads(answer.data) if answer.status == _OK else []
    for name in names:
        record = await admin.get_or_none(scalable_path(name))
        if record is not None:  # it may have been deleted meanwhile
            active = [each for each in record["segments"].values() if each["state"] == "ACTIVE"]
            found.append({"topic": name, "partitions": 0, "segments": len(active)})
    return found


_PATIENCE_S: Final = 1.0
"""Most changes are done by then; of one that is not, the user is told why."""


# --- verbs


@click.command()
@click.argument("topic")
@click.argument("segment", type=click.IntRange(0))
@click.option("--at", metavar="POINT", help="Where the upper part begins: 0x8000 or 32768.")
@click.option("--by-load", is_flag=True, help="Where the load of its keys is halved.")
@admin_options
def split(topic: str, segment: int, at: str | None, by_load: bool, admin_url: str | None) -> None:
    """Split SEGMENT of TOPIC in two: in the middle, at a point, or by load."""
    # Two answers to the question where; without either it is the middle.
    if by_load and at is not None:
        raise click.UsageError("--at and --by-load exclude each other")
    path = scalable_path(topic)
    query = {} if at is None else {"at": at}
    query |= {"byLoad": "true"} if by_load else {}

    async def work(admin: AdminClient) -> dict[str, Any]:
        # Answered when the change is done; the record then names the children.
        await _changed(admin, path, admin.post(f"{path}/split/{segment}", **query))
        return await _record(admin, path)

    record = ask(admin_url, work)
    children = record["segments"].get(str(segment), {}).get("childIds", [])
    click.echo(f"split segment {segment} of {topic} into {_ranges(record, children)}")


@click.command()
@click.argument("topic")
@click.argument("segments", type=click.IntRange(0), nargs=-1, required=True)
@admin_options
def merge(topic: str, segments: tuple[int, ...], admin_url: str | None) -> None:
    """Merge adjacent SEGMENTS of TOPIC, two or more, into one."""
    if len(set(segments)) < 2:
        raise click.UsageError("a merge takes at least two different segments")
    path = scalable_path(topic)

    async def work(admin: AdminClient) -> dict[str, Any]:
        work = admin.post(f"{path}/merge/{'/'.join(map(str, segments))}")
        await _changed(admin, path, work)
        return await _record(admin, path)

    record = ask(admin_url, work)
    # All parents have the same child, so any of them names it.
    children = record["segments"].get(str(segments[0]), {}).get("childIds", [])
    merged = ", ".join(map(str, segments))
    click.echo(f"merged segments {merged} of {topic} into {_ranges(record, children)}")


@click.command()
@click.argument("topic")
@admin_options
@json_option
def layout(topic: str, admin_url: str | None, as_json: bool) -> None:
    """Draw the segments of TOPIC, from the oldest to those that take messages."""
    path = scalable_path(topic)

    async def work(admin: AdminClient) -> tuple[dict[str, Any], dict[str, Any] | None]:
        return await _record(admin, path), await _change(admin, path)

    record, change = ask(admin_url, work)
    if as_json:
        print_json(record | {"change": change})
        return
    segments = record["segments"].values()
    active = sum(each["state"] == "ACTIVE" for each in segments)
    # Ids are given once, so the counter tells how many there ever were.
    gone = record["nextSegmentId"] - len(segments)
    counts = f"{active} active, {len(segments) - active} sealed, {gone} removed"
    click.echo(f"{topic}  epoch {record['epoch']}  {counts}")
    if change is not None:
        click.echo(f"change under way: {_change_text(change)}")
    for line in draw(record):
        click.echo(click.style(line.text, fg="green" if line.active else "bright_black"))


@click.command()
@click.argument("topic")
@click.option("--force", is_flag=True, help="Even if clients use it that will not follow.")
@admin_options
def migrate(topic: str, force: bool, admin_url: str | None) -> None:
    """Make the regular TOPIC, partitioned or not, a scalable one; there is no way back."""
    name = TopicName.parse(topic)
    # Non-persistent topics hold nothing, and scalable ones are what they become.
    if name.domain is not Domain.PERSISTENT:
        raise InvalidTopicName(f"{name} is not a regular topic", hint="only those are migrated")
    flag = "true" if force else "false"
    ask(admin_url, lambda admin: admin.post(f"{_path(name)}/migrate", force=flag))
    click.echo(f"migrated {topic} to {name.scalable_topic()}")


VERBS: Final = (split, merge, layout, migrate)


# --- what is shown


def print_statistics(found: dict[str, Any]) -> None:
    # Present while a split, merge or migration is under way, and the step that it is at.
    change = found.get("change")
    what = [
        ("epoch", found["epoch"]),
        ("active segments", found["activeSegments"]),
        ("sealed segments", found["sealedSegments"]),
        ("removed segments", found.get("prunedSegments")),
        ("change under way", None if change is None else _change_text(change)),
        ("kept after it is acknowledged", retention_text(found["retention"])),
        *_quota_rows(found),
        ("splits and merges by itself", found.get("autoScalePolicy", {}).get("enabled")),
    ]
    print_table(("what", "value"), what, none="")
    rows = [
        (
            # As text: an id is a name, and `1,024` would not be one.
            f"#{number}",
            _range_text(each),
            each["state"].lower(),
            each.get("msgRateIn"),
            each.get("msgRateOut"),
            each.get("msgBacklog"),
            each.get("storageSize"),
            each.get("producerCount"),
            each.get("consumerCount"),
        )
        for number, each in sorted(found["segments"].items(), key=lambda item: int(item[0]))
    ]
    headings = (
        *("segment", "range", "state", "messages/s in", "messages/s out", "backlog"),
        *("bytes", "producers", "consumers"),
    )
    print_table(headings, rows, none="no segments")
    subscriptions = [
        (
            name,
            each.get("type"),
            each.get("msgBacklog"),
            each.get("consumerCount"),
            each.get("readIsolation"),
        )
        for name, each in sorted(found["subscriptions"].items())
    ]
    columns = ("subscription", "type", "backlog", "consumers", "isolation")
    print_table(columns, subscriptions, none="no subscriptions")


def _quota_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What of its backlog quotas is used up; nothing without one."""
    rows = []
    # -1: no quota, or nobody has looked yet.
    if (limit := found.get("backlogQuotaLimitSize", -1)) >= 0:
        size = found["backlogSize"]
        rows.append(("backlog", f"{f'{size:,}' if size >= 0 else '?'} of {limit:,} bytes"))
    if (limit := found.get("backlogQuotaLimitTime", -1)) > 0:
        age = found["oldestBacklogMessageAgeSeconds"]
        rows.append(("oldest message", f"{f'{age:,}' if age >= 0 else '?'} of {limit:,} s"))
    return rows


async def _changed(admin: AdminClient, path: str, work: Coroutine[Any, Any, Any]) -> None:
    """Await a change, and tell the one who waits for it if it waits for transactions itself."""
    changing = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({changing}, timeout=_PATIENCE_S)
        if not done and (change := await _change(admin, path)) is not None:
            click.echo(f"not done yet: {_change_text(change)}", err=True)
    finally:
        await changing


async def _change(admin: AdminClient, path: str) -> dict[str, Any] | None:
    """The change of a layout that is under way."""
    found: dict[str, Any] | None = (await admin.get(f"{path}/stats")).get("change")
    return found


def _change_text(change: dict[str, Any]) -> str:
    text = f"{change['kind']} ({change['step']})"
    if "waitsAtMostMs" not in change:
        return text
    txn = change["waitsForTransaction"]
    what = "transactions" if txn is None else f"open transactions, {txn} among them"
    seconds = math.ceil(change["waitsAtMostMs"] / 1000)
    return f"{text}, waits for {what}, {seconds} s more at most"


async def _record(admin: AdminClient, path: str) -> dict[str, Any]:
    found: dict[str, Any] = await admin.get(path)
    return found


def _ranges(record: dict[str, Any], segment_ids: list[int]) -> str:
    found = [record["segments"].get(str(number)) for number in segment_ids]
    shown = [f"{each['segmentId']} ({_range_text(each)})" for each in found if each is not None]
    # Pruned or split again before we looked: the change was made all the same.
    return " and ".join(shown) if shown else "others since"


def _range_text(segment: dict[str, Any]) -> str:
    found = segment["hashRange"]
    return f"{found['start']:04x}-{found['end']:04x}"
