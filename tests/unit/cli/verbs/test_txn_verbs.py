"""`magnetar txn` against a running server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.cli.verbs.txn import _duration, _shortened
from magnetar.txn.ids import to_text
from magnetar.txn.legacy.coordinators import LegacyCoordinators
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId
from tests.unit.cli.admin_server import Running, running_server
from tests.unit.server.admin.txn_client import COMMIT, txn_client

T = "persistent://public/default/t"
X = "topic://public/default/x"
SEGMENT = "segment://public/default/x/0000-ffff-0"
NOWHERE = f"0_{(1 << 62) + 99}"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with running_server(tmp_path / "data") as server:
        yield server


def opened(running: Running, topic: str = T, *, scalable: bool = True) -> str:
    """A transaction that has written one message and acknowledged one, with one behind it."""

    async def scene() -> str:
        async with txn_client(running.url) as client:
            await client.publish(topic)
            txn = await client.begin(scalable=scalable)
            await client.subscribe(topic, "sub")
            await client.add(txn, topic, "sub")
            await client.ack_next(txn)
            await client.publish(topic, txn)
            await client.publish(topic)
            return to_text(txn)

    return asyncio.run(scene())


def test_list(running: Running) -> None:
    assert running.done("txn", "list") == "no open transactions\n"
    txn = opened(running)
    text = running.done("txn", "list")
    assert txn in text
    assert T in text
    assert f"{T} sub" in text
    found = json.loads(running.done("txn", "list", "--json", "--older-than", "0"))
    assert [each["id"] for each in found["transactions"]] == [txn]
    assert json.loads(running.done("txn", "list", "--json", "--owner", "me"))["total"] == 0
    assert json.loads(running.done("txn", "list", "--json", "--group", "app"))["total"] == 0
    opened(running, "persistent://public/default/u")
    assert "the 1 oldest of 2" in running.done("txn", "list", "--limit", "1")


def test_legacy_ones(running: Running) -> None:
    txn = opened(running, scalable=False)
    assert txn == "0_1"
    for part in (txn, "OPEN", T, f"{T} sub"):
        assert part in running.done("txn", "list")
    text = running.done("txn", "show", txn)
    for part in ("a log and markers", "begun by", f"{T} sub", "acknowledges", "writes"):
        assert part in text
    assert txn in running.done("txn", "why-blocked", T)
    for _ in range(2):
        assert running.done("txn", "abort", txn) == f"aborted {txn}\n"
    text = running.done("txn", "show", txn)
    for part in ("ABORTED", "aborted everywhere", "is hidden"):
        assert part in text
    assert running.done("txn", "list") == "no open transactions\n"


def test_show_and_abort(running: Running) -> None:
    txn = opened(running)
    text = running.done("txn", "show", txn)
    for part in (txn, "OPEN", "begun by", "may write to", "acknowledges", "the entry ", "deadline"):
        assert part in text
    found = json.loads(running.done("txn", "show", f"({txn.replace('_', ',')})", "--json"))
    assert (found["status"], len(found["pins"]), len(found["acks"])) == ("OPEN", 1, 1)
    assert running.done("txn", "abort", txn) == f"aborted {txn}\n"
    assert running.done("txn", "abort", txn) == f"aborted {txn}\n"
    assert "ABORTED" in running.done("txn", "show", txn)
    assert running.done("txn", "list") == "no open transactions\n"


def test_why_blocked(running: Running) -> None:
    running.done("topics", "create", "t")
    assert running.done("txn", "why-blocked", "t") == "no transaction holds t up\n"
    txn = opened(running)
    text = running.done("txn", "why-blocked", "t")
    assert txn in text
    assert f"magnetar txn abort {txn}" in text
    (held,) = json.loads(running.done("txn", "why-blocked", "t", "--json"))["segments"]
    assert (held["blocker"]["id"], held["entriesBehind"]) == (txn, 2)
    running.done("topics", "unload", "t")
    assert f"before {held['blocker']['from']}" in running.done("txn", "why-blocked", "t")
    running.done("txn", "abort", txn)

    running.done("topics", "create", X)
    txn = opened(running, SEGMENT)
    for name in (X, SEGMENT):
        (held,) = json.loads(running.done("txn", "why-blocked", name, "--json"))["segments"]
        assert (held["segment"], held["blocker"]["id"]) == (SEGMENT, txn)


def test_members_of_groups(running: Running) -> None:
    async def scene() -> str:
        async with txn_client(running.url) as client:
            group = await client.open_group("app")
            member = {"application": "app", "epoch": group.epoch, "sequence": 7}
            return to_text(await client.begin(group.tc_id, group=member))

    txn = asyncio.run(scene())
    assert "app #7" in running.done("txn", "list", "--group", "app")
    text = running.done("txn", "show", txn)
    assert "app #7" in text
    assert "sequence #-1 is committed" in text


def test_what_is_refused(running: Running) -> None:
    async def scene() -> str:
        async with txn_client(running.url) as client:
            txn = await client.begin()
            await client.end(txn, COMMIT)
            return to_text(txn)

    committed = asyncio.run(scene())
    for arguments, code, text in (
        (("show", NOWHERE), 1, "txn_retention_seconds"),
        (("show", "first"), 1, "<most bits>_<least bits>"),
        (("abort", NOWHERE), 1, "there is no transaction"),
        (("abort", committed), 1, "COMMITTED"),
        (("why-blocked", "t"), 1, "does not exist"),
        (("why-blocked", "topic://public/default/none"), 1, "does not exist"),
        (("list", "--limit", "0"), 2, "--limit"),
        (("show",), 2, "Missing argument"),
    ):
        result = running.admin("txn", *arguments)
        assert result.exit_code == code, result.output
        assert text in result.output


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        *((0, "0.0 s"), (61_000, "61.0 s"), (120_000, "2.0 m")),
        *((9_000_000, "2.5 h"), (86_400_000 * 3, "3.0 d")),
    ],
)
def test_durations(ms: int, text: str) -> None:
    assert _duration(ms) == text


def test_many_names_are_shortened() -> None:
    assert _shortened([]) == ""
    assert _shortened(["a", "b"]) == "a, b"
    assert _shortened(["a", "b", "c", "d"]) == "a, b +2"


def test_abort_on_a_topic_frees_what_no_coordinator_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = TxnId(16, 3)

    async def scene(url: str) -> None:
        async with txn_client(url) as client:
            await client.publish(T)
            await client.subscribe(T, "sub")
            await client.ack_next(hung)
            await client.publish(T, hung)
            await client.publish(T)

    # A server that believes every id, as earlier versions did: its folder has a hung topic.
    with monkeypatch.context() as patch, running_server(tmp_path / "data") as former:
        patch.setattr(LegacyCoordinators, "takes_part", lambda *_: True)
        asyncio.run(scene(former.url))
    with running_server(tmp_path / "data") as running:
        running.done("topics", "stats", T)  # loads it
        text = running.done("txn", "why-blocked", T)
        assert "forgotten" in text
        command = text.partition("`magnetar ")[2].partition("`")[0]
        assert command == f"txn abort --on {T}"
        assert running.done(*command.split()) == f"aborted 16_3 on {T}\n"
        assert "no transaction holds" in running.done("txn", "why-blocked", T)
        assert "no transaction is undecided" in running.done(*command.split())


@pytest.mark.parametrize("scalable", [True, False])
def test_abort_on_a_topic_aborts_open_transactions_as_a_whole(
    running: Running, scalable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = TxnStore.write_aborted

    # A store that takes its time: the topic is free once it is told to be, all the same.
    async def slow(*given: Any, **fields: Any) -> None:
        await asyncio.sleep(0.2)
        await write(*given, **fields)

    monkeypatch.setattr(TxnStore, "write_aborted", slow)
    txn = opened(running, scalable=scalable)
    assert running.done("txn", "abort", txn, "--on", T) == f"aborted {txn} on {T}\n"
    assert "ABORTED" in running.done("txn", "show", txn)
    other = opened(running, scalable=scalable)
    assert running.done("txn", "abort", "--on", T) == f"aborted {other} on {T}\n"
    assert "no transaction holds" in running.done("txn", "why-blocked", T)
    assert "not undecided" in running.admin("txn", "abort", txn, "--on", T).output
    assert "--on TOPIC" in running.admin("txn", "abort").output
