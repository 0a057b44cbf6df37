"""`/lookup/v2/topic`: which broker has a topic, for clients that are given an http:// address."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from magnetar.model.names import TopicName
from magnetar.server.admin.exchange import server_of, shown, topic_of, topics_of


async def look_up(request: web.Request) -> web.Response:
    server = server_of(request)
    name = await _checked(request)
    urls = await server.context.owner_urls(name)
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
    await _checked(request)
    # Pulsar's name for the bundle that spans the whole hash range.
    return web.Response(text="0x00000000_0xffffffff", content_type="text/plain")


async def _checked(request: web.Request) -> TopicName:
    """There need not be such a topic yet: whoever asks is about to use it."""
    name = topic_of(request)
    if name.domain.is_scalable:
        server_of(request).context.check_scalable()
    await topics_of(request).namespaces.policies(name.namespace)
    return name


_TOPIC: Final = "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}"

ROUTES: Final = (
    web.get(_TOPIC, look_up),
    web.get(f"{_TOPIC}/bundle", bundle_of),
)
