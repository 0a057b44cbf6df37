"""Verbs with scalable topics, against a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.admin_server import Running, running_server

X = "topic://public/default/x"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with running_server(tmp_path / "data") as server:
        yield server


def test_a_topic_and_its_layout(running: Running) -> None:
    assert running.done("topics", "create", X, "--segments", "2") == (
        f"created {X} with 2 segments\n"
    )
    assert json.loads(running.done("topics", "list", "--json")) == [
        {"topic": X, "partitions": 0, "segments": 2}
    ]
    assert X in running.done("topics", "list")
    assert running.done("topics", "split", X, "0", "--at", "0x1000") == (
        f"split segment 0 of {X} into 2 (0000-0fff) and 3 (1000-7fff)\n"
    )
    assert running.done("topics", "merge", X, "3", "1") == (
        f"merged segments 3, 1 of {X} into 4 (1000-ffff)\n"
    )
    drawn = running.done("topics", "layout", X).splitlines()
    assert drawn[0] == f"{X}  epoch 2  2 active, 3 sealed, 0 removed"
    assert len(drawn) == 6
    assert "\x1b" not in running.done("topics", "layout", X)
    assert json.loads(running.done("topics", "layout", X, "--json"))["epoch"] == 2
    assert json.loads(running.done("topics", "stats", X, "--json"))["activeSegments"] == 2
    assert "no subscriptions" in running.done("topics", "stats", X)
    assert running.done("topics", "delete", X) == f"deleted {X}\n"


def test_a_migration(running: Running) -> None:
    running.done("topics", "create", "x", "--partitions", "2")
    assert running.done("topics", "migrate", "x") == f"migrated x to {X}\n"
    assert "x-partition-0" in running.done("topics", "layout", X)


def test_unload_takes_a_scalable_topic_and_a_segment(running: Running) -> None:
    running.done("topics", "create", X, "--segments", "2")
    segment = "segment://public/default/x/8000-ffff-1"
    for name in (X, segment):
        assert running.done("topics", "unload", name) == f"unloaded {name}\n"
    missing = running.admin("topics", "unload", segment[:-1] + "7")
    assert missing.exit_code == 1
    assert "has no segment 7" in missing.output


def test_delete_takes_a_sealed_segment_and_no_other(running: Running) -> None:
    running.done("topics", "create", X)
    running.done("subscriptions", "create", X, "s", "--from", "earliest")
    assert running.client("produce", X, "a").exit_code == 0
    running.done("topics", "split", X, "0")
    base = "segment://public/default/x"
    sealed, active = f"{base}/0000-ffff-0", f"{base}/0000-7fff-1"
    for segment, text in ((active, "active"), (sealed, "backlog of 1"), (f"{base}/0-1-9", "9")):
        refused = running.admin("topics", "delete", segment)
        assert refused.exit_code == 1
        assert text in refused.output
    assert running.done("topics", "delete", sealed, "--force") == f"deleted {sealed}\n"
    drawn = running.done("topics", "layout", X).splitlines()
    assert drawn[0] == f"{X}  epoch 2  2 active, 0 sealed, 1 removed"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("layout", X), 1, "does not exist"),
        (("layout", "x"), 1, "topic://tenant/namespace/name"),
        (("split", X, "0"), 1, "does not exist"),
        (("split", X, "0", "--at", "1", "--by-load"), 2, "exclude"),
        (("split", X, "zero"), 2, "not a valid integer"),
        (("merge", X, "0"), 2, "at least two"),
        (("create", X, "--partitions", "2"), 2, "--segments"),
        (("partitions", X), 2, f"topics layout {X}"),
        (("partitions", X, "--to", "2"), 2, f"topics layout {X}"),
        (("terminate", X), 2, "cannot be terminated"),
        (("create", "x", "--segments", "2"), 2, "topic://"),
        (("migrate", X), 1, "not a regular topic"),
        (("migrate", "x"), 1, "does not exist"),
    ],
)
def test_what_is_refused(
    running: Running, arguments: tuple[str, ...], code: int, text: str
) -> None:
    result = running.admin("topics", *arguments)
    assert result.exit_code == code, result.output
    assert text in result.output


# --- messages and subscriptions


def test_produce_and_consume_take_a_scalable_topic(running: Running) -> None:
    running.done("topics", "create", X, "--segments", "2")
    sent = running.client("produce", X, "a", "b", "--key", "k")
    assert sent.exit_code == 0, sent.output
    # The segment first: ids are of one.
    ids = sent.stdout.split()
    assert [each.count(":") for each in ids] == [2, 2]
    for subscription, kind in (("s", "stream"), ("q", "queue")):
        options = ("--from", "earliest", "--count", "2", "--type", kind)
        found = running.client("consume", X, "-s", subscription, *options, "--json")
        assert found.exit_code == 0, found.output
        rows = [json.loads(line) for line in found.stdout.splitlines()]
        assert [(each["text"], each["key"]) for each in rows] == [("a", "k"), ("b", "k")]
        assert [each["id"] for each in rows] == ids
        # Acknowledged: nothing of it comes again.
        again = running.client("consume", X, "-s", subscription, "--type", kind, "--wait", "0.1")
        assert (again.exit_code, again.stdout) == (0, "")


def test_the_last_id_of_a_scalable_topic_is_told_by_segment(running: Running) -> None:
    running.done("topics", "create", X, "--segments", "2")
    last = running.client("produce", X, "a", "--key", "k").stdout.strip()
    segment, _, place = last.partition(":")
    found = json.loads(running.done("topics", "last-id", X, "--json"))
    assert set(found) == {"0", "1"}
    assert f"{found[segment]['ledgerId']}:{found[segment]['entryId']}" == place
    assert place in running.done("topics", "last-id", X)


def _backlog(running: Running, name: str) -> int:
    found = json.loads(running.done("subscriptions", "list", X, "--json"))
    return int(found[name]["msgBacklog"])


def test_subscriptions_of_a_scalable_topic_begin_where_they_are_told(running: Running) -> None:
    running.done("topics", "create", X, "--segments", "2")
    assert running.client("produce", X, "a", "b", "c").exit_code == 0
    for start, behind in (("earliest", 3), ("latest", 0), ("1h", 3)):
        assert running.done("subscriptions", "create", X, start, "--from", start) == (
            f"created {start}, which starts at {start}\n"
        )
        assert _backlog(running, start) == behind
    listed = running.done("subscriptions", "list", X)
    assert "STREAM" in listed
    assert running.done("subscriptions", "delete", X, "latest") == "deleted latest\n"
    gone = running.admin("subscriptions", "delete", X, "latest")
    assert (gone.exit_code, "no subscription" in gone.output) == (1, True)


def test_subscriptions_of_a_scalable_topic_are_moved(running: Running) -> None:
    running.done("topics", "create", X, "--segments", "2")
    assert running.client("produce", X, "a", "b", "c").exit_code == 0
    running.done("subscriptions", "create", X, "s", "--from", "earliest", "--type", "queue")
    shown = json.loads(running.done("subscriptions", "peek", X, "s", "--count", "9", "--json"))
    assert sorted(each["text"] for each in shown) == ["a", "b", "c"]
    assert all(each["id"].count(":") >= 2 for each in shown)
    for verb, behind in (
        (("skip", X, "s", "--all"), 0),
        (("reset", X, "s", "--to", "earliest"), 3),
        (("expire", X, "s", "--seconds", "3600"), 3),
        (("reset", X, "s", "--to", "latest"), 0),
        (("reset", X, "s", "--to", "1h"), 3),
    ):
        running.done("subscriptions", *verb)
        assert _backlog(running, "s") == behind, verb


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("subscriptions", "skip", X, "s", "--count", "1"), 1, "use --all"),
        (("subscriptions", "reset", X, "s", "--to", "1:2"), 1, "earliest, latest, a time"),
        (("subscriptions", "create", X, "s", "--from", "1:2"), 1, "earliest, latest, a time"),
        (("subscriptions", "create", "x", "s", "--type", "queue"), 2, "for scalable topics"),
        (("subscriptions", "list", "segment://public/default/x/0000-ffff-0"), 1, f"use {X}"),
        (("topics", "last-id", "segment://public/default/x/0000-ffff-0"), 1, f"use {X}"),
        (("topics", "last-id", X), 1, "does not exist"),
    ],
)
def test_what_has_no_meaning_for_a_scalable_topic_is_refused_with_the_other_way(
    running: Running, arguments: tuple[str, ...], code: int, text: str
) -> None:
    result = running.admin(*arguments)
    assert result.exit_code == code, result.output
    assert text in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((X, "-s", "s", "--type", "exclusive"), "--type stream or queue"),
        (("x", "-s", "s", "--type", "queue"), "--type queue is for scalable topics"),
    ],
)
def test_a_type_of_another_kind_of_topic_is_refused(
    running: Running, arguments: tuple[str, ...], text: str
) -> None:
    result = running.client("consume", *arguments)
    assert (result.exit_code, text in result.output) == (2, True), result.output


# --- which server


@pytest.mark.parametrize(
    "arguments",
    [
        ("topics", "list"),
        ("topics", "list", "--json"),
        ("namespaces", "list"),
        ("subscriptions", "list", X),
        ("txn", "list"),
    ],
)
def test_every_verb_names_the_server_that_it_asks(
    running: Running, arguments: tuple[str, ...]
) -> None:
    running.done("topics", "create", X)
    result = running.admin(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == f"server: {running.admin_url}\n"
    assert running.admin_url not in result.stdout


@pytest.mark.parametrize("topic", [X, "y"])
def test_produce_and_consume_name_the_server_that_they_talk_to(
    running: Running, topic: str
) -> None:
    sent = running.client("produce", topic, "a")
    came = running.client("consume", topic, "-s", "s", "--from", "earliest", "--count", "1")
    for result in (sent, came):
        assert (result.exit_code, result.stderr) == (0, f"server: {running.url}\n")
    assert came.stdout == "a\n"


def test_a_refusal_by_way_of_the_client_names_the_server(running: Running) -> None:
    for verb in (
        ("produce", "topic://no/such/x", "a"),
        ("consume", "topic://no/such/x", "-s", "s"),
    ):
        result = running.client(*verb)
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        assert "no/such does not exist" in result.stderr
        assert result.stderr.endswith(f"(said {running.url})\n")
