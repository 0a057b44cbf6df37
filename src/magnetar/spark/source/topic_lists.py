"""The topics of a namespace that match a pattern.

Owns: `NamespacePattern`: `persistent://public/default/o.*`, `topic://public/default/o.*`, or short
for the former `o.*`.

Invariants:
1. The regular expression is for the whole local name, and takes linear time (RE2).
2. A partitioned topic is one topic.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import re2

from magnetar.client.connection.connection import WATCH
from magnetar.client.connection.pool import Connections
from magnetar.client.connection.server_errors import refusal
from magnetar.errors import DeadlineExceeded, InvalidSetting, MagnetarError
from magnetar.model.names import Domain, NamespaceName, TopicName
from magnetar.wire.messages import Command, Received

_HINT: Final = "use topic://tenant/namespace/expression or persistent://tenant/namespace/expression"
_QUIET: Final = re2.Options()
_QUIET.log_errors = False


class NamespacePattern:
    """Topics of one kind, in one namespace."""

    def __init__(self, domain: Domain, namespace: NamespaceName, expression: str) -> None:
        self.domain = domain
        self.namespace = namespace
        try:
            self._expression = re2.compile(expression, _QUIET)
        except re2.error as error:
            text = f"{expression!r} is no regular expression: {error}"
            raise InvalidSetting(text, hint=_HINT) from None

    @classmethod
    def parse(cls, text: str) -> NamespacePattern:
        scheme, separator, rest = text.partition("://")
        if not separator:
            scheme, rest = Domain.PERSISTENT.value, text
        parts = rest.split("/", 2)
        if len(parts) == 1:
            parts = ["public", "default", *parts]
        if len(parts) != 3 or scheme not in (Domain.PERSISTENT.value, Domain.TOPIC.value):
            raise InvalidSetting(f"{text!r} is no pattern of topics", hint=_HINT)
        return cls(Domain(scheme), NamespaceName(parts[0], parts[1]), parts[2])

    async def topics(self, connections: Connections) -> tuple[str, ...]:
        """Their full names, sorted."""
        if self.domain is Domain.TOPIC:
            names = await _Listing(connections, self.namespace).names()
        else:
            names = list((await connections.topics(str(self.namespace))).topics)
        found = {TopicName.parse(each).without_partition() for each in names}
        return tuple(
            sorted(
                str(each)
                for each in found
                if each.domain is self.domain and self._expression.fullmatch(each.local_name)
            )
        )


class _Listing:
    """A watch of the scalable topics of a namespace that ends with its first list."""

    def __init__(self, connections: Connections, namespace: NamespaceName) -> None:
        self._connections = connections
        self._namespace = namespace
        self._first: asyncio.Future[list[str]]

    async def names(self) -> list[str]:
        connection = await self._connections.service()
        self._first = asyncio.get_running_loop().create_future()
        number = connection.register(WATCH, self)
        try:
            connection.tell(
                "WATCH_SCALABLE_TOPICS", watch_id=number, namespace=str(self._namespace)
            )
            async with asyncio.timeout(self._connections.settings.operation_timeout):
                return await self._first
        except TimeoutError as error:
            raise DeadlineExceeded(f"the topics of {self._namespace} did not come") from error
        finally:
            connection.unregister(WATCH, number)
            if connection.is_open:
                connection.tell("WATCH_SCALABLE_TOPICS_CLOSE", watch_id=number)

    # --- the connection's side

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        if self._first.done():
            return
        if body.HasField("error"):
            self.lost(refusal("the list of topics", body.error, body.message))
        elif body.HasField("snapshot"):
            self._first.set_result(list(body.snapshot.topics))

    def lost(self, error: MagnetarError) -> None:
        if not self._first.done():
            self._first.set_exception(error)
