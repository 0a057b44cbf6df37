"""The server that the suite is pointed at, and what it offers.

Owns: `Target`: where the server is, its features as they were found out, the namespace of this run;
`Feature`, the names by which tests ask for what not every server has; `Servers`, where they come
from:

| variable | meaning |
|---|---|
| `MAGNETAR_E2E_SERVICE_URL` | a server that runs already; nothing is started |
| `MAGNETAR_E2E_ADMIN_URL` | its admin interface; without it, what needs administration is skipped |
| `MAGNETAR_E2E_TOKEN` | who we are there |
| `MAGNETAR_E2E_SERVER` | `magnetar` (if nothing is said) or `pulsar`: which server to start |

Invariant: a feature is found out by asking the server (feature flags, answers of the admin
interface), never by its name.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import pytest

from magnetar.client.client import Client
from magnetar.errors import MagnetarError
from magnetar.testing.virtual.driver import Driver
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.client_e2e.pulsar import PULSAR, PulsarProcess
from tests.interop.serving import ServerProcess, ask_admin
from tests.interop_java.maven import BuildFailed, lacking

SERVICE_URL: Final = "MAGNETAR_E2E_SERVICE_URL"
ADMIN_URL: Final = "MAGNETAR_E2E_ADMIN_URL"
TOKEN: Final = "MAGNETAR_E2E_TOKEN"
SERVER: Final = "MAGNETAR_E2E_SERVER"

_BATCH_INDEXES: Final = "acknowledgmentAtBatchIndexLevelEnabled"
_FOREVER: Final = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}


class Feature(Enum):
    """What a server may lack; the value says so in the reason of a skip."""

    ADMINISTRATION = f"an admin interface (is {ADMIN_URL} set?)"
    SCALABLE_TOPICS = "scalable topics"
    CREATION = "creation of scalable topics by their first user"
    STREAMS_OF_REGULAR = "stream consumers of regular topics"
    SCALABLE_TRANSACTIONS = "transactions of scalable topics"
    LEGACY_TRANSACTIONS = "transactions that end by markers"
    GROUPS = "transaction groups"
    BATCH_INDEX_ACKS = "acknowledgements of single messages of a batch"
    UNLOADING = "unloading of a namespace"
    RESTARTS = "restarts: it was not started by this suite"


class StartedServer(Protocol):
    """A server process that the suite may kill and start again."""

    service_url: str
    admin_url: str

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def stop(self) -> None: ...


@dataclass
class Target:
    """One server."""

    service_url: str
    admin_url: str | None
    token: str | None = None
    process: StartedServer | None = None
    namespace: str = field(default_factory=lambda: f"public/e2e-{secrets.token_hex(4)}")
    version: str = ""
    features: set[Feature] = field(default_factory=set)
    quiet_s: float = 1.5
    """What comes at all comes within this time, if nothing holds it up."""

    def admin(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and answer of the admin interface below `/admin/v2/`."""
        assert self.admin_url is not None
        return ask_admin(self.admin_url, method, f"/admin/v2/{path}", body)

    def administer(self, method: str, path: str, body: object = None) -> Any:
        """The same; it must be a success."""
        status, answer = self.admin(method, path, body)
        assert status < 300, f"{method} {path}: {status} {answer}"
        return answer

    def client(self, **options: Any) -> Client:
        return Client(self.service_url, auth=self.token, **options)

    def explore(self) -> None:
        """Find out what it offers, and make the namespace of this run."""
        if self.admin_url is not None:
            self._explore_administration()
        else:
            self.namespace = "public/default"
        asyncio.run(self._explore_protocol())
        if self.process is not None:
            self.features.add(Feature.RESTARTS)

    def _explore_administration(self) -> None:
        self.features.add(Feature.ADMINISTRATION)
        self.administer("PUT", f"namespaces/{self.namespace}")
        # What was read is kept, and no layout changes but by the tests.
        self.administer("POST", f"namespaces/{self.namespace}/retention", _FOREVER)
        policy = f"namespaces/{self.namespace}/scalableTopicAutoScalePolicy"
        self.admin("POST", policy, {"enabled": False})
        status, _ = self.admin("PUT", f"namespaces/{self.namespace}/unload")
        if status < 300:
            self.features.add(Feature.UNLOADING)
        status, settings = self.admin("GET", "brokers/configuration/runtime")
        if status >= 300 or str(settings.get(_BATCH_INDEXES, "true")) == "true":
            self.features.add(Feature.BATCH_INDEX_ACKS)

    async def _explore_protocol(self) -> None:
        flags, self.version = await self._shake_hands()
        if flags.supports_scalable_topics:
            self.features.add(Feature.SCALABLE_TOPICS)
        if flags.supports_tc_metadata_discovery:
            self.features.add(Feature.SCALABLE_TRANSACTIONS)
        if flags.supports_transaction_groups:
            self.features.add(Feature.GROUPS)
        async with self.client() as client:
            if await _succeeds(client.producer(f"topic://{self.namespace}/created-by-its-user")):
                self.features.add(Feature.CREATION)
            regular = f"persistent://{self.namespace}/regular"
            if await _succeeds(client.stream_consumer(regular, "s")):
                self.features.add(Feature.STREAMS_OF_REGULAR)
            if await _succeeds(client.transaction(scalable=False)):
                self.features.add(Feature.LEGACY_TRANSACTIONS)

    async def _shake_hands(self) -> tuple[pb.FeatureFlags, str]:
        url = urlsplit(self.service_url)
        assert url.hostname is not None
        fields: dict[str, Any] = {}
        if self.token is not None:
            fields = {"auth_method_name": "token", "auth_data": self.token.encode()}
        driver = await Driver.connect(url.hostname, url.port or 6650, handshake=False)
        try:
            said = await driver.request(
                "CONNECT", client_version="magnetar-e2e", protocol_version=21, **fields
            )
        finally:
            await driver.close()
        return said.feature_flags, said.server_version


async def _succeeds(attempt: Awaitable[object]) -> bool:
    try:
        await attempt
    except MagnetarError:
        return False
    return True


@contextmanager
def targeted(folder: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Target]:
    """The server that the environment names, or one that is started in the folder."""
    url = environment.get(SERVICE_URL)
    if url:
        target = Target(url, environment.get(ADMIN_URL), environment.get(TOKEN))
        target.explore()
        yield target
        return
    process = _server(environment.get(SERVER, "magnetar"), folder)
    process.start()
    try:
        target = Target(process.service_url, process.admin_url, process=process)
        if isinstance(process, ServerProcess):
            target.quiet_s = 0.3
        target.explore()
        yield target
    finally:
        process.stop()


def _server(kind: str, folder: Path) -> StartedServer:
    if kind == "magnetar":
        return ServerProcess(folder)
    assert kind == "pulsar", f"{SERVER} is magnetar or pulsar, not {kind}"
    reason = lacking()
    if reason is not None:
        pytest.exit(f"Pulsar cannot be started: {reason}", returncode=3)
    try:
        PULSAR.build()
    except BuildFailed as error:
        pytest.exit(f"Pulsar cannot be fetched: {error}", returncode=3)
    return PulsarProcess(folder)
