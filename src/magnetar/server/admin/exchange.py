"""The exchange that endpoints share: how a request names its target, how answers are made.

Owns: the parts of a path, bodies and query values (decoded and checked), answers in JSON, and
`AdminServer`, what the endpoints know of the server.

Invariants:
1. A name in a path is taken from the undecoded path: whatever it holds, it is one part of it. `+`
   stands for a space there, as Java's and Go's tools write it.
2. An answer to a change is 204 unless it says something; JSON is made by msgspec.
3. What is wrong with a request is said before anything is changed.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Protocol, TypeVar

import msgspec
from aiohttp import web

from magnetar.broker.policy.configuration import BrokerConfiguration
from magnetar.broker.policy.schemas import Schemas
from magnetar.broker.topic.topics import Topics
from magnetar.errors import InvalidArgument, InvalidTopicName
from magnetar.metadata.api import MetadataStore
from magnetar.model.names import Domain, NamespaceName, TopicName, decoded
from magnetar.runtime.clock import Clock
from magnetar.server.config import ServerConfig
from magnetar.server.context import Context

# Schemas are the largest bodies; their records are bounded as well.
BODY_BYTES_MAX: Final = 1024 * 1024
DOCUMENT_BYTES_MAX: Final = 64 * 1024
"""Of what is kept without being understood, properties among it: records are small."""

Value = TypeVar("Value")

_FLAGS: Final = {"true": True, "false": False}


class AdminServer(Protocol):
    """The server, as its admin interface sees it."""

    @property
    def config(self) -> ServerConfig: ...

    @property
    def configuration(self) -> BrokerConfiguration: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def topics(self) -> Topics: ...

    @property
    def metadata(self) -> MetadataStore: ...

    @property
    def context(self) -> Context: ...

    @property
    def service_url(self) -> str: ...

    @property
    def admin_url(self) -> str | None: ...

    @property
    def stopping(self) -> bool: ...


# Java's client spells a scalable topic "scalable" in paths, ours also by its own domain.
_DOMAINS: Final = {
    Domain.PERSISTENT.value: Domain.PERSISTENT,
    Domain.NON_PERSISTENT.value: Domain.NON_PERSISTENT,
    "scalable": Domain.TOPIC,
    Domain.TOPIC.value: Domain.TOPIC,
    Domain.SEGMENT.value: Domain.SEGMENT,
}
"""By the part of a path that stands for them."""

SERVER: Final = web.AppKey("server", AdminServer)


def server_of(request: web.Request) -> AdminServer:
    return request.app[SERVER]


def topics_of(request: web.Request) -> Topics:
    return request.app[SERVER].topics


def schemas_of(request: web.Request) -> Schemas:
    return request.app[SERVER].context.schemas


# --- what a request names


def part_of(request: web.Request, name: str) -> str:
    """A named part of the path, decoded once."""
    # Where the part stands in the path that was asked for: aiohttp decodes before it matches, and
    # would take an encoded slash for two parts (invariant 1).
    resource = request.match_info.route.resource
    assert resource is not None
    place = resource.canonical.split("/").index(f"{{{name}}}")
    return decoded(request.rel_url.raw_path.split("/")[place])


def has_part(request: web.Request, name: str) -> bool:
    return name in request.match_info


def namespace_of(request: web.Request) -> NamespaceName:
    return NamespaceName(part_of(request, "tenant"), part_of(request, "namespace"))


def topic_of(request: web.Request) -> TopicName:
    # Some paths (schemas) have no domain: they mean persistent topics.
    domain = Domain.PERSISTENT
    if has_part(request, "domain"):
        text = part_of(request, "domain")
        if text not in _DOMAINS:
            raise InvalidTopicName(f"{text!r} is not a domain of topics")
        domain = _DOMAINS[text]
    # The name of a segment holds slashes and numbers that its parser checks.
    if domain is Domain.SEGMENT:
        return TopicName.parse(f"segment://{namespace_of(request)}/{part_of(request, 'topic')}")
    return TopicName(domain, namespace_of(request), part_of(request, "topic"))


def whole_number(text: str, what: str, *, least: int = 0) -> int:
    try:
        number = int(text)
    except ValueError:
        raise InvalidArgument(f"{what} must be a whole number, not {text!r}") from None
    if number < least:
        raise InvalidArgument(f"{what} must be at least {least}, not {number}")
    return number


def flag_of(request: web.Request, name: str, *, default: bool = False) -> bool:
    """A query value that is true or false."""
    text = request.query.get(name)
    if text is None:
        return default
    # Anything else is a mistake, and must not count as false.
    if text.lower() not in ("true", "false"):
        raise InvalidArgument(f"{name} must be true or false, not {text!r}")
    return text.lower() == "true"


async def body_of(request: web.Request, kind: type[Value]) -> Value | None:
    """The body as JSON of this kind; None: there is none, or it is `null`.

    A member that is null counts as absent: some tools write those that are not set so.
    """
    data = await _whole_body(request)
    # No body and `null` mean the same: tools differ in which of them they send.
    if not data.strip():
        return None
    try:
        found = msgspec.json.decode(data)
    # The second one is of a text within it that is no UTF-8.
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body of the request: {error}") from error
    except RecursionError:
        raise InvalidArgument("the body of the request is nested too deeply") from None
    # See above: null means not set.
    if isinstance(found, dict):
        found = {name: value for name, value in found.items() if value is not None}
    # As Jackson reads it: the admin client for Go sends some flags as text.
    if kind is bool and isinstance(found, str):
        found = _FLAGS.get(found, found)
    return None if found is None else converted(found, kind)


async def _whole_body(request: web.Request) -> bytes:
    seconds = server_of(request).config.limits.admin_request_seconds
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        reason = f"the body of the request did not arrive within {seconds:g} s"
        raise web.HTTPRequestTimeout(reason=reason) from None


def converted(found: object, kind: type[Value]) -> Value:
    """What JSON held, as this kind."""
    # Whoever asks for `object` decides by what it is.
    if kind is object:
        return found  # type: ignore[return-value]  # anything is an object
    try:
        return msgspec.convert(found, kind)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"the body of the request: {error}") from error
    except RecursionError:
        raise InvalidArgument("the body of the request is nested too deeply") from None


async def needed_body_of(request: web.Request, kind: type[Value]) -> Value:
    found = await body_of(request, kind)
    if found is None:
        raise InvalidArgument("the request needs a body")
    return found


# --- answers


def done() -> web.Response:
    """A change was made; there is nothing more to say."""
    return web.Response(status=204)


def shown(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )


def shown_or_nothing(value: Any) -> web.Response:
    """A policy: 204 where it is not set."""
    return done() if value is None else shown(value)


class Refusal(web.HTTPException):
    """A status that Pulsar has for this case alone, where no error of the broker stands for it."""

    def __init__(self, status: int, reason: str) -> None:
        self.status_code = status
        # As text: what names a topic may hold characters that no line of a header can.
        super().__init__(text=reason)
        self.reason_given = reason


def refused(status: int, reason: str) -> web.Response:
    return shown({"reason": reason}, status=status)
