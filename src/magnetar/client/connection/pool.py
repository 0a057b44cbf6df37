"""The connections of one client, and what can be asked of any broker.

Owns: `Connections`: at most `connections_per_broker` connections to each broker, lookups with
redirects, partition counts, schemas, lists of topics; `retrying`, how an operation outlives
passing trouble.

Invariants:
1. At most one connection to an address and index is being made at a time, and a lost one is
   replaced by the next who asks.
2. The addresses of the service URL take turns: one that cannot be reached gives way to the next.
3. A lookup follows at most `redirects_max` redirects. `proxy_through_service_url` means: go on
   using the address of the service URL, and say to the proxy there which broker is meant.
4. A client that never had a connection, and whose addresses all say that nobody is there, gives up
   after `refused_timeout`: its server was not started, or is elsewhere. One that had a connection
   waits for its server to come back.
5. After `close` there is no connection, and nobody gets one; but whoever has one `apart` closes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random, SystemRandom
from ssl import SSLContext
from typing import Any, Final, NamedTuple, TypeVar

from magnetar.client.connection.backoff import Backoff
from magnetar.client.connection.connection import BrokerConnection, Connect
from magnetar.client.connection.metrics import ClientMetrics
from magnetar.client.connection.server_errors import is_passing
from magnetar.client.connection.settings import BrokerAddress, ClientSettings, ServiceUrl
from magnetar.client.message.interceptors import Interceptors
from magnetar.errors import (
    AlreadyClosed,
    DeadlineExceeded,
    MagnetarError,
    NotConnected,
    RequestError,
    TopicNotFound,
)
from magnetar.model.names import Domain, TopicName
from magnetar.runtime.clock import Clock, SystemClock
from magnetar.wire.pb import pulsar_pb2 as pb

Result = TypeVar("Result")

# Lost connections are kept only to be counted as replaced; this is when they are forgotten.
_MOST_BROKERS: Final = 10_000


class _Place(NamedTuple):
    """The place of one connection: an address, the broker behind it, and a number."""

    address: BrokerAddress
    behind: BrokerAddress | None
    number: int


class Connections:
    """All connections of one client."""

    def __init__(
        self,
        settings: ClientSettings,
        *,
        connect: Connect | None = None,
        chance: Random | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.chance = chance or SystemRandom()
        self.clock = clock or SystemClock()
        self.interceptors = Interceptors(settings.interceptors)
        self.metrics = ClientMetrics(lambda: self.count, lambda: self.throttled_count)
        self._connect = connect
        self._tls: SSLContext | None = None
        self._open: dict[_Place, BrokerConnection] = {}
        # Locks of places that are being connected to (invariant 1).
        self._opening: dict[_Place, asyncio.Lock] = {}
        self._service_turn = 0
        self._refused_since: float | None = None
        self._index = 0
        self._closed = False

    @property
    def count(self) -> int:
        """How many connections are open."""
        return sum(each.failure is None for each in self._open.values())

    @property
    def throttled_count(self) -> int:
        """How many of them a broker does not read because of a rate of publishing."""
        # A copy: a scrape runs in another thread than the one that adds connections.
        present = list(self._open.values())
        return sum(each.failure is None and each.throttling.rate is not None for each in present)

    def backoff(self) -> Backoff:
        """The pauses for one thing that is tried again and again."""
        settings = self.settings
        return Backoff(self.chance, first_s=settings.backoff_first, most_s=settings.backoff_most)

    # --- connections

    async def service(self) -> BrokerConnection:
        """A connection to any broker of the service URL."""
        addresses = self.settings.service_url.addresses
        failure: NotConnected | None = None
        refusals = 0
        for _ in addresses:
            # Kept over the await: others may have moved it on after the same failure, and moving it
            # twice would skip an address (invariant 2).
            turn = self._service_turn
            try:
                return await self.to(addresses[turn % len(addresses)])
            except NotConnected as error:
                failure = error
                refusals += error.is_refusal
                if self._service_turn == turn:
                    self._service_turn += 1
        assert failure is not None, "a service URL has an address"
        raise self._given_up(failure, refusals == len(addresses))

    def _given_up(self, failure: NotConnected, is_refused: bool) -> NotConnected:
        """The error of a round that found no connection (invariant 4)."""
        now = asyncio.get_running_loop().time()
        if not is_refused:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        since = self._refused_since
        if since is None or self._open or now - since < self.settings.refused_timeout:
            return failure
        url = self.settings.service_url
        hint = "is the server running (`magnetar serve`), and is this its address?"
        final = NotConnected(f"nobody listens at {url}: {failure.args[0]}", hint=hint)
        final.is_final = True
        return final

    async def to(
        self, address: BrokerAddress, *, behind: BrokerAddress | None = None
    ) -> BrokerConnection:
        """The connection to a broker (or through a proxy to the one behind it), made if needed."""
        # The connections of a broker take turns, whoever asks.
        self._index = (self._index + 1) % self.settings.connections_per_broker
        place = _Place(address, behind, self._index)
        known = self._open.get(place)
        if known is not None and known.is_open:
            return known
        # Looked up again under the lock: who waited for it finds what the one before has made.
        async with self._opening.setdefault(place, asyncio.Lock()):
            self._check_open()
            known = self._open.get(place)
            if known is not None and known.is_open:
                return known
            if len(self._open) >= _MOST_BROKERS:
                self._forget_lost()
            way = self._way_to(address)
            made = await BrokerConnection.open(address, self.settings, way, behind=behind)
            # Invariant 5: the client was closed while this one was connecting.
            if self._closed:
                made.abort()
                self._check_open()
            # It replaces one that was lost, which is what the metric counts.
            if known is not None:
                self.metrics.reconnects += 1
            self._open[place] = made
            return made

    async def at(self, url: str | None) -> BrokerConnection:
        """The connection to the broker of this URL; without one, to any broker."""
        if not url:
            return await self.service()
        (address, *_) = ServiceUrl.parse(url).addresses
        return await self.to(address)

    async def apart(self, address: BrokerAddress) -> BrokerConnection:
        """A connection for one user alone, who closes it."""
        self._check_open()
        made = await BrokerConnection.open(address, self.settings, self._way_to(address))
        if self._closed:
            made.abort()
            self._check_open()
        return made

    def url_of(self, plain: str, tls: str) -> str | None:
        """Which of a broker's two URLs this client uses; None: the broker gives none."""
        return (tls if self.settings.service_url.is_tls else plain) or None

    def _way_to(self, address: BrokerAddress) -> Connect:
        if self._connect is not None:
            return self._connect
        create = asyncio.get_running_loop().create_connection
        if not address.is_tls:
            return create
        if self._tls is None:
            self._tls = self.settings.tls.context()
        return partial(create, ssl=self._tls)

    def _forget_lost(self) -> None:
        for place in [place for place, each in self._open.items() if not each.is_open]:
            del self._open[place]
            self._opening.pop(place, None)

    def _check_open(self) -> None:
        if self._closed:
            raise AlreadyClosed("the client is closed")

    # --- questions

    async def lookup(self, topic: str) -> BrokerConnection:
        """The connection to the broker that has a topic."""
        settings = self.settings
        asked = await self.service()
        # Told back with the next question after a redirect: the broker named then answers for
        # itself instead of passing it on.
        authoritative = False
        fields: dict[str, Any] = {"topic": topic}
        if settings.listener_name is not None:
            fields["advertised_listener_name"] = settings.listener_name
        for _ in range(settings.redirects_max + 1):
            # Three answers: failed; connect, to the broker named; or redirect, to ask that one.
            answer = await asked.request("LOOKUP", authoritative=authoritative, **fields)
            if answer.response == pb.CommandLookupTopicResponse.Failed:
                raise RequestError(f"the lookup of {topic} failed: {answer.message}")
            url = self.url_of(answer.brokerServiceUrl, answer.brokerServiceUrlTls)
            if answer.proxy_through_service_url:
                found = await self._through(asked, url)
            else:
                # A broker without a URL means any: a single server need not know its own name.
                found = await self.at(url)
            if answer.response == pb.CommandLookupTopicResponse.Connect:
                return found
            asked, authoritative = found, answer.authoritative
        raise RequestError(
            f"the lookup of {topic} was redirected more than {settings.redirects_max} times"
        )

    async def _through(self, asked: BrokerConnection, url: str | None) -> BrokerConnection:
        """The broker of this URL, which is reached at the address that was asked."""
        if url is None or asked.is_magnetar:
            return asked  # it means itself: no proxy of Magnetar's exists
        (behind, *_) = ServiceUrl.parse(url).addresses
        return asked if behind == asked.address else await self.to(asked.address, behind=behind)

    async def partitions(self, topic: str, *, create: bool = True) -> int:
        """How many partitions a regular topic has; 0: it is not partitioned."""
        asked = await self.service()
        answer = await asked.request(
            "PARTITIONED_METADATA", topic=topic, metadata_auto_creation_enabled=create
        )
        return int(answer.partitions)

    async def schema(self, topic: str, schema_version: bytes | None = None) -> pb.Schema | None:
        """The latest schema of a topic, or that of a version; None: there is none."""
        # A scalable topic is nowhere in particular, and every broker has the registry.
        is_scalable = TopicName.parse(topic).domain is Domain.TOPIC
        asked = await (self.service() if is_scalable else self.lookup(topic))
        fields: dict[str, Any] = (
            {} if schema_version is None else {"schema_version": schema_version}
        )
        try:
            answer = await asked.request("GET_SCHEMA", topic=topic, **fields)
        except TopicNotFound:
            return None
        return answer.schema if answer.HasField("schema") else None

    async def topics(
        self, namespace: str, *, pattern: str | None = None
    ) -> pb.CommandGetTopicsOfNamespaceResponse:
        """The persistent topics of a namespace."""
        asked = await self.service()
        fields: dict[str, Any] = {"namespace": namespace}
        if pattern is not None:
            fields["topics_pattern"] = pattern
        answer: pb.CommandGetTopicsOfNamespaceResponse = await asked.request(
            "GET_TOPICS_OF_NAMESPACE", mode="PERSISTENT", **fields
        )
        return answer

    # --- the end

    async def close(self) -> None:
        """Close every connection."""
        self._closed = True
        # All of them, also if one fails to close.
        closed = await asyncio.gather(
            *(each.close() for each in self._open.values()), return_exceptions=True
        )
        self._open.clear()
        for each in closed:
            if isinstance(each, BaseException):
                raise each


async def retrying(
    what: str, attempt: Callable[[], Awaitable[Result]], backoff: Backoff, timeout_s: float
) -> Result:
    """Try until it works, until trouble comes that does not pass, or until the deadline."""
    failure: MagnetarError | None = None
    try:
        # The deadline cuts off an attempt under way, not only the pause: a broker that hangs is no
        # excuse.
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await attempt()
                except MagnetarError as error:
                    if not is_passing(error):
                        raise
                    failure = error
                await asyncio.sleep(backoff.next())
    except TimeoutError as error:
        # "Nobody answers at this address" helps more than "too late".
        if isinstance(failure, NotConnected):
            raise failure from None
        cause = f": {failure}" if failure is not None else ""
        text = f"{what} did not succeed within {timeout_s} s{cause}"
        raise DeadlineExceeded(text) from (failure or error)
