"""A server, queries that write to it in processes of their own, and what is there afterwards.

Owns: `SinkStage`, on any server, and `ServedStage`, on one of its own that can be killed. A driver
is killed with everything that it started (`Driver.kill`): its JVM and the Python processes of its
tasks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from magnetar.blocking import Client
from tests.integration.server.process import Running, served
from tests.integration.spark.driver import ROWS
from tests.integration.spark.driver_process import DriverProcess
from tests.integration.spark.reading import check_numbers, messages

TOPIC = "topic://public/default/output"
_POLL_S = 0.05
_PATIENCE_S = 900.0
_PROC = Path("/proc")


class Driver(DriverProcess):
    """A process of `tests.integration.spark.driver`."""

    def __init__(self, plan: dict[str, Any], text: Path) -> None:
        super().__init__("tests.integration.spark.driver", plan, text)
        self._faults = Path(plan["faults"])

    def until_reached(self, number: int) -> None:
        """Until a fault has stopped something."""
        self.until(lambda: (self._faults / f"reached-{number}").exists())

    def holder(self, number: int) -> int:
        """The process that a fault has stopped."""
        return int((self._faults / f"pid-{number}").read_text())

    def go_on(self, number: int) -> None:
        (self._faults / f"go-{number}").touch()


class SinkStage:
    """One topic, one checkpoint, and the drivers that use them."""

    def __init__(self, folder: Path, url: str, topic: str = TOPIC) -> None:
        self.folder = folder
        self.url = url
        self.topic = topic
        self.client = Client(url)
        self.checkpoint = folder / "checkpoint"
        self._drivers: list[Driver] = []

    def driver(self, until: int, *faults: dict[str, Any], **plan: Any) -> Driver:
        """Start a driver that ends by itself when a batch is done."""
        place = self.folder / f"faults-{len(self._drivers)}"
        place.mkdir()
        (place / "faults.json").write_text(json.dumps(faults))
        given = {
            "url": self.url,
            "topic": self.topic,
            "checkpoint": str(self.checkpoint),
            "faults": str(place),
            "until": until,
        }
        driver = Driver(given | plan, place / "text")
        self._drivers.append(driver)
        return driver

    def query_id(self) -> str:
        return str(json.loads((self.checkpoint / "metadata").read_text())["id"])

    def committed(self) -> int:
        """The last batch that the server has committed."""
        return self.client.group_status(self.query_id()).committed_sequence

    def check(self, batches: int | None = None) -> None:
        """The topic has exactly the rows of the batches that are committed."""
        count = self.committed() + 1 if batches is None else batches
        expected = range(count * ROWS)
        check_numbers(messages(self.client, self.topic, len(expected)), expected)

    def until_committed(self, batch: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self.committed() < batch:
            assert time.monotonic() < deadline
            time.sleep(_POLL_S)

    def last_done(self) -> int:
        """The last batch that the checkpoint says is done."""
        return max(int(each.name) for each in (self.checkpoint / "commits").glob("[0-9]*"))

    def forget(self, batch: int) -> None:
        """As if the driver had died just before it wrote that a batch is done."""
        commits = self.checkpoint / "commits"
        (commits / str(batch)).unlink()
        (commits / f".{batch}.crc").unlink(missing_ok=True)

    def rows(self) -> list[int]:
        return sorted(int(each.value) for each in messages(self.client, self.topic, 0))

    def close(self) -> None:
        for driver in self._drivers:
            if driver.is_alive:
                driver.kill()
        self.client.close()


class ServedStage(SinkStage):
    """With a server of its own."""

    def __init__(self, folder: Path, servers: ExitStack) -> None:
        self._servers = servers
        self._data = folder
        self.server = self._serve()
        super().__init__(folder, f"pulsar://{self.server.host}:{self.server.port}")

    def until_nothing_is_open(self) -> None:
        """Until the transactions that were begun have timed out."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._open_transactions():
            assert time.monotonic() < deadline
            time.sleep(_POLL_S)

    def _open_transactions(self) -> Any:
        with urlopen(f"{self.server.admin_url}/admin/v3/transactions/slowTransactions/0") as answer:
            return json.load(answer)

    def kill_server(self) -> None:
        """kill -9, and start it again at the same place."""
        self.server.kill()
        self.server = self._serve(self.server.port)

    def _serve(self, port: int = 0) -> Running:
        return self._servers.enter_context(served(self._data, port=port))

    def split(self, segment: int) -> None:
        """Split a segment of the topic in the middle."""
        name = self.topic.removeprefix("topic://")
        url = f"{self.server.admin_url}/admin/v2/scalable/{name}/split/{segment}"
        with urlopen(Request(url, method="POST")) as answer:
            assert answer.status < 300


@contextmanager
def sink_stage(folder: Path) -> Iterator[ServedStage]:
    with ExitStack() as servers:
        stage = ServedStage(folder, servers)
        try:
            yield stage
        finally:
            stage.close()


@contextmanager
def sink_stage_at(folder: Path, url: str, topic: str = TOPIC) -> Iterator[SinkStage]:
    """On a server that is somebody else's."""
    stage = SinkStage(folder, url, topic)
    try:
        yield stage
    finally:
        stage.close()
