"""Pipeline files: what they may say, and how a mistake is told."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Final

import pytest
import yaml

from magnetar.errors import ConfigError
from magnetar.spark.pipeline.file import Pipeline, parsed

SMALLEST: Final = """
name: copy
service_url: pulsar://localhost:6650
checkpoint: ./checkpoint
sources:
  orders: {topic: orders}
sinks:
  copied: {topic: copies}
"""


def _parsed(text: str, name: str = "copy.yaml", **environment: str) -> Pipeline:
    return parsed(text, path=Path("/pipelines") / name, environment=environment)


def test_the_smallest_file() -> None:
    pipeline = _parsed(SMALLEST)
    assert pipeline.checkpoint_path == "/pipelines/checkpoint"
    assert pipeline.input_of(pipeline.sinks["copied"]) == "orders"
    assert pipeline.trigger == "as-soon-as-possible"


def test_a_checkpoint_behind_a_url_stays_where_it_is() -> None:
    text = SMALLEST.replace("./checkpoint", "hdfs://names/checkpoint")
    assert _parsed(text).checkpoint_path == "hdfs://names/checkpoint"


def test_both_examples_say_the_same() -> None:
    folder = files("magnetar.spark")
    from_yaml = (folder / "example.yaml").read_text("utf-8")
    from_toml = (folder / "example.toml").read_text("utf-8")
    pipeline = _parsed(from_yaml)
    assert pipeline.input_of(pipeline.sinks["settled"]) == "settled"
    assert _parsed(from_toml, "copy.toml").sources == pipeline.sources
    steps = [yaml.safe_load(from_yaml)["steps"], tomllib.loads(from_toml)["steps"]]
    assert len({" ".join(step["sql"].split()) for (step,) in steps}) == 1


def test_a_step_is_the_input_unless_the_sink_says_otherwise() -> None:
    steps = "steps: [{name: large, sql: 'SELECT * FROM orders'}]\n"
    pipeline = _parsed(SMALLEST + steps)
    assert pipeline.input_of(pipeline.sinks["copied"]) == "large"
    direct = (SMALLEST + steps).replace("topic: copies", "topic: copies, from: orders")
    pipeline = _parsed(direct)
    assert pipeline.input_of(pipeline.sinks["copied"]) == "orders"


def test_variables_come_from_the_environment() -> None:
    text = SMALLEST.replace("topic: orders", "topic: orders, options: {token: '${TOKEN}'}")
    assert _parsed(text, TOKEN="secret").sources["orders"].options == {"token": "secret"}
    with pytest.raises(ConfigError, match="the environment has no TOKEN"):
        _parsed(text)


def test_the_server_of_the_environment_is_taken_where_the_file_names_none() -> None:
    here, there = "pulsar://here:6650", "pulsar://localhost:6650"
    assert _parsed(SMALLEST, MAGNETAR_SERVICE_URL=here).service_url == there
    text = SMALLEST.replace(f"service_url: {there}", "")
    assert _parsed(text, MAGNETAR_SERVICE_URL=here).service_url == here


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ("trgger: 1 second", None, "trgger is not a key (did you mean trigger?)"),
        ("{tpoic: orders}", "{topic: orders}", "sources.orders.tpoic is not a key (did you mean"),
        ("{topic: orders, watermark: {colum: a}}", "{topic: orders}", "watermark.colum is not a"),
        ("steps: [{name: a, slq: b}]", None, "steps.0.slq is not a key (did you mean sql?)"),
        ("spark: {mastr: local}", None, "spark.mastr is not a key (did you mean master?)"),
        ("folder: elsewhere", None, "folder is not a key"),
        ("trigger: sometimes", None, "trigger: 'sometimes' is none (use as-soon-as-possible"),
        ("trigger: 5", None, "trigger: Expected `str`"),
        ("metrics_port: 70000", None, "metrics_port: Expected `int` <= 65535"),
        ("steps: [{name: orders, sql: a}]", None, "steps.orders: the name is taken"),
        ("steps: [{name: a}]", None, "steps.a: it has 0 of sql, sql_file and python"),
        ("steps: [{name: a, python: a.py}]", None, "steps.a.python: 'a.py' names no function"),
        ("{topic: copies, from: order}", "{topic: copies}", "there is no 'order' (did you mean o"),
        ("{topic: copies, mode: update}", "{topic: copies}", "no update mode (use append"),
        ("{schema: a INT}", "{topic: orders}", "sources.orders: it names no topic"),
        ("{topic: a, options: {topics: b}}", "{topic: orders}", "the option topics exclude each"),
        ("", "service_url: pulsar://localhost:6650", "no broker is named (add `service_url:"),
        ("nothing", "name: copy", "it cannot be read"),
        ("  a-b: {topic: copies}", "  copied: {topic: copies}", "Expected `str` matching regex"),
    ],
)
def test_a_mistake_is_told_with_its_place(wrong: str, right: str | None, said: str) -> None:
    text = f"{SMALLEST}{wrong}\n" if right is None else SMALLEST.replace(right, wrong)
    with pytest.raises(ConfigError) as refused:
        _parsed(text)
    assert str(refused.value).startswith("/pipelines/copy.yaml: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_other_files_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\.json is not a kind of pipeline file"):
        _parsed("{}", "copy.json")
    with pytest.raises(ConfigError, match="it holds no keys"):
        _parsed("- a list")


def test_with_two_sources_and_no_step_a_sink_says_which() -> None:
    text = SMALLEST.replace("sinks:", "  payments: {topic: payments}\nsinks:")
    with pytest.raises(ConfigError, match="which of the sources does it take"):
        _parsed(text)
