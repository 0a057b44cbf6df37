"""The schema registry: the schemas of a topic, stored and versioned.

Owns: `Schemas`, the stored form of a schema, and the byte form of its version.

Invariants:
1. Versions of a schema id are 0, 1, 2, ... in the order in which they were registered, and never
   change. A deletion is a version of its own: what came before it is no longer in force.
2. Of the versions in force no two have equal type and bytes: registering one again gives its
   version.
3. A new version passed the check against those in force at the moment at which it was stored.

Relies on: `check`, which decides what is compatible. Rules beyond the type are put in there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from magnetar.broker.api import SchemaData
from magnetar.broker.policy.policies import TopicPolicies
from magnetar.broker.policy.records import schemas_directory
from magnetar.errors import (
    BadVersion,
    CorruptMetadata,
    IncompatibleSchema,
    TooManyRequests,
    Unavailable,
)
from magnetar.metadata.api import ABSENT, MetadataStore, Record
from magnetar.runtime.clock import Clock
from magnetar.wire.pb import pulsar_pb2 as pb

VERSIONS_MAX: Final = 1000
"""Of one schema id, deleted ones included."""

# Numbers of Schema.Type in the protocol.
NO_SCHEMA_TYPE: Final = 0
AUTO_CONSUME_TYPE: Final = 21

# Each lost race means that somebody else stored a version: so many in a row is no coincidence.
_REGISTER_ATTEMPTS: Final = 16
# Pulsar's LongSchemaVersion: eight bytes, big-endian.
_VERSION_BYTES: Final = 8
# Leading zeros make a scan by key come in the order of versions.
_VERSION_DIGITS: Final = 20

Check = Callable[[SchemaData, Sequence[SchemaData], str], None]
"""Raises IncompatibleSchema unless a schema fits those in force (oldest first) by a strategy."""


class StoredSchema(msgspec.Struct, frozen=True):
    """One version."""

    schema_id: str
    version: int
    type: int
    data: bytes
    created_ms: int
    name: str = ""
    properties: dict[str, str] = {}
    deleted: bool = False

    def as_schema(self) -> SchemaData:
        return SchemaData(self.type, self.data, self.name, self.properties)

    def holds(self, schema: SchemaData) -> bool:
        return self.type == schema.type and self.data == schema.data


def version_bytes(version: int | None) -> bytes:
    """A version as the protocol writes it; nothing for none."""
    return b"" if version is None else version.to_bytes(_VERSION_BYTES, "big")


def version_from(data: bytes) -> int:
    """A version from its bytes."""
    if len(data) != _VERSION_BYTES:
        raise IncompatibleSchema(f"a schema version has {_VERSION_BYTES} bytes, not {len(data)}")
    return int.from_bytes(data, "big")


def type_name(number: int) -> str:
    """The name that applications know a type of schema by: `JSON`, `AVRO`."""
    known = number in pb.Schema.Type.values()
    return pb.Schema.Type.Name(number).upper() if known else f"of type {number}"


def is_schema(schema: SchemaData | None) -> bool:
    """Whether there is anything to register: plain bytes and "whatever there is" are none."""
    return schema is not None and schema.type not in (NO_SCHEMA_TYPE, AUTO_CONSUME_TYPE)


def same_type(schema: SchemaData, in_force: Sequence[SchemaData], strategy: str) -> None:
    """The one rule so far: a topic keeps its type of schema."""
    # The first schema of a topic fits by any strategy.
    if strategy == "ALWAYS_COMPATIBLE" or not in_force:
        return
    if strategy == "ALWAYS_INCOMPATIBLE":
        raise IncompatibleSchema("the policy of this topic allows no change of its schema")
    if in_force[-1].type != schema.type:
        raise IncompatibleSchema(
            f"the topic's schema is {type_name(in_force[-1].type)}, not {type_name(schema.type)}",
            hint="use a schema of the topic's type, or another topic",
        )


class Schemas:
    """All schemas of one metadata store."""

    def __init__(self, metadata: MetadataStore, clock: Clock, check: Check = same_type) -> None:
        self._metadata = metadata
        self._clock = clock
        self._check = check

    async def versions(self, schema_id: str) -> list[StoredSchema]:
        """The versions in force, oldest first."""
        return _in_force(await self._all(schema_id))

    async def latest(self, schema_id: str) -> StoredSchema | None:
        found = await self.versions(schema_id)
        return found[-1] if found else None

    async def version(self, schema_id: str, version: int) -> StoredSchema | None:
        """One version, in force or not; None: never stored, or it is a deletion."""
        record = await self._metadata.get(_key(schema_id, version))
        found = None if record is None else _decoded(schema_id, record)
        return None if found is None or found.deleted else found

    async def find(self, schema_id: str, schema: SchemaData) -> int | None:
        """The version in force with this type and these bytes."""
        for each in await self.versions(schema_id):
            if each.holds(schema):
                return each.version
        return None

    async def register(
        self, schema_id: str, schema: SchemaData, *, strategy: str, may_add: bool = True
    ) -> int:
        """The version of a schema, a new one if it is compatible and `may_add`."""
        for _ in range(_REGISTER_ATTEMPTS):
            # Read again in every attempt: the check must hold against what is in force now
            # (invariant 3).
            stored = await self._all(schema_id)
            in_force = _in_force(stored)
            for each in in_force:
                if each.holds(schema):
                    return each.version
            # isAllowAutoUpdateSchema forbids updates; the first schema is none.
            if not may_add and in_force:
                raise IncompatibleSchema("the policy of this topic allows no new schema")
            self._check(schema, [each.as_schema() for each in in_force], strategy)
            # The next number, only if it is free: of two at once, one stores and the other looks
            # again.
            added = await self._add(schema_id, len(stored), schema)
            if added is not None:
                return added
        raise Unavailable(f"schema {schema_id}: lost {_REGISTER_ATTEMPTS} races in a row")

    async def check(self, schema_id: str, schema: SchemaData, *, strategy: str) -> None:
        """Raise IncompatibleSchema unless this schema may be used with those in force."""
        in_force = await self.versions(schema_id)
        if not any(each.holds(schema) for each in in_force):
            self._check(schema, [each.as_schema() for each in in_force], strategy)

    async def is_judged(self, schema_id: str, schema: SchemaData, *, strategy: str) -> bool:
        """Whether that `check` passes says all that the strategy asks for.

        Of two different definitions of one type it does not: only their type was compared.
        """
        in_force = await self.versions(schema_id)
        is_known = any(each.holds(schema) for each in in_force)
        return is_known or not in_force or strategy == "ALWAYS_COMPATIBLE"

    async def for_producer(
        self, schema_id: str, schema: SchemaData | None, policies: TopicPolicies
    ) -> int | None:
        """The version that a producer uses, registered if need be; None: it has no schema."""
        if schema is not None and is_schema(schema):
            return await self.register(
                schema_id,
                schema,
                strategy=policies.schema_strategy,
                may_add=policies.schema_updates,
            )
        # A topic that never had a schema takes plain bytes even where one is enforced.
        if policies.schema_required and await self.latest(schema_id) is not None:
            raise IncompatibleSchema("the topic takes only producers with a schema")
        return None

    async def for_consumer(
        self, schema_id: str, schema: SchemaData | None, policies: TopicPolicies, *, idle: bool
    ) -> None:
        """Check the schema of a consumer; on an idle topic without one it is registered."""
        if schema is None or not is_schema(schema):
            return
        strategy = policies.schema_strategy
        if await self.latest(schema_id) is not None:
            await self.check(schema_id, schema, strategy=strategy)
        # As Pulsar's addSchemaIfIdleOrCheckCompatible: a consumer may bring the schema only while
        # nobody can have messages of another one.
        elif idle:
            await self.register(schema_id, schema, strategy=strategy)
        else:
            raise IncompatibleSchema("the topic has messages or users, and no schema")

    async def delete(self, schema_id: str) -> int | None:
        """End the force of every version so far; the version of the deletion, None: no schema."""
        for _ in range(_REGISTER_ATTEMPTS):
            stored = await self._all(schema_id)
            if not _in_force(stored):
                return None
            added = await self._add(schema_id, len(stored), None)
            if added is not None:
                return added
        raise Unavailable(f"schema {schema_id}: lost {_REGISTER_ATTEMPTS} races in a row")

    async def forget(self, schema_id: str) -> None:
        """Remove everything, with the topic that it belonged to."""
        await self._metadata.delete_range(schemas_directory(schema_id))

    # --- parts

    async def _all(self, schema_id: str) -> list[StoredSchema]:
        async with aclosing(self._metadata.scan(schemas_directory(schema_id))) as records:
            return [_decoded(schema_id, record) async for record in records]

    async def _add(self, schema_id: str, version: int, schema: SchemaData | None) -> int | None:
        """Store the next version (no schema: a deletion); None: somebody else did."""
        if version >= VERSIONS_MAX:
            raise TooManyRequests(f"schema {schema_id} has {VERSIONS_MAX} versions already")
        stored = StoredSchema(
            schema_id=schema_id,
            version=version,
            type=NO_SCHEMA_TYPE if schema is None else schema.type,
            data=b"" if schema is None else schema.data,
            created_ms=self._clock.now_ms(),
            name="" if schema is None else schema.name,
            properties={} if schema is None else dict(schema.properties),
            deleted=schema is None,
        )
        key = _key(schema_id, version)
        try:
            await self._metadata.put(key, msgspec.msgpack.encode(stored), expected=ABSENT)
        except BadVersion:
            return None
        return version


def _key(schema_id: str, version: int) -> str:
    return f"{schemas_directory(schema_id)}/{version:0{_VERSION_DIGITS}d}"


def _in_force(stored: list[StoredSchema]) -> list[StoredSchema]:
    # Invariant 1: all behind the last deletion.
    for index in range(len(stored) - 1, -1, -1):
        if stored[index].deleted:
            return stored[index + 1 :]
    return stored


def _decoded(schema_id: str, record: Record) -> StoredSchema:
    try:
        found = msgspec.msgpack.decode(record.value, type=StoredSchema)
    except msgspec.MsgspecError as error:
        raise CorruptMetadata(f"{record.key}: {error}") from error
    if found.schema_id != schema_id:
        raise CorruptMetadata(f"{record.key} holds a schema of {found.schema_id!r}")
    return found
