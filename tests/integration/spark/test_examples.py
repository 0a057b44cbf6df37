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


def test_the_examples_can_be_run_twice(tmp_path: Path) -> None:
    with (
        service(tmp_path / "data") as url,
        Client(url) as client,
        client.producer(TOPIC.format("orders")),
        client.checkpoint_consumer(TOPIC.format("orders"), start=FROM_EARLIEST) as orders,
        client.producer(TOPIC.format("settled")) as settled,
    ):
        seen: set[str] = set()
        # Twice, as whoever follows the tutorial does: new orders, and those are printed.
        for _ in range(2):
            assert "sent 10 orders" in _run("send_orders.py", url)
            sent = []
            for _ in range(10):
                order = json.loads(orders.receive(timeout=PATIENCE_S).value)
                settled.send(order["id"].encode(), key=order["customer"])
                sent.append(f"{order['customer']} {order['id']}")
            assert sorted(_run("read_settled.py", url).splitlines()) == sorted(sent)
            assert not seen.intersection(sent)
            seen.update(sent)


def _run(name: str, url: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "spark" / name), url],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
