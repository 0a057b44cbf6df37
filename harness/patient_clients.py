"""Clients of real server processes: an answer that is late ends the run, and is no finding.

Owns: `PatientDriver` and `PatientAdmin`. Whoever works on real time and with real processes learns
nothing from an answer that is late (`harness.limits`). Waits that may end without one name their
seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from harness.limits import PATIENCE_S, expire
from magnetar.cli.admin_client import AdminClient, Answer
from magnetar.errors import DeadlineExceeded
from magnetar.testing.virtual.driver import PUSHES_MAX, Connect, Driver, Pushes
from magnetar.wire.messages import Command
from magnetar.wire.pb import pulsar_pb2 as pb


class PatientDriver(Driver):
    """A driver whose waits, unless they name their seconds, raise `LimitExpired` at their end."""

    def __init__(self, *, pushes_max: int = PUSHES_MAX, max_frame_bytes: int | None = None) -> None:
        super().__init__(pushes_max=pushes_max, max_frame_bytes=max_frame_bytes)
        self.pushes = _PatientPushes(pushes_max)

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        connect: Connect | None = None,
        handshake: bool = True,
        pushes_max: int = PUSHES_MAX,
        timeout_s: float = PATIENCE_S,
        **connect_fields: object,
    ) -> PatientDriver:
        with _expiring(timeout_s):
            driver = await super().connect(
                host,
                port,
                connect=connect,
                handshake=handshake,
                pushes_max=pushes_max,
                timeout_s=timeout_s,
                **connect_fields,
            )
        assert isinstance(driver, cls)
        return driver

    async def request(
        self, type_name: str, /, *, timeout_s: float = PATIENCE_S, **fields: object
    ) -> Any:
        with _expiring(timeout_s):
            return await super().request(type_name, timeout_s=timeout_s, **fields)

    async def publish(
        self,
        producer_id: int,
        sequence_id: int,
        headers_and_payload: bytes,
        *,
        timeout_s: float = PATIENCE_S,
        **fields: object,
    ) -> pb.CommandSendReceipt:
        with _expiring(timeout_s):
            return await super().publish(
                producer_id, sequence_id, headers_and_payload, timeout_s=timeout_s, **fields
            )

    async def drain(self, timeout_s: float = PATIENCE_S) -> None:
        with _expiring(timeout_s):
            await super().drain(timeout_s)

    async def close(self, timeout_s: float = PATIENCE_S) -> None:
        with _expiring(timeout_s):
            await super().close(timeout_s)

    async def lost(self, timeout_s: float = PATIENCE_S) -> None:
        with _expiring(timeout_s):
            await super().lost(timeout_s)


class _PatientPushes(Pushes):
    async def get(self, timeout_s: float = PATIENCE_S) -> Command:
        with _expiring(timeout_s):
            return await super().get(timeout_s)


class PatientAdmin(AdminClient):
    """An admin client whose requests raise `LimitExpired` if no answer comes."""

    def __init__(self, url: str) -> None:
        super().__init__(url, seconds=PATIENCE_S)

    async def exchange(
        self, method: str, path: str, body: object = None, query: Mapping[str, str] | None = None
    ) -> Answer:
        with _expiring(PATIENCE_S):
            return await super().exchange(method, path, body, query)


@contextmanager
def _expiring(seconds: float) -> Iterator[None]:
    try:
        yield
    except DeadlineExceeded as error:
        if seconds >= PATIENCE_S:
            expire(str(error), seconds)
        raise
