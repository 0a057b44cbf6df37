"""`magnetar topics ...`: list, create, delete and look at topics of a running server.

What only scalable topics have (`split`, `merge`, `layout`, `migrate`) is in `scalable.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from magnetar.cli.admin_client import (
    AdminClient,
    admin_options,
    ask,
    json_option,
    namespace_path,
    topic_path,
)
from magnetar.cli.output import print_json, print_table, retention_text
from magnetar.cli.verbs.scalable import (
    VERBS,
    delete_path,
    is_scalable,
    listed_topics,
    print_statistics,
    scalable_path,
    unload_path,
)
from magnetar.model.names import TopicName

_DOMAINS = ("persistent", "non-persistent")


@click.group()
def topics() -> None:
    """Topics of a running server."""


for verb in VERBS:
    topics.add_command(verb)


@topics.command("list")
@click.argument("namespace", default="public/default")
@admin_options
@json_option
def list_topics(namespace: str, admin_url: str | None, as_json: bool) -> None:
    """List the topics of NAMESPACE (public/default)."""
    path = namespace_path(namespace)

    async def work(admin: AdminClient) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        # Partitions are listed as topics of their own: those whose topic is listed are left out.
        for domain in _DOMAINS:
            partitioned = await admin.get(f"{domain}/{path}/partitioned")
            for name in partitioned:
                counted = await admin.get(f"{topic_path(name)}/partitions")
                found.append({"topic": name, "partitions": counted["partitions"]})
            found += [
                {"topic": name, "partitions": 0}
                for name in await admin.get(f"{domain}/{path}")
                if _partitioned_name(name) not in partitioned
            ]
        # Scalable topics have an interface of their own, and segments instead of partitions.
        found += await listed_topics(admin, path)
        return sorted(found, key=lambda each: str(each["topic"]))

    found = ask(admin_url, work)
    if as_json:
        print_json(found)
        return
    rows = [(each["topic"], each["partitions"] or None, each.get("segments")) for each in found]
    print_table(("topic", "partitions", "segments"), rows, none=f"{path} has no topics")


@topics.command()
@click.argument("topic")
@click.option("--partitions", type=click.IntRange(1), help="Create it with so many partitions.")
@click.option("--segments", type=click.IntRange(1), help="Of a topic:// name: so many segments.")
@admin_options
def create(topic: str, partitions: int | None, segments: int | None, admin_url: str | None) -> None:
    """Create TOPIC; topic://tenant/namespace/name is a scalable one."""
    # Partitions and segments are not the same thing: a mistaken option is refused, not translated.
    if is_scalable(topic):
        if partitions is not None:
            raise click.UsageError("a scalable topic has --segments, not --partitions")
        count = segments or 1
        query = {"numInitialSegments": str(count)}
        ask(admin_url, lambda admin: admin.put(scalable_path(topic), **query))
        click.echo(f"created {topic} with {count} segment{'s' if count > 1 else ''}")
        return
    if segments is not None:
        raise click.UsageError("--segments is for scalable topics: topic://tenant/namespace/name")
    path = topic_path(topic)

    async def work(admin: AdminClient) -> None:
        if partitions is None:
            await admin.put(path)
        else:
            await admin.put(f"{path}/partitions", partitions)

    ask(admin_url, work)
    kind = "" if partitions is None else f" with {partitions} partitions"
    click.echo(f"created {topic}{kind}")


@topics.command()
@click.argument("topic")
@click.option("--force", is_flag=True, help="Even while it is used: its clients are closed.")
@admin_options
def delete(topic: str, force: bool, admin_url: str | None) -> None:
    """Delete TOPIC with all its messages and subscriptions.

    Of a scalable topic a sealed segment can be deleted by its name, segment://..., by force also
    one that is not drained: what is left in it is lost.
    """
    if TopicName.parse(topic).domain.is_scalable:
        ask(admin_url, lambda admin: admin.delete(delete_path(topic), force=_flag(force)))
        click.echo(f"deleted {topic}")
        return
    path = topic_path(topic)

    async def work(admin: AdminClient) -> None:
        # A partitioned topic is deleted as a whole, by a path of its own.
        partitions = (await admin.get(f"{path}/partitions"))["partitions"]
        await admin.delete(f"{path}/partitions" if partitions else path, force=_flag(force))

    ask(admin_url, work)
    click.echo(f"deleted {topic}")


@topics.command()
@click.argument("topic")
@click.option("--to", type=click.IntRange(1), help="Give it so many; there is no way back.")
@admin_options
@json_option
def partitions(topic: str, to: int | None, admin_url: str | None, as_json: bool) -> None:
    """Show, or raise, the number of partitions of TOPIC."""
    if is_scalable(topic):
        raise click.UsageError(f"a scalable topic has segments: see `topics layout {topic}`")
    path = topic_path(topic)

    async def work(admin: AdminClient) -> Any:
        if to is not None:
            await admin.post(f"{path}/partitions", to)
        return await admin.get(f"{path}/partitions")

    found = ask(admin_url, work)
    if as_json:
        print_json(found)
    else:
        click.echo(f"{topic} has {found['partitions']} partitions")


@topics.command()
@click.argument("topic")
@admin_options
@json_option
def stats(topic: str, admin_url: str | None, as_json: bool) -> None:
    """Show what TOPIC holds, who produces and who consumes."""
    # A scalable topic: statistics by segment.
    if is_scalable(topic):
        found = ask(admin_url, lambda admin: admin.get(f"{scalable_path(topic)}/stats"))
        print_json(found) if as_json else print_statistics(found)
        return
    path = topic_path(topic)

    async def work(admin: AdminClient) -> Any:
        # A partitioned topic has sums; anything else, single partitions included, has its own.
        counted = await admin.get_or_none(f"{path}/partitions")
        if counted is not None and counted["partitions"]:
            return await admin.get(f"{path}/partitioned-stats")
        return await admin.get(f"{path}/stats")

    found = ask(admin_url, work)
    if as_json:
        print_json(found)
        return
    # Two tables, for the topic and for its subscriptions.
    print_table(("what", "value"), _topic_rows(found), none="")
    rows = [
        (
            name,
            each.get("type"),
            each.get("msgBacklog", 0),
            each.get("unackedMessages", 0),
            len(each.get("consumers", ())),
            each.get("msgRateOut", 0.0),
            each.get("readIsolation"),
        )
        for name, each in found["subscriptions"].items()
    ]
    headings = (
        *("subscription", "type", "backlog", "unacknowledged", "consumers", "messages/s out"),
        "isolation",
    )
    print_table(headings, rows, none="no subscriptions")


@topics.command()
@click.argument("topic")
@admin_options
@json_option
def terminate(topic: str, admin_url: str | None, as_json: bool) -> None:
    """Let TOPIC take no more messages; what it holds can still be read."""
    if is_scalable(topic):
        raise click.UsageError("a scalable topic cannot be terminated: stop its producers")
    path = topic_path(topic)
    last = ask(admin_url, lambda admin: admin.post(f"{path}/terminate"))
    if as_json:
        print_json(last)
    else:
        click.echo(f"terminated {topic}; its last message is {_id_text(last)}")


@topics.command()
@click.argument("topic")
@click.option("--status", is_flag=True, help="Begin nothing: show how the last compaction went.")
@admin_options
@json_option
def compact(topic: str, status: bool, admin_url: str | None, as_json: bool) -> None:
    """Have TOPIC compacted: of each key its last message; it goes on in the background."""
    base = scalable_path(topic) if is_scalable(topic) else topic_path(topic)

    async def work(admin: AdminClient) -> Any:
        if not status:
            await admin.put(f"{base}/compaction")
        return await admin.get(f"{base}/compaction")

    found = ask(admin_url, work)
    if as_json:
        print_json(found)
    elif not status:
        click.echo(f"compacting {topic}; see `topics compact --status {topic}`")
    else:
        error = f": {found['lastError']}" if found["lastError"] else ""
        click.echo(f"{found['status']}{error}")


@topics.command()
@click.argument("topic")
@admin_options
def unload(topic: str, admin_url: str | None) -> None:
    """Close TOPIC and its clients, which come back at once; nothing is lost."""
    scalable = TopicName.parse(topic).domain.is_scalable
    path = unload_path(topic) if scalable else f"{topic_path(topic)}/unload"
    ask(admin_url, lambda admin: admin.put(path))
    click.echo(f"unloaded {topic}")


@topics.command("last-id")
@click.argument("topic")
@admin_options
@json_option
def last_id(topic: str, admin_url: str | None, as_json: bool) -> None:
    """Show the id of the last message of TOPIC, or of each segment of a scalable one."""
    # Of a scalable topic each segment has a last one: they have no order among each other.
    scalable = is_scalable(topic)
    path = scalable_path(topic) if scalable else topic_path(topic)
    last = ask(admin_url, lambda admin: admin.get(f"{path}/lastMessageId"))
    if as_json:
        print_json(last)
    elif scalable:
        rows = [(f"#{number}", _id_text(each)) for number, each in last.items()]
        print_table(("segment", "last message"), rows, none="no segments")
    else:
        click.echo(_id_text(last))


@topics.command()
@click.argument("topic")
@admin_options
@json_option
def lookup(topic: str, admin_url: str | None, as_json: bool) -> None:
    """Show which server has TOPIC."""
    path = topic_path(topic)
    found = ask(admin_url, lambda admin: admin.get(f"/lookup/v2/topic/{path}"))
    if as_json:
        print_json(found)
    else:
        click.echo(found["brokerUrl"])


def _topic_rows(found: dict[str, Any]) -> Iterator[tuple[str, object]]:
    yield "messages stored since it was loaded", found.get("msgInCounter", 0)
    yield "messages delivered since it was loaded", found.get("msgOutCounter", 0)
    yield "messages/s in", float(found.get("msgRateIn", 0.0))
    yield "messages/s out", float(found.get("msgRateOut", 0.0))
    yield "bytes stored", found.get("storageSize", 0)
    yield "bytes of backlog", found.get("backlogSize", 0)
    yield "producers", len(found.get("publishers", ()))
    # Only in the statistics of partitioned topics.
    if "metadata" in found:
        yield "partitions", found["metadata"]["partitions"]
    yield "deduplication", found.get("deduplicationStatus")
    if "retention" in found:  # a topic that stores nothing has none
        yield "kept after it is acknowledged", retention_text(found["retention"])


def _id_text(found: dict[str, int]) -> str:
    """A message id as `magnetar subscriptions reset --to` takes it; several for partitions."""
    return f"{found['ledgerId']}:{found['entryId']}"


def _partitioned_name(name: str) -> str:
    # By the name alone: the list says nothing else of a topic.
    head, separator, number = name.rpartition("-partition-")
    return head if separator and number.isdigit() else name


def _flag(value: bool) -> str:
    return "true" if value else "false"
