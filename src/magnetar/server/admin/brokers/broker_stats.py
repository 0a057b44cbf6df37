"""`/admin/v2/broker-stats`: the statistics of all loaded topics, and of the broker as a whole.

Invariants:
1. Topics are told a few at a time, each as it is written: neither their number nor a slow reader
   costs memory or holds the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

import msgspec
from aiohttp import web

from magnetar.broker.topic.nonpersistent import LoadedTopic
from magnetar.errors import MagnetarError
from magnetar.model.names import Domain, NamespaceName
from magnetar.runtime.slices import SlicePace
from magnetar.server.admin import endpoints
from magnetar.server.admin.brokers.brokers import broker_id
from magnetar.server.admin.endpoints import Endpoint
from magnetar.server.admin.exchange import AdminServer, part_of, server_of, shown
from magnetar.server.admin.namespaces.bundles import BUNDLE
from magnetar.server.admin.topics.statistics import as_json

_TOPICS_PER_TURN: Final = 20
_DOMAINS: Final = (Domain.PERSISTENT, Domain.NON_PERSISTENT)


async def topics(request: web.Request) -> web.StreamResponse:
    """Write by namespace, bundle and domain the statistics of each topic."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    async for part in _parts(server_of(request)):
        await response.write(part)
    await response.write_eof()
    return response


async def _parts(server: AdminServer) -> AsyncIterator[bytes]:
    by_namespace: dict[NamespaceName, dict[Domain, list[LoadedTopic]]] = {}
    pace = SlicePace()
    for topic in list(server.topics.loaded.values()):
        name = topic.name
        if name.domain is not Domain.SEGMENT:  # those of scalable topics have their own page
            of_namespace = by_namespace.setdefault(name.namespace, {each: [] for each in _DOMAINS})
            of_namespace[name.domain].append(topic)
        await pace.after()
    opening = b"{"
    for namespace, found in by_namespace.items():
        yield opening + msgspec.json.encode(str(namespace)) + b':{"' + BUNDLE.encode() + b'":{'
        opening = b"}},"
        # The domains one after the other, each an object of topics.
        for number, (domain, some) in enumerate(found.items()):
            yield (b"," if number else b"") + msgspec.json.encode(domain.value) + b":{"
            for at in range(0, len(some), _TOPICS_PER_TURN):
                told = [
                    msgspec.json.encode(str(topic.name)) + b":" + await _stats(topic)
                    for topic in some[at : at + _TOPICS_PER_TURN]
                ]
                yield (b"," if at else b"") + b",".join(told)
                await asyncio.sleep(0)
            yield b"}"
    yield b"}}}" if by_namespace else b"{}"


async def _stats(topic: LoadedTopic) -> bytes:
    # One that is being unloaded tells what it knows.
    with suppress(MagnetarError):
        await topic.last_publish_ms()
    return msgspec.json.encode(as_json(topic.stats()))


async def load_report(request: web.Request) -> web.Response:
    """What this broker has to do at present."""
    server = server_of(request)
    sums = dict.fromkeys(("msgRateIn", "msgRateOut", "msgThroughputIn", "msgThroughputOut"), 0.0)
    producers = consumers = 0
    pace = SlicePace(_TOPICS_PER_TURN)
    # A list: topics come and go in the pauses.
    for topic in list(server.topics.loaded.values()):
        stats = topic.stats(consumers=False)
        sums["msgRateIn"] += stats.msg_rate_in
        sums["msgRateOut"] += stats.msg_rate_out
        sums["msgThroughputIn"] += stats.msg_throughput_in
        sums["msgThroughputOut"] += stats.msg_throughput_out
        producers += len(stats.publishers)
        consumers += sum(len(each.consumers) for each in topic.subscriptions.values())
        await pace.after()
    return shown(
        sums
        | {
            "webServiceUrl": server.admin_url or "",
            "pulsarServiceUrl": server.service_url,
            "numTopics": len(server.topics.loaded),
            "numProducers": producers,
            "numConsumers": consumers,
            "loadReportType": "LocalBrokerData",
        }
    )


async def owned_namespaces(request: web.Request) -> web.Response:
    """The namespaces of which topics are loaded here, each as its one bundle."""
    server = server_of(request)
    is_here = part_of(request, "cluster") == server.config.cluster
    # Of another broker nothing is known here.
    if not is_here or part_of(request, "broker") != broker_id(server):
        return shown({})
    found: set[NamespaceName] = set()
    pace = SlicePace()
    for name in list(server.topics.loaded):
        found.add(name.namespace)
        await pace.after()
    owned = {"broker_assignment": "shared", "is_controlled": False, "is_active": True}
    return shown({f"{namespace}/{BUNDLE}": owned for namespace in sorted(found, key=str)})


_BASE: Final = "/admin/v2/broker-stats"

ROUTES: Final[tuple[Endpoint, ...]] = (
    endpoints.get(f"{_BASE}/topics", topics),
    endpoints.get(f"{_BASE}/load-report", load_report),
    endpoints.get("/admin/v2/brokers/{cluster}/{broker}/ownedNamespaces", owned_namespaces),
)
