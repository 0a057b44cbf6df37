"""The schema registry: the schemas of a topic, stored and versioned.

Owns: `Schemas`, the stored form of a schema, and the byte form of its version.

Invariants:
1. Versions of a schema id are 0, 1, 2, ... in the order in which they were registered, and never
   change. A deletion is a version of its own: what came before it is no longer in force.
2. Of the versions in force no two have equal type and bytes: registering one again gives its
   version.
3. A new version passed the check against those in force at the moment at which it was stored.
4. What was registered costs little to look for: of each version a digest is kept in memory, and a
   look reads what came since and the newest version, to know that it is still there. Definitions
   are read when they are compared, for one registration of a schema id at a time, and together
   have `VERSIONS_BYTES_MAX`.

Relies on: `check`, which decides what is compatible. Rules beyond the type are put in there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec

from magnetar.broker.api import SchemaData
from magnetar.broker.policy.effective import TopicPolicies
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
from magnetar.runtime.keyed_lock import KeyedLock
from magnetar.wire.pb import pulsar_pb2 as pb

VERSIONS_MAX: Final = 1000
"""Of one schema id, deleted ones included."""
VERSIONS_BYTES_MAX: Final = 16 * 1024 * 1024
"""In all versions of one schema id, deleted ones included."""

# Schema ids of which digests are kept; of the others they are read again.
_INDEXES_MAX: Final = 1000

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
"""Raises IncompatibleSchema unless a schema fits those in force by a strategy.

Those in force are given oldest first: all of them to a transitive strategy, the newest to others.
"""


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


class _Digest(NamedTuple):
    """One version, as small as it can be told from others."""

    version: int
    digest: bytes | None
    """None: it is a deletion."""
    size: int


class _Index:
    """The versions of one schema id, without their definitions."""

    def __init__(self) -> None:
        self.stored: list[_Digest] = []
        self.newest = 0
        """The store's version of the newest record, by which a registry made anew is noticed."""

    @property
    def in_force(self) -> list[_Digest]:
        # Invariant 1: all behind the last deletion.
        for index in range(len(self.stored) - 1, -1, -1):
            if self.stored[index].digest is None:
                return self.stored[index + 1 :]
        return self.stored

    @property
    def total_bytes(self) -> int:
        return sum(each.size for each in self.stored)

    def find(self, schema: SchemaData) -> int | None:
        """The version in force with this type and these bytes (invariant 2)."""
        wanted = _digest(schema.type, schema.data)
        return next((each.version for each in self.in_force if each.digest == wanted), None)

    def add(self, stored: StoredSchema, record: Record) -> None:
        digest = None if stored.deleted else _digest(stored.type, stored.data)
        self.stored.append(_Digest(stored.version, digest, len(record.value)))
        self.newest = record.version


class Schemas:
    """All schemas of one metadata store."""

    def __init__(self, metadata: MetadataStore, clock: Clock, check: Check = same_type) -> None:
        self._metadata = metadata
        self._clock = clock
        self._check = check
        # The longest unused first. Whoever works with one has the lock of its schema id.
        self._indexes: OrderedDict[str, _Index] = OrderedDict()
        self._turns: KeyedLock[str] = KeyedLock()

    async def versions(self, schema_id: str) -> list[StoredSchema]:
        """The versions in force, oldest first."""
        async with self._turns.of(schema_id):
            return await self._read(schema_id, (await self._index(schema_id)).in_force)

    async def latest(self, schema_id: str) -> StoredSchema | None:
        async with self._turns.of(schema_id):
            found = await self._read(schema_id, (await self._index(schema_id)).in_force[-1:])
        return found[0] if found else None

    async def version(self, schema_id: str, version: int) -> StoredSchema | None:
        """One version, in force or not; None: never stored, or it is a deletion."""
        record = await self._metadata.get(_key(schema_id, version))
        found = None if record is None else _decoded(schema_id, record)
        return None if found is None or found.deleted else found

    async def find(self, schema_id: str, schema: SchemaData) -> int | None:
        """The version in force with this type and these bytes."""
        async with self._turns.of(schema_id):
            return (await self._index(schema_id)).find(schema)

    async def register(
        self, schema_id: str, schema: SchemaData, *, strategy: str, may_add: bool = True
    ) -> int:
        """The version of a schema, a new one if it is compatible and `may_add`."""
        async with self._turns.of(schema_id):
            for _ in range(_REGISTER_ATTEMPTS):
                # Looked at again in every attempt: the check must hold against what is in force
                # now (invariant 3).
                index = await self._index(schema_id)
                known = index.find(schema)
                if known is not None:
                    return known
                # isAllowAutoUpdateSchema forbids updates; the first schema is none.
                if not may_add and index.in_force:
                    raise IncompatibleSchema("the policy of this topic allows no new schema")
                self._check(schema, await self._compared(schema_id, index, strategy), strategy)
                # The next number, only if it is free: of two brokers at once, one stores and the
                # other looks again.
                added = await self._add(schema_id, index, schema)
                if added is not None:
                    return added
        raise Unavailable(f"schema {schema_id}: lost {_REGISTER_ATTEMPTS} races in a row")

    async def check(self, schema_id: str, schema: SchemaData, *, strategy: str) -> None:
        """Raise IncompatibleSchema unless this schema may be used with those in force."""
        async with self._turns.of(schema_id):
            index = await self._index(schema_id)
            if index.find(schema) is None:
                self._check(schema, await self._compared(schema_id, index, strategy), strategy)

    async def is_judged(self, schema_id: str, schema: SchemaData, *, strategy: str) -> bool:
        """Whether that `check` passes says all that the strategy asks for.

        Of two different definitions of one type it does not: only their type was compared.
        """
        async with self._turns.of(schema_id):
            index = await self._index(schema_id)
        is_known = index.find(schema) is not None
        return is_known or not index.in_force or strategy == "ALWAYS_COMPATIBLE"

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
        async with self._turns.of(schema_id):
            for _ in range(_REGISTER_ATTEMPTS):
                index = await self._index(schema_id)
                if not index.in_force:
                    return None
                added = await self._add(schema_id, index, None)
                if added is not None:
                    return added
        raise Unavailable(f"schema {schema_id}: lost {_REGISTER_ATTEMPTS} races in a row")

    async def forget(self, schema_id: str) -> None:
        """Remove everything, with the topic that it belonged to."""
        async with self._turns.of(schema_id):
            self._indexes.pop(schema_id, None)
            await self._metadata.delete_range(schemas_directory(schema_id))

    # --- parts, with the lock of the schema id

    async def _index(self, schema_id: str) -> _Index:
        """What is stored now, also by other brokers."""
        index = self._indexes.get(schema_id)
        if index is not None:
            self._indexes.move_to_end(schema_id)
            newest = await self._metadata.get(_key(schema_id, len(index.stored) - 1))
            if newest is not None and newest.version == index.newest:
                await self._follow(schema_id, index)
                return index
        # Never looked at, or removed with its topic, and perhaps made anew.
        index = _Index()
        async with aclosing(self._metadata.scan(schemas_directory(schema_id))) as records:
            async for record in records:
                index.add(_decoded(schema_id, record), record)
        self._indexes.pop(schema_id, None)
        # Of a topic without a schema nothing is kept: there are many.
        if index.stored:
            self._indexes[schema_id] = index
            if len(self._indexes) > _INDEXES_MAX:
                self._indexes.popitem(last=False)
        return index

    async def _follow(self, schema_id: str, index: _Index) -> None:
        """Take in what was stored since."""
        while (record := await self._metadata.get(_key(schema_id, len(index.stored)))) is not None:
            index.add(_decoded(schema_id, record), record)

    async def _compared(self, schema_id: str, index: _Index, strategy: str) -> list[SchemaData]:
        """What the check is given."""
        wanted = index.in_force if strategy.endswith("_TRANSITIVE") else index.in_force[-1:]
        return [each.as_schema() for each in await self._read(schema_id, wanted)]

    async def _read(self, schema_id: str, versions: list[_Digest]) -> list[StoredSchema]:
        records = [await self._metadata.get(_key(schema_id, each.version)) for each in versions]
        # One that is not there any more went with its topic, a moment ago, at another broker.
        return [_decoded(schema_id, record) for record in records if record is not None]

    async def _add(self, schema_id: str, index: _Index, schema: SchemaData | None) -> int | None:
        """Store the next version (no schema: a deletion); None: somebody else did."""
        version = len(index.stored)
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
        encoded = msgspec.msgpack.encode(stored)
        # A deletion is always possible.
        if schema is not None and index.total_bytes + len(encoded) > VERSIONS_BYTES_MAX:
            raise TooManyRequests(
                f"schema {schema_id}: its versions may have {VERSIONS_BYTES_MAX} bytes together",
                hint="use one of the versions that there are, or another topic",
            )
        try:
            await self._metadata.put(_key(schema_id, version), encoded, expected=ABSENT)
        except BadVersion:
            return None
        return version


def _key(schema_id: str, version: int) -> str:
    return f"{schemas_directory(schema_id)}/{version:0{_VERSION_DIGITS}d}"


def _digest(kind: int, data: bytes) -> bytes:
    return sha256(b"%d:" % kind + data).digest()


def _decoded(schema_id: str, record: Record) -> StoredSchema:
    try:
        found = msgspec.msgpack.decode(record.value, type=StoredSchema)
    except msgspec.MsgspecError as error:
        raise CorruptMetadata(f"{record.key}: {error}") from error
    if found.schema_id != schema_id:
        raise CorruptMetadata(f"{record.key} holds a schema of {found.schema_id!r}")
    return found
