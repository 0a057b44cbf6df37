"""The schema registry: the schemas of a topic, stored and versioned.

Owns: `Schemas`, the stored form of a schema, and the byte form of its version.

Invariants:
1. Versions of a schema id are 0, 1, 2, ... in the order in which they were registered, and never
   change. A deletion is a version of its own: what came before it is no longer in force.
2. Of the versions in force no two say the same: registering one again gives its version, whatever
   the strategy is.
3. A new version is a sound schema of its type, and passed the check against those in force at the
   moment at which it was stored.
4. What was registered costs little to look for: of each version a digest is kept in memory, and a
   look reads what came since and the newest version, to know that it is still there. Definitions
   are read when a schema comes with other bytes than any in force, for one registration of a schema
   id at a time, and together have `VERSIONS_BYTES_MAX`.
5. Reading and comparing definitions goes in slices, and what takes more than one is done for one
   schema at a time on this broker.

Relies on: `schema_rules`, which says what is sound, the same, and compatible.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from magnetar.broker.api import SchemaData
from magnetar.broker.policy.avro import Steps
from magnetar.broker.policy.avro_resolution import Effort
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.records import schemas_directory
from magnetar.broker.policy.schema_rules import (
    AUTO_CONSUME_TYPE,
    NO_SCHEMA_TYPE,
    Definition,
    incompatibility,
    raw_digest,
    read,
    type_name,
)
from magnetar.errors import (
    BadVersion,
    CorruptMetadata,
    IncompatibleSchema,
    InvalidSchema,
    TooManyRequests,
    Unavailable,
)
from magnetar.metadata.api import ABSENT, MetadataStore, Record
from magnetar.runtime.clock import Clock
from magnetar.runtime.keyed_lock import KeyedLock
from magnetar.runtime.slices import SlicePace, in_slices

VERSIONS_MAX: Final = 1000
"""Of one schema id, deleted ones included; a deletion may come behind the last."""
VERSIONS_BYTES_MAX: Final = 16 * 1024 * 1024
"""In all versions of one schema id, deleted ones included."""

# Schema ids of which digests are kept; of the others they are read again.
_INDEXES_MAX: Final = 1000

# Read and compared before others have a turn, if they are small; a large one has slices of its own.
_SLICE_VERSIONS: Final = 20

# By these a consumer has to read what the newest version writes, and nothing else.
_READS_LATEST: Final = frozenset(("BACKWARD", "FORWARD", "FORWARD_TRANSITIVE", "FULL"))

# Each lost race means that somebody else stored a version: so many in a row is no coincidence.
_REGISTER_ATTEMPTS: Final = 16
# Pulsar's LongSchemaVersion: eight bytes, big-endian.
_VERSION_BYTES: Final = 8
# Leading zeros make a scan by key come in the order of versions.
_VERSION_DIGITS: Final = 20

Result = TypeVar("Result")


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


def is_schema(schema: SchemaData | None) -> bool:
    """Whether there is anything to register or to check: plain bytes are no schema."""
    return schema is not None and schema.type != NO_SCHEMA_TYPE


def takes_any_schema(schema: SchemaData | None) -> bool:
    """Whether a consumer reads with the schema of each message, and has none of its own."""
    return schema is not None and schema.type == AUTO_CONSUME_TYPE


@dataclass(slots=True)
class _Digest:
    """One version, as small as it can be told from others."""

    version: int
    type: int
    digest: bytes | None
    """Of its bytes; None: it is a deletion."""
    size: int
    meaning: bytes | None = None
    """Of what they say, once somebody wanted to know; empty: it is no sound schema."""


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

    def with_bytes(self, digest: bytes) -> int | None:
        """The version in force with these very bytes."""
        return next((each.version for each in self.in_force if each.digest == digest), None)

    def add(self, stored: StoredSchema, record: Record) -> None:
        digest = None if stored.deleted else raw_digest(stored.as_schema())
        self.stored.append(_Digest(stored.version, stored.type, digest, len(record.value)))
        self.newest = record.version


class Schemas:
    """All schemas of one metadata store."""

    def __init__(self, metadata: MetadataStore, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        # The longest unused first. Whoever works with one has the lock of its schema id.
        self._indexes: OrderedDict[str, _Index] = OrderedDict()
        self._turns: KeyedLock[str] = KeyedLock()
        self._long_work = asyncio.Lock()

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
        """The version in force that says the same as this one."""
        async with self._turns.of(schema_id):
            index = await self._index(schema_id)
            known = index.with_bytes(raw_digest(schema))
            if known is not None:
                return known
            return await self._same(schema_id, index, await self._worked(read(schema)))

    async def register(
        self, schema_id: str, schema: SchemaData, *, strategy: str, may_add: bool = True
    ) -> int:
        """The version of a schema, a new one if it is compatible and `may_add`."""
        async with self._turns.of(schema_id):
            return await self._register(schema_id, schema, strategy, may_add=may_add)

    async def check(self, schema_id: str, schema: SchemaData, *, strategy: str) -> None:
        """Raise IncompatibleSchema unless this schema could be registered."""
        async with self._turns.of(schema_id):
            index = await self._index(schema_id)
            if index.with_bytes(raw_digest(schema)) is not None:
                return
            definition = await self._worked(read(schema))
            if await self._same(schema_id, index, definition) is None:
                await self._compare(schema_id, index, definition, strategy)

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
            raise IncompatibleSchema(
                "the topic has a schema, and takes only producers with one",
                hint="schemaValidationEnforced is set for it",
            )
        return None

    async def for_consumer(
        self, schema_id: str, schema: SchemaData | None, policies: TopicPolicies, *, idle: bool
    ) -> None:
        """Check the schema of a consumer; on an idle topic without one it is registered."""
        if schema is None or not is_schema(schema) or takes_any_schema(schema):
            return
        strategy = policies.schema_strategy
        async with self._turns.of(schema_id):
            index = await self._index(schema_id)
            if index.in_force:
                await self._check_reader(schema_id, index, schema, strategy)
            # As Pulsar's addSchemaIfIdleOrCheckCompatible: a consumer may bring the schema only
            # while nobody can have messages of another one.
            elif idle:
                may_add = policies.schema_updates
                await self._register(schema_id, schema, strategy, may_add=may_add)
            else:
                raise IncompatibleSchema("the topic has messages or users, and no schema")

    async def delete(self, schema_id: str) -> int | None:
        """End the force of every version so far; the version of the deletion, None: no schema."""
        async with self._turns.of(schema_id):
            for _ in range(_REGISTER_ATTEMPTS):
                index = await self._index(schema_id)
                if not index.stored:
                    return None
                # Deleted already: another deletion would say nothing new.
                if not index.in_force:
                    return index.stored[-1].version
                added = await self._add(schema_id, index, None)
                if added is not None:
                    return added
        raise Unavailable(f"schema {schema_id}: lost {_REGISTER_ATTEMPTS} races in a row")

    async def forget(self, schema_id: str) -> None:
        """Remove everything, with the topic that it belonged to or by force."""
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

    async def _register(
        self, schema_id: str, schema: SchemaData, strategy: str, *, may_add: bool
    ) -> int:
        digest, definition = raw_digest(schema), None
        for _ in range(_REGISTER_ATTEMPTS):
            # Looked at again in every attempt: the check must hold against what is in force now
            # (invariant 3).
            index = await self._index(schema_id)
            # Before anything else, and without a look at what it says: invariants 2 and 4.
            known = index.with_bytes(digest)
            if known is not None:
                return known
            if definition is None:
                definition = await self._worked(read(schema))
            known = await self._same(schema_id, index, definition)
            if known is not None:
                return known
            # isAllowAutoUpdateSchema: also the first schema is for administrators to give.
            if not may_add:
                raise IncompatibleSchema(
                    "the topic has no such schema, and takes none from its users",
                    hint="isAllowAutoUpdateSchema is off; upload it with an admin tool",
                )
            await self._compare(schema_id, index, definition, strategy)
            # The next number, only if it is free: of two brokers at once, one stores and the other
            # looks again.
            added = await self._add(schema_id, index, schema)
            if added is not None:
                return added
        raise Unavailable(f"schema {schema_id}: lost {_REGISTER_ATTEMPTS} races in a row")

    async def _same(self, schema_id: str, index: _Index, definition: Definition) -> int | None:
        """The version in force that says what this definition says."""
        pace = SlicePace(_SLICE_VERSIONS)
        for each in index.in_force:
            if each.type != definition.type:
                continue
            if each.meaning is None:
                await pace.after()
                stored = await self._stored_definition(schema_id, each)
                each.meaning = b"" if stored is None else stored.meaning
            if each.meaning == definition.meaning:
                return each.version
        return None

    async def _compare(
        self, schema_id: str, index: _Index, definition: Definition, strategy: str
    ) -> None:
        """Raise IncompatibleSchema unless it may follow those in force."""
        # The first schema of a topic fits by any strategy.
        if strategy == "ALWAYS_COMPATIBLE" or not index.in_force:
            return
        if strategy == "ALWAYS_INCOMPATIBLE":
            raise IncompatibleSchema("the policy of this topic allows no change of its schema")
        effort, pace = Effort(), SlicePace(_SLICE_VERSIONS)
        is_transitive = strategy.endswith("_TRANSITIVE")
        # Newest first: it is the one that most likely differs.
        for each in reversed(index.in_force if is_transitive else index.in_force[-1:]):
            await pace.after()
            found: str | None
            if each.type != definition.type:
                found = (
                    f"the schema of the topic is {type_name(each.type)},"
                    f" not {type_name(definition.type)}"
                )
            elif (old := await self._stored_definition(schema_id, each)) is None:
                found = f"what the topic has is no sound {type_name(each.type)}"
            else:
                found = await self._worked(incompatibility(definition, old, strategy, effort))
            if found is not None:
                raise IncompatibleSchema(f"version {each.version}, by {strategy}: {found}")

    async def _check_reader(
        self, schema_id: str, index: _Index, schema: SchemaData, strategy: str
    ) -> None:
        """Raise IncompatibleSchema unless a consumer with this schema can read the topic."""
        # The newest version reads itself, and passed the strategy's check when it was stored.
        if strategy == "ALWAYS_COMPATIBLE" or index.in_force[-1].digest == raw_digest(schema):
            return
        definition = await self._worked(read(schema))
        if strategy in _READS_LATEST:
            await self._compare(schema_id, index, definition, "BACKWARD")
        # Nothing new is allowed: what there is may be read.
        elif strategy != "ALWAYS_INCOMPATIBLE" or (
            await self._same(schema_id, index, definition) is None
        ):
            await self._compare(schema_id, index, definition, strategy)

    async def _stored_definition(self, schema_id: str, each: _Digest) -> Definition | None:
        """What a version says; None: it is no sound schema, from before that was looked at."""
        found = await self._read(schema_id, [each])
        # It went with its topic, a moment ago, at another broker: the next look will tell.
        if not found:
            return None
        try:
            return await self._worked(read(found[0].as_schema()))
        except InvalidSchema:
            return None

    async def _worked(self, steps: Steps[Result]) -> Result:
        # What ends with its first slice waits for nobody. Of longer work there is one piece at a
        # time: a hundred of them would take a slice each between two turns of others.
        try:
            next(steps)
        except StopIteration as done:
            result: Result = done.value
            return result
        async with self._long_work:
            return await in_slices(steps)

    async def _read(self, schema_id: str, versions: list[_Digest]) -> list[StoredSchema]:
        records = [await self._metadata.get(_key(schema_id, each.version)) for each in versions]
        # One that is not there any more went with its topic, a moment ago, at another broker.
        return [_decoded(schema_id, record) for record in records if record is not None]

    async def _add(self, schema_id: str, index: _Index, schema: SchemaData | None) -> int | None:
        """Store the next version (no schema: a deletion); None: somebody else did."""
        version = len(index.stored)
        # A deletion is always possible.
        if version >= VERSIONS_MAX and schema is not None:
            raise TooManyRequests(
                f"schema {schema_id} has {VERSIONS_MAX} versions already",
                hint="use one of them, or delete the schema with force=true to begin anew",
            )
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


def _decoded(schema_id: str, record: Record) -> StoredSchema:
    try:
        found = msgspec.msgpack.decode(record.value, type=StoredSchema)
    except msgspec.MsgspecError as error:
        raise CorruptMetadata(f"{record.key}: {error}") from error
    if found.schema_id != schema_id:
        raise CorruptMetadata(f"{record.key} holds a schema of {found.schema_id!r}")
    return found
