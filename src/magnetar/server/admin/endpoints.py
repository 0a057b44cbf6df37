"""Endpoints: each is one row with all that is said of it, in the module of its resource.

Owns: `Endpoint`, and how rows become routes of the application. The whole table is put together in
`application.py`: routes, access and the check of the documentation come from it.

Invariants:
1. A row says which rights its request needs; a look needs the right to list unless the row says
   otherwise, a change every right that there is on its target, also ones that come later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

from aiohttp import web

from magnetar.server.authority import Action

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ANY: Final = "*"
"""Stands for every method."""

NAMESPACE: Final = "/admin/v2/namespaces/{tenant}/{namespace}"
TOPIC: Final = "/admin/v2/{domain:persistent|non-persistent}/{tenant}/{namespace}/{topic}"


class Endpoint(NamedTuple):
    """One method on one path."""

    method: str
    path: str
    handler: Handler
    actions: tuple[Action, ...]
    """What the asker must be allowed to do with the topic or namespace that the path names."""
    policy: str | None = None
    """The field of `Policies` that it shows or sets."""
    unbuilt: str | None = None
    """Why it answers 501, if it does."""


def get(
    path: str,
    handler: Handler,
    *,
    actions: tuple[Action, ...] = (Action.LIST,),
    policy: str | None = None,
) -> Endpoint:
    return Endpoint("GET", path, handler, actions, policy)


def post(path: str, handler: Handler, *, policy: str | None = None) -> Endpoint:
    return Endpoint("POST", path, handler, tuple(Action), policy)


def put(path: str, handler: Handler, *, policy: str | None = None) -> Endpoint:
    return Endpoint("PUT", path, handler, tuple(Action), policy)


def delete(path: str, handler: Handler, *, policy: str | None = None) -> Endpoint:
    return Endpoint("DELETE", path, handler, tuple(Action), policy)


_ENDPOINTS: Final = web.AppKey("endpoints", dict[web.AbstractRoute, Endpoint])


def add_endpoints(application: web.Application, table: Iterable[Endpoint]) -> None:
    """Have the application answer them; of two that fit a path, the first one does."""
    found: dict[web.AbstractRoute, Endpoint] = {}
    for endpoint in table:
        # A HEAD is a GET without the answer's body.
        methods = ("GET", "HEAD") if endpoint.method == "GET" else (endpoint.method,)
        for method in methods:
            route = application.router.add_route(method, endpoint.path, endpoint.handler)
            found[route] = endpoint
    application[_ENDPOINTS] = found


def endpoint_of(request: web.Request) -> Endpoint | None:
    """The row that a request is answered by; None: there is none for its path or method."""
    return request.app[_ENDPOINTS].get(request.match_info.route)
