"""`magnetar pipeline`: what its verbs say, without a session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from magnetar.blocking import Client
from magnetar.cli.main import main
from magnetar.cli.verbs.pipeline_view import summary, watching
from magnetar.client.blocking.loop_thread import LoopThread
from magnetar.model.ranges import ORIGIN
from magnetar.spark.pipeline.progress import QueryState
from magnetar.spark.pipeline.state import Phase, RunState, StateFolder
from tests.unit.cli.admin_server import running_server

LoopThread().stop()  # the first loop of a process opens a pipe for signals that stays

COPY = """
name: my copy
service_url: URL
checkpoint: checkpoint
sources:
  orders: {topic: "topic://public/default/orders"}
  payments: {topic: payments}
  others: {topic: others, options: {subscription: none}}
steps:
  - {name: all, sql: "SELECT value FROM orders UNION ALL SELECT value FROM payments, others"}
sinks:
  out: {topic: copies}
"""


def _called(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["pipeline", *map(str, words)])
    return done.exit_code, done.output


def _state(phase: Phase = "running") -> RunState:
    query = QueryState(batch=7, batches=8, input_rows=9000, rows_per_second=450, group="app")
    return RunState(
        name="copy",
        file="f",
        pid=1,
        host="h",
        master="local",
        phase=phase,
        started_at=1000.0,
        updated_at=1090.0,
        queries={"out": query},
    )


@pytest.mark.parametrize("kind", ["yaml", "toml"])
def test_what_init_writes_is_valid(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"settled.{kind}"
    assert _called("init", file)[0] == 0
    code, said = _called("validate", file)
    assert (code, "3 views, 1 sinks" in said) == (0, True), said
    code, said = _called("validate", file, "--json")
    found = json.loads(said)
    assert found["sinks"] == {"settled": {"format": "magnetar", "from": "settled"}}
    code, said = _called("init", file)
    assert (code, "exists" in said) == (1, True)


@pytest.mark.parametrize("kind", ["yaml", "toml"])
def test_what_init_writes_names_the_server_of_the_environment(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGNETAR_SERVICE_URL", "pulsar://broker.example.org:6650")
    file = tmp_path / f"settled.{kind}"
    assert _called("init", file)[0] == 0
    assert "pulsar://broker.example.org:6650" in file.read_text()
    assert "localhost" not in file.read_text()


def test_mistakes_in_files_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "settled.yaml"
    assert "No such file" in _called("validate", file)[1]
    _called("init", file)
    file.write_text(file.read_text().replace("startingOffsets", "startingOfsets", 1))
    code, said = _called("validate", file)
    assert code == 1
    assert "sources.orders: there is no option startingOfsets" in said
    assert len(said.splitlines()) == 1
    assert _called("init", tmp_path / "settled.json")[0] == 1


def test_status_of_a_run_of_the_past(tmp_path: Path) -> None:
    file = tmp_path / "settled.yaml"
    _called("init", file)
    assert _called("status", file) == (0, "never started\n")
    assert json.loads(_called("status", file, "--json")[1]) == {"phase": "never started"}
    with StateFolder(tmp_path / "checkpoint" / "settled-orders" / ".pipeline") as folder:
        folder.write(_state())
        assert "copy: running, process 1" in _called("status", file)[1]
    assert "killed while running" in _called("status", file)[1]
    assert "this pipeline does not run" in _called("stop", file)[1]


def test_a_pipeline_is_deleted_with_its_subscriptions_and_its_checkpoint(tmp_path: Path) -> None:
    topics = ("topic://public/default/orders", "persistent://public/default/payments")
    file = tmp_path / "copy.yaml"
    with running_server(tmp_path / "data") as server:
        file.write_text(COPY.replace("URL", server.url))
        checkpoint = tmp_path / "checkpoint"
        (checkpoint / "out" / "commits").mkdir(parents=True)
        (checkpoint / "of-somebody-else").write_text("")
        with StateFolder(checkpoint / ".pipeline") as folder:
            folder.write(_state())
            assert "runs a pipeline" in _called("delete", file, "--yes")[1]
        found = json.loads(_called("status", file, "--json")[1])["subscriptions"]
        assert [(each["subscription"], each["topics"]) for each in found] == [
            ("my-copy.out.orders", topics[0]),
            ("my-copy.out.payments", topics[1]),
        ]
        assert "my-copy.out.orders" in _called("status", file)[1]
        with Client(server.url) as client:
            for topic, each in zip(topics, found, strict=True):
                with client.producer(topic) as producer:
                    producer.send(b"1")
                numbers = [s.number for s in client.ranges(topic).layout().segments]
                client.ranges(topic).move_cursor(
                    each["subscription"], dict.fromkeys(numbers, ORIGIN), initial="earliest"
                )
        asked = CliRunner().invoke(main, ["pipeline", "delete", str(file)], input="n\n")
        assert "delete 2 subscriptions and the checkpoint" in asked.output
        assert (checkpoint / "out").exists()
        for said in ("deleted subscription", "there is no subscription"):
            told = server.done("pipeline", "delete", str(file), "--yes")
            assert f"{said} my-copy.out.orders of {topics[0]}\n" in told
            assert f"{said} my-copy.out.payments of {topics[1]}\n" in told
            assert [each.name for each in checkpoint.iterdir()] == ["of-somebody-else"]


def test_without_a_terminal_there_is_a_line_per_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with watching("copy") as watcher:
        watcher.told("running")
        watcher.moved("out", _state())
        watcher.moved("out", _state())
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "running"
    assert said[1].startswith("out: batch 7, 9,000 rows, 450 rows/s")
    assert len(said) == 2, "at most one per second"


def test_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    summary(_state("stopped"))
    assert "copy stopped after 1.5 min: 8 batches, 9,000 rows" in capsys.readouterr().out
