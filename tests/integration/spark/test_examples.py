"""The programs of the tutorial, with the client in the place of the pipeline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness.limits import PATIENCE_S
from magnetar import FROM_EARLIEST
from magnetar.blocking import Client
from tests.integration.client.service import service
from tests.meta.tree import ROOT

TOPIC = "topic://public/default/{}"


def test_what_is_sent_can_be_settled_and_read(tmp_path: Path) -> None:
    with service(tmp_path / "data") as url:
        assert "sent 10 orders" in _run("send_orders.py", url)
        with (
            Client(url) as client,
            client.checkpoint_consumer(TOPIC.format("orders"), start=FROM_EARLIEST) as orders,
            client.producer(TOPIC.format("settled")) as settled,
        ):
            for _ in range(10):
                order = json.loads(orders.receive(timeout=PATIENCE_S).value)
                settled.send(order["id"].encode(), key=order["customer"])
        lines = _run("read_settled.py", url).splitlines()
    assert sorted(lines) == sorted(f"c{number % 3} o{number}" for number in range(10))


def _run(name: str, url: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "spark" / name), url],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
