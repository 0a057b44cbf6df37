"""Steps: functions and files that they name are looked for without a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from magnetar.errors import ConfigError
from magnetar.spark.pipeline.build import check_steps, identity
from magnetar.spark.pipeline.file import Pipeline, parsed
from magnetar.spark.pipeline.subscriptions import held

PIPELINE = """
name: copy
service_url: pulsar://localhost:6650
checkpoint: ./checkpoint
sources:
  orders: {topic: orders}
  payments: {topic: payments, options: {subscription: s}}
steps:
  - {name: large, sql: "SELECT * FROM Orders WHERE amount > 10"}
  - STEP
sinks:
  first: {topic: a, from: large}
  second: {topic: b}
"""


def _pipeline(folder: Path, step: str) -> Pipeline:
    text = PIPELINE.replace("STEP", step)
    return parsed(text, path=folder / "copy.yaml", environment={})


def test_each_query_keeps_its_own_input(tmp_path: Path) -> None:
    pipeline = _pipeline(tmp_path, '{name: joined, sql: "SELECT * FROM orders JOIN payments"}')
    found = [(each.sink, each.source, each.subscription) for each in held(pipeline)]
    assert found == [
        ("first", "orders", "copy.first.orders"),
        ("second", "orders", "copy.second.orders"),
        ("second", "payments", "s"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "def joined(spark, views): ...",
        "from elsewhere import other as joined",
        "joined = lambda spark, views: views['orders']",
        "import nothing_like_it\nnothing_like_it.call()\ndef joined(spark, views): ...",
    ],
)
def test_a_function_is_found_without_running_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "steps.py").write_text(text)
    check_steps(_pipeline(tmp_path, '{name: joined, python: "steps.py:joined"}'))


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ('{name: joined, python: "steps.py:join"}', "has no function join"),
        ('{name: joined, python: "missing.py:joined"}', "missing.py: "),
        ('{name: joined, python: "nothing_like_it.steps:joined"}', "is not installed"),
        ("{name: joined, sql_file: missing.sql}", "steps.joined.sql_file: "),
    ],
)
def test_what_is_missing_is_told(tmp_path: Path, step: str, said: str) -> None:
    (tmp_path / "steps.py").write_text("def joined(spark, views): ...")
    with pytest.raises(ConfigError) as refused:
        check_steps(_pipeline(tmp_path, step))
    assert said in str(refused.value)


def test_a_checkpoint_goes_with_the_sources_that_a_sink_may_read(tmp_path: Path) -> None:
    (tmp_path / "joined.sql").write_text("SELECT * FROM large JOIN payments USING (id)")
    found = identity(_pipeline(tmp_path, "{name: joined, sql_file: joined.sql}"))
    orders, payments = "magnetar orders", "magnetar payments"
    assert found == {"first": [orders], "second": [orders, payments]}
    python = identity(_pipeline(tmp_path, '{name: joined, python: "steps.py:joined"}'))
    assert python["second"] == [orders, payments], "a function may read everything above it"
