"""Whether a server has transaction groups is asked once, and patience has one end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar, cast

import pytest

from magnetar.blocking import Client
from magnetar.client.connection.connection import Connect
from magnetar.client.connection.pool import Connections
from magnetar.client.connection.settings import ClientSettings, ServiceUrl
from magnetar.errors import DeadlineExceeded, NotConnected
from magnetar.spark.sink.group_writes import has_groups
from magnetar.testing.virtual import virtual_time
from tests.unit.client.fake_broker import URL, FakeBroker

R = TypeVar("R")

OPERATION_S = 30.0
CONNECT_S = 12.0


class _Counted(Connections):
    """Connections that say how many series of tries were begun with them."""

    backoffs = 0

    def backoff(self) -> Any:
        self.backoffs += 1
        return super().backoff()


class _Client:
    """A blocking client on virtual time, which says how long its last call took."""

    def __init__(self, make: Callable[[], Awaitable[_Counted]]) -> None:
        self._make = make
        self._connections: _Counted
        self.runs = 0
        self.waited_s = 0.0

    def run(self, do: Callable[[Any], Awaitable[R]]) -> R:
        async def main() -> R:
            self._connections = await self._make()
            start = asyncio.get_running_loop().time()
            try:
                return await do(self)
            finally:
                self.waited_s = asyncio.get_running_loop().time() - start
                await self._connections.close()

        self.runs += 1
        return virtual_time.run(main(), until=100_000)


def _client(connect: Any, *, connect_s: float = CONNECT_S) -> _Client:
    settings = ClientSettings(
        service_url=ServiceUrl.parse(URL),
        operation_timeout=OPERATION_S,
        connect_timeout=connect_s,
        refused_timeout=OPERATION_S,
    )

    async def make() -> _Counted:
        return _Counted(settings, connect=cast("Connect", connect), chance=Random(1))

    return _Client(make)


def _asked(client: _Client) -> bool:
    return has_groups(cast("Client", client))


async def _refuses(*_: object) -> Any:
    raise ConnectionRefusedError("nobody listens")


async def _hangs(*_: object) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("connect", [_refuses, _hangs])
def test_a_service_that_is_not_there_is_waited_for_one_operation_timeout(connect: Any) -> None:
    client = _client(connect)
    with pytest.raises(NotConnected, match=r"reached at .* for a write") as told:
        _asked(client)
    assert "serviceUrl" in told.value.hint
    assert client.waited_s == pytest.approx(OPERATION_S)
    assert (client.runs, client._connections.backoffs) == (1, 1), "one series of tries, not two"


def test_a_connection_that_hangs_for_longer_than_an_operation_may_take_is_cut_off() -> None:
    client = _client(_hangs, connect_s=10 * OPERATION_S)
    with pytest.raises(DeadlineExceeded, match="a write did not succeed within 30"):
        _asked(client)
    assert client.waited_s == pytest.approx(OPERATION_S)


@pytest.mark.parametrize("answer", [True, False])
def test_a_service_that_comes_back_is_asked_and_its_answer_kept(answer: bool) -> None:
    async def make() -> _Counted:
        broker = FakeBroker()
        broker.connected["feature_flags"] = {"supports_transaction_groups": answer}
        await broker.listen()
        refusals = [ConnectionRefusedError("not yet")] * 3

        async def connect(*given: Any) -> Any:
            if refusals:
                raise refusals.pop()
            return await broker.network.connect(*given)

        settings = ClientSettings(service_url=ServiceUrl.parse(URL))
        return _Counted(settings, connect=cast("Connect", connect), chance=Random(1))

    client = _Client(make)
    assert _asked(client) is _asked(client) is answer
    assert client.runs == 1
