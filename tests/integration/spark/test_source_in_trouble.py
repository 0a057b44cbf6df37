"""Brokers that die and come back while a query runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.crash.server.process import ServerProcess
from magnetar.errors import NotConnected
from magnetar.spark import links
from tests.integration.spark.stage import Talk

pytestmark = pytest.mark.slow


class Broker:
    """A server process that can be killed and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = 0
        self.process = self._started()
        self.port = self.process.port

    @property
    def url(self) -> str:
        return f"pulsar://127.0.0.1:{self.port}"

    def _started(self) -> ServerProcess:
        process = ServerProcess.start(self._folder, arguments=("--port", str(self.port)))
        if not asyncio.run(process.until_ready()):
            process.kill()
            raise AssertionError("the server did not start")
        return process

    def kill(self) -> None:
        self.process.kill()

    def start(self) -> None:
        self.process = self._started()

    @contextmanager
    def starting_again(self) -> Iterator[None]:
        """Killed now; started by somebody else while the block runs."""
        self.kill()
        starting = threading.Thread(target=self.start)
        starting.start()
        try:
            yield
        finally:
            starting.join()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path / "data")
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def talk(broker: Broker) -> Iterator[Talk]:
    made = Talk(broker.url)
    try:
        yield made
    finally:
        links.close_all()
        made.client.close()


def test_a_broker_that_comes_back_is_waited_for(broker: Broker, talk: Talk) -> None:
    talk.send(40)
    query = talk.from_earliest(subscription="spark", maxMessagesPerTrigger="15")
    query.step()
    with broker.starting_again():
        query.step()
    with broker.starting_again():
        query.run_last()
    talk.send(10)
    query.drain()
    query.check()


def test_a_broker_that_does_not_come_back_fails_the_query_in_the_end(
    broker: Broker, talk: Talk
) -> None:
    talk.send(10)
    query = talk.from_earliest(subscription="spark", retryTimeout="500ms", operationTimeoutMs="300")
    query.drain()
    broker.kill()
    with pytest.raises(
        NotConnected, match="is the option serviceUrl right, and does the broker run"
    ):
        query.step()
    broker.start()
    query.restart()
    talk.send(10)
    query.drain()
    query.check()
