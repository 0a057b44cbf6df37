"""`/lookup/v2/topic`: which broker has a topic, for clients that are given an http:// address."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from magnetar.model.names import TopicName
from magnetar.server.admin.exchange import server_of, shown, topic_of, topics_of


async def look_up(request: web.Request) -> web.Response:
    server = server_of(request)
    name = topic_of(request)
    await _check(request, name)
    return shown(
        {
            "brokerUrl": server.service_url,
            "brokerUrlTls": "",
            "httpUrl": server.admin_url or "",
            "httpUrlTls": "",
            "nativeUrl": server.service_url,
            "brokerUrlSsl": "",
        }
    )


async def bundle_of(request: web.Request) -> web.Response:
    """A namespace is not divided: every topic is in its one bundle."""
    await _check(request, topic_of(request))
    return web.Response(text="0x00000000_0xffffffff", content_type="text/plain")


async def _check(request: web.Request, name: TopicName) -> None:
    """There need not be such a topic yet: whoever asks is about to use it."""
    await topics_of(request).namespaces.policies(name.namespace)


_TOPIC: Final = "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}"

ROUTES: Final = (
    web.get(_TOPIC, look_up),
    web.get(f"{_TOPIC}/bundle", bundle_of),
)
