"""`magnetar topics` with scalable topics, against a running server."""

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
