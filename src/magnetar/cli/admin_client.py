"""The admin interface of a server, as the verbs use it.

Owns: `AdminClient` (requests over HTTP, each with a deadline), the options that all its verbs
share, and the names of topics as paths.

Invariants:
1. Whatever goes wrong leaves as an error of `magnetar.errors`: the reason that the server gave, or
   what to do when none answers.
2. Without `--admin-url` the address is that of `MAGNETAR_ADMIN_URL`, else of the settings, so that
   verbs find a server that runs with the same environment or settings file.
3. A verb names the server that it asked: once it has answered, on stderr; else in the error.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import quote

import aiohttp
import click
from yarl import URL

from magnetar.errors import DeadlineExceeded, InvalidServiceUrl, RequestError, ServiceNotReady
from magnetar.model.names import NamespaceName, TopicName
from magnetar.server.config import ADMIN_URL_VARIABLE, SERVICE_URL_VARIABLE, load

REQUEST_SECONDS: Final = 30.0

NOT_FOUND: Final = 404

_PREFIX: Final = "/admin/v2"
_JSON: Final = "application/json"
_TEXT: Final = "text/plain"
_WORDS_MAX: Final = 500
"""Bytes of an answer in plain text that are shown."""

Result = TypeVar("Result")
Verb = TypeVar("Verb", bound=Callable[..., object])


class Answer(NamedTuple):
    """The answer to a request, whatever its status."""

    status: int
    headers: Mapping[str, str]
    data: bytes
    server: str
    """The URL that was asked, for errors."""


class AdminClient:
    """Requests to one server. Use it with `async with`."""

    def __init__(self, url: str, *, seconds: float = REQUEST_SECONDS) -> None:
        # Else aiohttp would say that nobody answers there.
        if not url.startswith(("http://", "https://")):
            raise InvalidServiceUrl(
                f"{url!r} is not the URL of an admin interface", hint="use http://host:port"
            )
        self.url = url.rstrip("/")
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._seconds)
        self._session = aiohttp.ClientSession(timeout=timeout)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, **query: str) -> Any:
        """What the server answers: JSON decoded, anything else as text."""
        return _value(await self.exchange("GET", path, query=query))

    async def get_or_none(self, path: str, **query: str) -> Any:
        """Get what `get` does, or None where the server knows no such thing."""
        answer = await self.exchange("GET", path, query=query)
        return None if answer.status == NOT_FOUND else _value(answer)

    async def put(self, path: str, body: object = None, **query: str) -> Any:
        return _value(await self.exchange("PUT", path, body, query))

    async def post(self, path: str, body: object = None, **query: str) -> Any:
        return _value(await self.exchange("POST", path, body, query))

    async def delete(self, path: str, **query: str) -> Any:
        return _value(await self.exchange("DELETE", path, query=query))

    async def exchange(
        self, method: str, path: str, body: object = None, query: Mapping[str, str] | None = None
    ) -> Answer:
        """One request; a path that begins with `/` is taken as it is."""
        assert self._session is not None, "use `async with`"
        # The path is encoded already: what a name holds must not be taken for a part of it.
        url = URL(self.url + (path if path.startswith("/") else f"{_PREFIX}/{path}"), encoded=True)
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": _JSON}
        try:
            async with self._session.request(
                method, url.update_query(query or {}), data=content, headers=headers
            ) as answer:
                return Answer(answer.status, answer.headers, await answer.read(), self.url)
        # Three ways to get no answer: a server that is too slow,
        # none at all, and a URL that is none.
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.url} did not answer within {self._seconds:g} s"
            ) from error
        except aiohttp.ClientError as error:
            raise ServiceNotReady(
                f"no admin interface answers at {self.url}: {_reason(error)}",
                hint="start a server with `magnetar serve`, or name its --admin-url",
            ) from error
        except ValueError as error:
            raise RequestError(f"{self.url} is not a URL: {error}") from error


def _reason(error: aiohttp.ClientError) -> str:
    # The library's own text has the address again, and speaks of SSL where there is none.
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(
        error, aiohttp.ClientSSLError
    ):
        number = error.os_error.errno
        return os.strerror(number) if number else str(error.os_error)
    return str(error)


def _value(answer: Answer) -> Any:
    check(answer)
    # The admin interface answers some requests with plain text, as Pulsar's does, or with nothing.
    if answer.headers.get("Content-Type", "").startswith(_JSON) and answer.data:
        return _decoded(answer)
    return answer.data.decode("utf-8", "replace")


def check(answer: Answer) -> None:
    """Raise the server's reason, if it refused."""
    if answer.status < 400:
        return
    # The server's own words are the best; proxies in between answer with pages instead.
    if answer.headers.get("Content-Type", "").startswith(_JSON):
        found = _decoded(answer)
        if isinstance(found, dict) and found.get("reason"):
            raise RequestError(f"{found['reason']} (said {answer.server})")
    # So the port of clients answers, and says which port was meant.
    if answer.headers.get("Content-Type", "").startswith(_TEXT) and answer.data:
        words = " ".join(answer.data[:_WORDS_MAX].decode("utf-8", "replace").split())
        raise RequestError(f"{words} (said {answer.server})")
    raise RequestError(f"{answer.server} answered with status {answer.status}")


def _decoded(answer: Answer) -> Any:
    try:
        return json.loads(answer.data)
    except ValueError as error:
        raise RequestError(f"{answer.server} answered with broken JSON: {error}") from error


# --- what the verbs share


def admin_options(verb: Verb) -> Verb:
    """`--admin-url`, for a verb that asks a server."""
    return click.option("--admin-url", metavar="URL", help="The server.  [default: by settings]")(
        verb
    )


def json_option(verb: Verb) -> Verb:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(verb)


def ask(url: str | None, work: Callable[[AdminClient], Awaitable[Result]]) -> Result:
    """Run one verb's requests against a server."""

    server = url or default_admin_url()

    async def run() -> Result:
        async with AdminClient(server) as admin:
            return await work(admin)

    found = asyncio.run(run())
    name_server(server)
    return found


def name_server(url: str) -> None:
    """Say which server a verb talks to: by settings it may be another one than its user thinks."""
    # On stderr: stdout has the answer alone, for programs too.
    click.echo(click.style(f"server: {url}", dim=True), err=True)


def default_admin_url() -> str:
    if given := os.environ.get(ADMIN_URL_VARIABLE):
        return given
    config = load({}, os.environ)
    return f"http://{_reachable(config.host)}:{config.admin_port}"


def default_service_url() -> str:
    if given := os.environ.get(SERVICE_URL_VARIABLE):
        return given
    config = load({}, os.environ)
    return f"pulsar://{_reachable(config.host)}:{config.port}"


def _reachable(host: str) -> str:
    """An address that a server listens on, as one to connect to."""
    # "All addresses" is for listening: nobody can connect to it everywhere.
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host


def namespace_path(text: str) -> str:
    """`tenant/namespace`, checked."""
    return str(NamespaceName.parse(text))


def topic_path(text: str) -> str:
    """The path of a topic below the prefix: `persistent/tenant/namespace/topic`."""
    name = TopicName.parse(text)
    return f"{name.domain.value}/{name.namespace}/{part(name.local_name)}"


def part(text: str) -> str:
    """Any text as one part of a path."""
    return quote(text, safe="")
