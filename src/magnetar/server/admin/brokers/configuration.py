"""`/admin/v2/brokers/configuration`: the settings that can change while the broker runs.

Relies on: `broker/policy/configuration.py` for what was changed, and the topics, which follow.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from aiohttp import web

from magnetar.broker.policy.configuration import NAMES
from magnetar.server.admin import endpoints
from magnetar.server.admin.exchange import done, part_of, server_of, shown


async def names(request: web.Request) -> web.Response:
    return shown(sorted(NAMES))


async def values(request: web.Request) -> web.Response:
    return shown(server_of(request).configuration.changed)


async def runtime(request: web.Request) -> web.Response:
    """All settings as text: those of policies under Pulsar's names, others under ours."""
    server = server_of(request)
    found = {name: _text(getattr(server.configuration.defaults, NAMES[name])) for name in NAMES}
    for group in (server.config, server.config.limits):
        for each in fields(group):
            value = getattr(group, each.name)
            if isinstance(value, str | int | float):  # the groups of settings are none themselves
                found[each.name] = _text(value)
    return shown(found)


async def change(request: web.Request) -> web.Response:
    return await _change(request, part_of(request, "value"))


async def take_back(request: web.Request) -> web.Response:
    return await _change(request, None)


async def _change(request: web.Request, text: str | None) -> web.Response:
    server = server_of(request)
    await server.configuration.change(part_of(request, "name"), text)
    policies = server.configuration.defaults.as_policies(server.config.limits)
    await server.topics.change_broker(policies)
    return done()


async def internal(request: web.Request) -> web.Response:
    """Where other processes would find metadata: nowhere, for it is in this one."""
    return shown(
        {
            "metadataStoreUrl": "",
            "configurationMetadataStoreUrl": "",
            "ledgersRootPath": "",
            "bookkeeperMetadataServiceUri": "",
            "stateStorageServiceUrl": "",
        }
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_BASE: Final = "/admin/v2/brokers/configuration"

ROUTES: Final = (
    endpoints.get(_BASE, names),
    endpoints.get(f"{_BASE}/values", values),
    endpoints.get(f"{_BASE}/runtime", runtime),
    endpoints.post(f"{_BASE}/{{name}}/{{value}}", change),
    endpoints.delete(f"{_BASE}/{{name}}", take_back),
    endpoints.get("/admin/v2/brokers/internal-configuration", internal),
)
