"""`magnetar txn ...`: open transactions, what one did, what it holds up, and how to end it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
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
from magnetar.cli.output import print_json, print_table
from magnetar.model.names import Domain, TopicName
from magnetar.txn.ids import from_text, to_text

_PREFIX: Final = "/admin/v3/transactions"
# A transaction may have thousands of participants, and a row has one line.
_NAMES_SHOWN: Final = 2
_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "m"))


@click.group()
def txn() -> None:
    """Transactions."""


@txn.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@click.option("--owner", metavar="NAME", help="Of one owner.")
@click.option("--group", metavar="APPLICATION", help="Of one transaction group.")
@click.option("--older-than", type=click.FloatRange(0), metavar="SECONDS", help="Open so long.")
@admin_options
@json_option
def list_open(
    limit: int,
    owner: str | None,
    group: str | None,
    older_than: float | None,
    admin_url: str | None,
    as_json: bool,
) -> None:
    """List open transactions, the oldest first."""
    # The server filters and sorts: there may be many more than are shown.
    query = {"limit": str(limit)}
    query |= {} if owner is None else {"owner": owner}
    query |= {} if group is None else {"application": group}
    query |= {} if older_than is None else {"olderThanMs": str(round(older_than * 1000))}
    found = ask(admin_url, lambda admin: admin.get(f"{_PREFIX}/open", **query))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each["id"],
            each["status"],
            _duration(each["ageMs"]),
            _remaining(each),
            _who(each),
            _group_text(each),
            _shortened(each["segments"]),
            _shortened(each["subscriptions"]),
        )
        for each in found["transactions"]
    ]
    where = ("writes to", "acknowledges on")
    headings = ("transaction", "state", "age", "time left", "owner", "group", *where)
    print_table(headings, rows, none="no open transactions")
    # The total is a lower bound: the server stops counting as well.
    if found["truncated"]:
        click.echo(f"these are the {len(rows)} oldest of {found['total']} or more; see --limit")


@txn.command()
@click.argument("transaction")
@admin_options
@json_option
def show(transaction: str, admin_url: str | None, as_json: bool) -> None:
    """Tell the story of TRANSACTION: its records, where it takes part, what happened when."""
    path = f"{_PREFIX}/transactionMetadata/{_id_path(transaction)}"
    found = ask(admin_url, lambda admin: admin.get(path))
    if as_json:
        print_json(found)
        return
    print_table(("what", "value"), _facts(found), none="")
    _print_participants(found)
    rows = [(_moment(each["ms"]), each["event"]) for each in found["timeline"]]
    print_table(("when", "what happened"), rows, none="")
    if found["truncated"]:
        click.echo("there are more records than are shown")


@txn.command("why-blocked")
@click.argument("topic")
@admin_options
@json_option
def why_blocked(topic: str, admin_url: str | None, as_json: bool) -> None:
    """Name the transactions that consumers of TOPIC wait for, and what is behind them."""
    path = f"{_PREFIX}/blocked/{_any_topic_path(topic)}"
    found = ask(admin_url, lambda admin: admin.get(path, limit="1000"))
    if as_json:
        print_json(found)
        return
    # Segments whose maxReadPosition an undecided transaction keeps below their end.
    held = [each for each in found["segments"] if each["blocker"] is not None]
    headings = ("segment", "held by", "visible up to", "end", "entries behind", "bytes behind")
    print_table(headings, map(_held_row, held), none=f"no transaction holds {topic} up")
    # One transaction may hold several segments up: told once.
    holders = {each["blocker"]["id"]: each["blocker"] for each in held}
    if holders:
        columns = ("transaction", "state", "age", "time left", "owner", "its clients", "group")
        print_table(columns, map(_holder_row, holders.values()), none="")
    # A segment without entries behind the holder keeps nobody waiting (None: not known).
    waiting = [each for each in held if each["entriesBehind"] != 0]
    if waiting:
        click.echo(_way_out(waiting[0]))
    if found["truncated"]:
        click.echo("there are more segments than are shown")


@txn.command()
@click.argument("transaction", required=False)
@click.option("--on", "topic", metavar="TOPIC", help="Free TOPIC of what is undecided there.")
@admin_options
def abort(transaction: str | None, topic: str | None, admin_url: str | None) -> None:
    """Abort TRANSACTION, whoever owns it: nothing that it did counts.

    With --on all transactions that are undecided on TOPIC, or TRANSACTION, also if no coordinator
    knows it any more.
    """
    if topic is not None:
        _abort_on(topic, transaction, admin_url)
        return
    if transaction is None:
        raise click.UsageError("name a TRANSACTION, or a topic with --on TOPIC")
    path = f"{_PREFIX}/abortTransaction/{_id_path(transaction)}"
    ask(admin_url, lambda admin: _abort(admin, path))
    click.echo(f"aborted {transaction}")


def _abort_on(topic: str, transaction: str | None, admin_url: str | None) -> None:
    path = f"{_PREFIX}/abortOn/{_any_topic_path(topic)}"
    query = {} if transaction is None else {"txn": to_text(from_text(transaction))}
    found = ask(admin_url, lambda admin: admin.post(path, **query))["transactions"]
    for each in found:
        # No state: its header is gone, and the segment aborts what it finds of it by itself.
        click.echo(f"{(each['status'] or 'forgotten').lower()} {each['id']} on {each['segment']}")
    if not found:
        click.echo(f"no transaction is undecided on {topic}")


async def _abort(admin: AdminClient, path: str) -> None:
    await admin.post(path)


def _id_path(text: str) -> str:
    found = from_text(text)
    return f"{found.most}/{found.least}"


def _any_topic_path(text: str) -> str:
    name = TopicName.parse(text)
    # A segment's name has a `/` more, which the interface takes as one part.
    if name.domain is not Domain.SEGMENT:
        return topic_path(text)
    return f"segment/{name.namespace}/{part(f'{name.local_name}/{name.descriptor}')}"


# --- what is shown


def _facts(found: dict[str, Any]) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [
        ("transaction", found["id"]),
        ("state", found["status"]),
        ("kept by", "records" if found["kind"] == "metadata" else "a log and markers"),
        ("owner", found["owner"]),
        ("begun by client", _client_text(found)),
        ("its producers", _listed(found.get("producers"))),
        ("its consumers", _listed(found.get("consumers"))),
        ("decided by", found.get("decidedBy")),
        ("coordinator", f"{found['coordinator']} at {found['coordinatorUrl'] or 'no broker now'}"),
        ("begun", f"{_moment(found['openTimestamp'])} ({_duration(found['ageMs'])} ago)"),
        ("deadline", _moment(found["deadline"])),
        ("ended", None if found["ended"] is None else _moment(found["ended"])),
    ]
    # Part of a transaction group: what its group has committed decides about it.
    if found["group"] is not None:
        member, group = found["group"], found["groupRecord"]
        facts.append(("group", _group_text(found)))
        facts.append(("epoch in its group", f"#{member['epoch']}"))
        if group is not None:
            said = f"epoch #{group['epoch']}, sequence #{group['committedSequence']} is committed"
            facts.append(("its group now", said))
    return facts


def _print_participants(found: dict[str, Any]) -> None:
    rows: list[tuple[str, str, str | None]]
    rows = [(each["segment"], "writes", f"from {each['from']} on") for each in found["pins"]]
    # Legacy ones are known by their coordinator's log, which has no positions.
    if found["kind"] != "metadata":
        rows += [(topic, "writes", None) for topic in found["producedPartitions"]]
        rows += [
            (f"{topic} {name}", "acknowledges", None)
            for topic, names in found["ackedPartitions"].items()
            for name in names
        ]
    rows += [
        (f"{each['segment']} {each['subscription']}", "acknowledges", _acked_text(each))
        for each in found["acks"]
    ]
    rows += [(each["segment"], "is hidden", f"up to {each['last']}") for each in found["aborted"]]
    none = "it has no records at topics or subscriptions"
    print_table(("participant", "what", "where"), rows, none=none)


def _acked_text(ack: dict[str, Any]) -> str:
    if ack["cumulative"]:
        return f"everything up to {ack['last']}"
    if ack["entries"] == 1:
        return f"the entry {ack['first']}"
    return f"{ack['entries']} entries from {ack['first']} to {ack['last']}"


def _way_out(held: dict[str, Any]) -> str:
    """The commands that help with a segment whose consumers wait."""
    holder = held["blocker"]
    if holder["status"] == "OPEN":
        return (
            f"`magnetar txn show {holder['id']}` tells its story, "
            f"`magnetar txn abort {holder['id']}` ends it"
        )
    # Its coordinator does not know it, or has finished it elsewhere: only the topic can end it.
    return f"`magnetar txn abort --on {held['segment']}` frees the topic"


def _held_row(found: dict[str, Any]) -> tuple[object, ...]:
    holder = found["blocker"]
    return (
        found["segment"],
        holder["id"],
        # A segment that is not loaded has no ceiling to show; the
        # first position of its holder bounds it all the same.
        found["ceiling"] if found["loaded"] else f"before {holder['from']}",
        found["end"],
        found["entriesBehind"],
        found["bytesBehind"],
    )


def _holder_row(holder: dict[str, Any]) -> tuple[object, ...]:
    # Its pin is there, its header is not: it ended long ago.
    if holder["status"] is None:
        return (holder["id"], "forgotten", None, None, None, None, None)
    return (
        holder["id"],
        holder["status"],
        _duration(holder["ageMs"]),
        _remaining(holder),
        _who(holder),
        _shortened(_names(holder)),
        _group_text(holder),
    )


def _who(found: dict[str, Any]) -> str | None:
    """The owner; where nobody is identified, the client that began it."""
    owner: str | None = found["owner"]
    return owner or _client_text(found)


def _client_text(found: dict[str, Any]) -> str | None:
    client = found.get("client")
    if client is None:
        return None
    return f"{client['address']} {client['version'] or ''}".rstrip()


def _names(found: dict[str, Any]) -> list[str]:
    return [*found.get("producers", ()), *found.get("consumers", ())]


def _listed(names: list[str] | None) -> str | None:
    return ", ".join(names) if names else None


def _group_text(found: dict[str, Any]) -> str | None:
    group = found["group"]
    return None if group is None else f"{group['application']} #{group['sequence']}"


def _remaining(found: dict[str, Any]) -> str:
    left = found["deadline"] - found["openTimestamp"] - found["ageMs"]
    return _duration(left) if left > 0 else "over"


def _shortened(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" +{len(listed) - _NAMES_SHOWN}" if len(listed) > _NAMES_SHOWN else ""
    return ", ".join(listed[:_NAMES_SHOWN]) + more


def _duration(ms: int) -> str:
    seconds = ms / 1000
    for size, unit in _UNITS:
        # From two of a unit on: `90 s` says more than `1.5 m`.
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
