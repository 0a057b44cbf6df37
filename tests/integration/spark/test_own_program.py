"""A program of a user's own, started as `.venv/bin/python my.py` and nothing more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from harness.limits import PATIENCE_S
from magnetar.blocking import Client
from magnetar.spark.pipeline.java import java_home
from tests.integration.client.service import service

pytestmark = pytest.mark.slow

PROGRAM: Final = """
import json, sys
from pyspark.sql import SparkSession
import magnetar.spark

url, folder = sys.argv[1:]
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
for key in ("host", "bindAddress"):
    builder = builder.config(f"spark.driver.{key}", "127.0.0.1")
spark = builder.getOrCreate()
magnetar.spark.register(spark)
magnetar.spark.register(spark)  # as a notebook does whose cell is run twice

def reader(name, kind="magnetar"):
    options = {"serviceUrl": url, "topic": f"topic://public/default/{name}"}
    return spark.readStream.format(kind).schema("value BINARY").options(**options)

def ended(frame, name):
    try:
        writer = frame.writeStream.format("noop").option("checkpointLocation", f"{folder}/{name}")
        writer.trigger(availableNow=True).start().awaitTermination()
    except Exception as error:
        return str(error)

def loaded(**options):
    try:
        return spark.read.format("magnetar").options(serviceUrl=url, **options).load().count()
    except Exception as error:
        return str(error)

print(json.dumps({
    "count": loaded(topic="topic://public/default/orders"),
    "missing": loaded(topic="topic://public/default/oders"),
    "option": loaded(topc="orders"),
    "stream": ended(reader("oders").load(), "a"),
    "pulsar": ended(reader("orders", "pulsar").load(), "b"),
}))
"""


def test_a_plain_program_finds_the_source_and_reads_sentences(tmp_path: Path) -> None:
    program = tmp_path / "my.py"
    program.write_text(PROGRAM)
    # A search path whose `python3`, if there is one, knows nothing of the source.
    environment = {name: text for name, text in os.environ.items() if "SPARK" not in name}
    environment |= {"PATH": "/usr/bin:/bin", "JAVA_HOME": str(java_home())}
    with service(tmp_path / "data") as url:
        with Client(url) as client, client.producer("topic://public/default/orders") as producer:
            for number in range(10):
                producer.send(b"%d" % number)
        done = subprocess.run(
            [sys.executable, str(program), url, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=environment,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["count"] == 10
    assert found["pulsar"] is None
    for case, sentence in (
        ("missing", "topic://public/default/oders does not exist (create it"),
        ("option", "there is no option topc (is topic meant?)"),
        ("stream", "topic://public/default/oders does not exist (create it"),
    ):
        first = found[case].splitlines()[0]
        assert sentence in first, found[case]
        assert "Traceback" not in found[case]
