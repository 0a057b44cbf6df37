"""The verbs that use a running server: its topics, its messages, its health."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from harness.limits import PATIENCE_S
from magnetar.cli.link import ServerConnection
from magnetar.cli.main import main
from magnetar.cli.verbs.namespaces import namespaces
from magnetar.cli.verbs.subscriptions import subscriptions
from magnetar.cli.verbs.topics import topics
from magnetar.cli.verbs.txn import txn
from magnetar.server.embedded import STORE_FORMAT
from magnetar.wire.frames import base_command, encode_with_payload
from magnetar.wire.messages import encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.cli.admin_server import Running, running_server
from tests.unit.cli.verbs.test_admin_unpacked import batch

GROUPS = (topics, subscriptions, namespaces, txn)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with running_server(tmp_path / "data") as server:
        yield server


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_topics(running: Running) -> None:
    assert running.done("topics", "list") == "public/default has no topics\n"
    running.done("topics", "create", "a")
    running.done("topics", "create", "b", "--partitions", "2")
    running.done("topics", "create", "non-persistent://public/default/c", "--partitions", "1")
    listed = json.loads(running.done("topics", "list", "--json"))
    assert listed == [
        {"topic": "non-persistent://public/default/c", "partitions": 1},
        {"topic": "persistent://public/default/a", "partitions": 0},
        {"topic": "persistent://public/default/b", "partitions": 2},
    ]
    assert "persistent://public/default/b" in running.done("topics", "list")
    assert "3 partitions" in running.done("topics", "partitions", "b", "--to", "3")
    assert json.loads(running.done("topics", "stats", "a", "--json"))["msgInCounter"] == 0
    assert "partitions" in running.done("topics", "stats", "b")
    assert running.done("topics", "lookup", "a") == f"{running.url}\n"
    assert running.done("topics", "last-id", "a") == "-1:-1\n"
    running.done("topics", "unload", "b")
    assert "terminated a" in running.done("topics", "terminate", "a")
    running.done("topics", "delete", "a")
    running.done("topics", "delete", "b")
    assert [each["partitions"] for each in json.loads(running.done("topics", "list", "--json"))]


def test_subscriptions(running: Running) -> None:
    running.done("topics", "create", "a")
    assert running.client("produce", "a", "one", "two", "three").exit_code == 0
    for name, start in (("all", "earliest"), ("none", "latest"), ("new", "1h")):
        running.done("subscriptions", "create", "a", name, "--from", start)
    found = json.loads(running.done("subscriptions", "list", "a", "--json"))
    assert {name: each["msgBacklog"] for name, each in found.items()} == {
        "all": 3,
        "none": 0,
        "new": 3,
    }
    assert "durable" in running.done("subscriptions", "list", "a")
    peeked = running.done("subscriptions", "peek", "a", "all", "--count", "9", "--json")
    assert [each["text"] for each in json.loads(peeked)] == ["one", "two", "three"]
    running.done("subscriptions", "skip", "a", "all", "--count", "1")
    assert "two" in running.done("subscriptions", "peek", "a", "all")
    running.done("subscriptions", "skip", "a", "all", "--all")
    running.done("subscriptions", "reset", "a", "all", "--to", "2020-01-01T00:00:00")
    running.done("subscriptions", "expire", "a", "all", "--seconds", "3600")
    found = json.loads(running.done("subscriptions", "list", "a", "--json"))
    assert found["all"]["msgBacklog"] == 3
    running.done("subscriptions", "delete", "a", "all")
    assert running.admin("subscriptions", "delete", "a", "all").exit_code == 1
    assert running.admin("subscriptions", "skip", "a", "new").exit_code == 2
    assert running.admin("subscriptions", "reset", "a", "new", "--to", "soon").exit_code == 2


def test_subscriptions_that_read_what_is_not_committed(running: Running) -> None:
    running.done("topics", "create", "a")
    said = running.done("subscriptions", "create", "a", "dirty", "--read-uncommitted")
    assert "not committed" in said
    running.done("subscriptions", "create", "a", "clean")
    found = json.loads(running.done("subscriptions", "list", "a", "--json"))
    isolations = {name: each["readIsolation"] for name, each in found.items()}
    assert isolations == {"dirty": "read_uncommitted", "clean": "read_committed"}
    for shown in (("subscriptions", "list", "a"), ("topics", "stats", "a")):
        assert "read_uncommitted" in running.done(*shown)
    consumed = running.client("consume", "a", "-s", "new", "--wait", "0", "--read-uncommitted")
    assert "not committed" in consumed.stderr
    assert running.client("consume", "a", "-s", "clean", "--read-uncommitted").exit_code == 1


def test_namespaces(running: Running) -> None:
    running.done("namespaces", "create", "acme/orders")
    listed = json.loads(running.done("namespaces", "list", "--json"))
    assert listed == ["acme/orders", "public/default", "pulsar/system"]
    assert "acme/orders" in running.done("namespaces", "list", "acme")
    name = "acme/orders"
    assert "the default" in running.done("namespaces", "retention", name)
    running.done("namespaces", "retention", name, "--minutes", "5", "--megabytes", "-1")
    running.done("namespaces", "deduplication", name, "on")
    running.done("namespaces", "auto-topics", name, "on", "--partitions", "2")
    assert "no" in running.done("namespaces", "auto-subscriptions", name, "off")
    assert "metadata" in running.done("namespaces", "transaction-kind", name, "metadata")
    assert "the default" in running.done("namespaces", "transaction-kind", name, "--clear")
    policies = json.loads(running.done("namespaces", "show", name, "--json"))
    assert policies["retention_policies"]["retentionTimeInMinutes"] == 5
    assert policies["deduplicationEnabled"] is True
    assert policies["autoTopicCreationOverride"]["defaultNumPartitions"] == 2
    assert "retention_policies" in running.done("namespaces", "show", name)
    assert "default" in running.done("namespaces", "deduplication", name, "--clear")
    assert running.admin("namespaces", "retention", name, "--minutes", "5").exit_code == 2
    assert running.admin("namespaces", "deduplication", name, "on", "--clear").exit_code == 2
    running.done("topics", "create", "acme/orders/t")
    assert running.admin("namespaces", "delete", name).exit_code == 1
    running.done("namespaces", "delete", name, "--force")


def test_a_refusal_is_one_line(running: Running) -> None:
    result = running.admin("topics", "stats", "missing")
    assert result.exit_code == 1
    missing = "persistent://public/default/missing does not exist"
    assert result.stderr == f"error: {missing} (said {running.admin_url})\n"
    assert running.admin("topics", "stats", "a/b").exit_code == 1
    assert running.admin("namespaces", "show", "a").exit_code == 1


def test_no_server_is_one_line_with_a_hint() -> None:
    port = closed_port()
    for arguments in (
        ["topics", "list", "--admin-url", f"http://127.0.0.1:{port}"],
        ["produce", "t", "x", "--url", f"pulsar://127.0.0.1:{port}"],
        ["consume", "t", "-s", "s", "--url", f"pulsar://127.0.0.1:{port}"],
        ["produce", "topic://public/default/t", "x", "--url", f"127.0.0.1:{port}"],
        ["consume", "topic://public/default/t", "-s", "s", "--url", f"127.0.0.1:{port}"],
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        assert "magnetar serve" in result.stderr
        assert "refused" in result.stderr
        assert "ssl" not in result.stderr
    result = CliRunner().invoke(main, ["produce", "t", "x", "--url", "http://127.0.0.1"])
    assert "not a service URL" in result.stderr


def test_produce_and_consume(running: Running) -> None:
    sent = running.client("produce", "t", "one", "-", "--key", "k", stdin="two\nthree\n")
    assert sent.exit_code == 0, sent.output
    assert len(sent.stdout.split()) == 3
    got = running.client("consume", "t", "-s", "s", "--from", "earliest", "--count", "2")
    assert (got.exit_code, got.stdout) == (0, "one\ntwo\n"), got.output
    rest = running.client("consume", "t", "-s", "s", "--wait", "0.2", "--json")
    (line,) = rest.stdout.splitlines()
    message = json.loads(line)
    assert (message["text"], message["key"]) == ("three", "k")
    assert message["id"] == sent.stdout.split()[2]
    assert message["publish_time"] > 0


@pytest.mark.parametrize(
    ("topic", "kind"), [("t", "shared"), ("topic://public/default/t", "queue")]
)
def test_produce_says_when_to_deliver(running: Running, topic: str, kind: str) -> None:
    if kind == "queue":
        running.done("topics", "create", topic)
    late = running.client("produce", topic, "late", "--deliver-after", "3600")
    assert late.exit_code == 0, late.output
    assert running.client("produce", topic, "now").exit_code == 0
    options = ("-s", "s", "--from", "earliest", "--wait", "0.3", "--type", kind)
    got = running.client("consume", topic, *options)
    assert (got.exit_code, got.stdout) == (0, "now\n"), got.output
    refused = running.client("produce", topic, "x", "--deliver-after", "-1")
    assert refused.exit_code == 2


def test_produce_and_consume_over_partitions(running: Running) -> None:
    running.done("topics", "create", "t", "--partitions", "3")
    texts = [f"m{number}" for number in range(7)]
    assert running.client("consume", "t", "-s", "s", "--wait", "0").exit_code == 0
    sent = running.client("produce", "t", *texts, "--json")
    assert len(json.loads(sent.stdout)) == len(texts)
    keyed = running.client("produce", "t", "a", "b", "--key", "k")
    assert keyed.exit_code == 0, keyed.output
    got = running.client("consume", "t", "-s", "s", "--count", "9", "--type", "shared")
    assert sorted(got.stdout.split()) == sorted([*texts, "a", "b"])
    stats = json.loads(running.done("topics", "stats", "t", "--json"))
    counts = [each["msgInCounter"] for each in stats["partitions"].values()]
    assert sorted(counts) in ([2, 2, 5], [2, 3, 4]), "round robin, and one partition for the key"


def test_consume_stops_inside_a_batch_and_goes_on_there(running: Running) -> None:
    async def send() -> None:
        async with ServerConnection(running.url) as link:
            await link.request("PRODUCER", topic="t", producer_id=1, producer_name="p")
            metadata = pb.MessageMetadata(
                producer_name="p", sequence_id=0, publish_time=1, num_messages_in_batch=3
            )
            base = {"producer_id": 1, "sequence_id": 0, "num_messages": 3}
            entry = encode_entry(metadata, batch(b"a", b"b", b"c"))
            for piece in encode_with_payload(base_command("SEND", **base), entry):
                link.write(piece)
            await link.next()

    asyncio.run(send())
    first = running.client("consume", "t", "-s", "s", "--from", "earliest", "--count", "2")
    assert first.stdout == "a\nb\n", first.output
    assert running.done("topics", "unload", "t")
    rest = running.client("consume", "t", "-s", "s", "--count", "1")
    assert rest.stdout == "c\n", rest.output
    stats = json.loads(running.done("topics", "stats", "t", "--json"))
    assert stats["subscriptions"]["s"]["msgBacklog"] == 0


def test_a_topic_is_compacted(running: Running) -> None:
    for name in ("t", "topic://public/default/x"):
        running.done("topics", "create", name)
        shown = running.done("topics", "compact", "--status", name)
        assert shown == "NOT_RUN\n"
        begun = running.done("topics", "compact", name)
        assert begun == f"compacting {name}; see `topics compact --status {name}`\n"
        found = {"status": "RUNNING"}
        until = time.monotonic() + PATIENCE_S
        while found["status"] == "RUNNING" and time.monotonic() < until:
            found = json.loads(running.done("topics", "compact", "--status", name, "--json"))
        assert found == {"status": "SUCCESS", "lastError": ""}
    refused = running.admin("topics", "compact", "missing")
    assert refused.exit_code == 1
    assert "does not exist" in refused.output


def test_what_the_server_refuses(running: Running) -> None:
    running.done("topics", "create", "t")
    running.done("topics", "terminate", "t")
    refused = running.client("produce", "t", "x")
    assert refused.exit_code == 1
    assert "terminated" in refused.stderr
    missing = running.client("consume", "nobody/none/t", "-s", "s")
    assert missing.exit_code == 1
    assert "does not exist" in missing.stderr


def test_the_port_and_the_url_of_the_other_protocol_are_named(running: Running) -> None:
    port = running.url.rpartition(":")[2]
    met = CliRunner().invoke(main, ["topics", "list", "--admin-url", f"http://127.0.0.1:{port}"])
    assert met.exit_code == 1
    assert "speaks Pulsar's binary protocol" in met.stderr
    assert "admin_port" in met.stderr
    refused = CliRunner().invoke(main, ["topics", "list", "--admin-url", running.url])
    assert refused.exit_code == 1
    assert "not the URL of an admin interface (use http://host:port)" in refused.stderr


def findings(
    arguments: list[str], env: dict[str, str] | None = None
) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner(env=env).invoke(main, ["doctor", *arguments, "--json"])
    return result.exit_code, {each["check"]: each for each in json.loads(result.stdout)}


def test_doctor_of_a_running_server(running: Running) -> None:
    where = ["--url", running.url, "--admin-url", running.admin_url]
    code, found = findings([*where, "--data", str(running.folder)])
    assert code == 0, found
    assert found["lock"]["found"] == "in use by a running process"
    assert "health ok" in found["admin"]["found"]
    assert "Magnetar-" in found["server"]["found"]
    assert "median" in found["sync"]["found"]
    assert "open files" in found["descriptors"]["found"]
    assert list(running.folder.glob(".doctor-*")) == []
    code, found = findings(where)
    assert code == 0
    assert "folder" not in found
    assert "all is well" in CliRunner().invoke(main, ["doctor", *where]).stdout
    elsewhere = {"MAGNETAR_PORT": str(closed_port()), "MAGNETAR_ADMIN_PORT": str(closed_port())}
    code, found = findings(["--data", str(running.folder)], elsewhere)
    assert (code, found["server"]["verdict"]) == (0, "warning")


def test_doctor_of_a_folder(tmp_path: Path) -> None:
    code, found = findings(["--data", str(tmp_path / "none")])
    assert (code, found["folder"]["verdict"]) == (0, "ok")
    assert "server" not in found
    (tmp_path / "FORMAT").write_text(json.dumps({"format": STORE_FORMAT + 1, "store": "00"}))
    code, found = findings(["--data", str(tmp_path)])
    assert (code, found["folder"]["verdict"]) == (1, "failed")
    (tmp_path / "FORMAT").write_text("{")
    assert findings(["--data", str(tmp_path)])[0] == 1
    (tmp_path / "FORMAT").rename(tmp_path / "other")
    code, found = findings(["--data", str(tmp_path)])
    assert (code, found["folder"]["verdict"]) == (1, "failed")
    shown = CliRunner().invoke(main, ["doctor", "--data", str(tmp_path)])
    assert "folder: choose an empty folder" in shown.stdout


def test_doctor_looks_at_the_ports_of_a_server_to_come(tmp_path: Path) -> None:
    free = {"MAGNETAR_PORT": str(closed_port()), "MAGNETAR_ADMIN_PORT": str(closed_port())}
    data = {"MAGNETAR_DATA": str(tmp_path)}
    code, found = findings([], free | data)
    assert (code, found["port"]["verdict"], found["admin_port"]["verdict"]) == (0, "ok", "ok")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = {"MAGNETAR_ADMIN_PORT": str(other.getsockname()[1])}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("magnetar.cli.verbs.doctor._SECONDS", 0.1)
            code, found = findings([], free | taken | data)
    assert (code, found["admin_port"]["verdict"]) == (1, "failed")


def test_doctor_of_a_server_that_is_not_there() -> None:
    port = closed_port()
    code, found = findings(["--url", f"pulsar://127.0.0.1:{port}"])
    assert code == 1
    assert "magnetar serve" in found["server"]["advice"]


@pytest.mark.parametrize("group", GROUPS)
def test_every_verb_helps(group: click.Group) -> None:
    for verb in group.commands:
        assert group.name is not None
        result = CliRunner().invoke(main, [group.name, verb, "--help"])
        assert result.exit_code == 0
        assert "--admin-url" in result.output


def test_a_refusal_names_the_server_that_was_asked(running: Running) -> None:
    refused = running.admin("topics", "stats", "none")
    assert refused.exit_code == 1
    assert f"(said {running.admin_url})" in refused.stderr
    refused = running.client("consume", "none/none/x", "-s", "s", "--wait", "0")
    assert refused.exit_code == 1
    assert f"(said {running.url})" in refused.stderr
