"""`/lookup/v2/topic`: which broker has a topic, for clients that are given an http:// address."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from magnetar.server.admin import endpoints
from magnetar.server.admin.exchange import server_of, shown, topic_of
from magnetar.server.authority import Action
from magnetar.server.context import lookup_urls


async def look_up(request: web.Request) -> web.Response:
    server = server_of(request)
    urls = await lookup_urls(server.context, topic_of(request))
    # nativeUrl and brokerUrlSsl are the names that older clients read.
    return shown(
        {
            "brokerUrl": urls.plain,
            "brokerUrlTls": urls.tls or "",
            "httpUrl": server.admin_url or "",
            "httpUrlTls": "",
            "nativeUrl": urls.plain,
            "brokerUrlSsl": urls.tls or "",
        }
    )


async def bundle_of(request: web.Request) -> web.Response:
    """A namespace is not divided: every topic is in its one bundle."""
    await lookup_urls(server_of(request).context, topic_of(request))
    # Pulsar's name for the bundle that spans the whole hash range.
    return web.Response(text="0x00000000_0xffffffff", content_type="text/plain")


_LOOK_UP: Final = (Action.LOOK_UP,)
_TOPIC: Final = "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}"

ROUTES: Final = (
    endpoints.get(_TOPIC, look_up, actions=_LOOK_UP),
    endpoints.get(f"{_TOPIC}/bundle", bundle_of, actions=_LOOK_UP),
)
