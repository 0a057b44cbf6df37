"""The schemas that the messages of a topic were written with.

Owns: `SchemaVersions`: what the registry said, kept, and the decoding of payloads with it.

Invariants:
1. `decode` never waits. Whoever hands a message out makes sure first that its version is `known`.
2. A version that the registry does not have is known as such, and read without a writer's schema.
3. At most `_VERSIONS_MAX` versions are kept.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from magnetar.client.connection.pool import Connections
from magnetar.client.schema.info import Schema, SchemaInfo

T = TypeVar("T")

_VERSIONS_MAX: Final = 1000


class SchemaVersions(Generic[T]):
    """One schema of an application, and the versions that it meets."""

    def __init__(self, connections: Connections, schema: Schema[T]) -> None:
        self.schema = schema
        self._connections = connections
        self._known: dict[bytes, SchemaInfo | None] = {b"": None}

    def is_known(self, version: bytes) -> bool:
        return not self.schema.needs_writer or version in self._known

    async def learn(self, topic: str, version: bytes) -> None:
        """Ask the registry; raises if it cannot be asked."""
        found = await self._connections.schema(topic, version)
        if len(self._known) >= _VERSIONS_MAX:
            self._known = {b"": None}
        self._known[version] = None if found is None else SchemaInfo.from_wire(found)

    def decode(self, data: bytes, version: bytes) -> T:
        return self.schema.decode(data, self._known.get(version))
