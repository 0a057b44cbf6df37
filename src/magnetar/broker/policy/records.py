"""Named JSON records in the metadata store: tenants, namespaces, topics and the like.

Owns: where each kind stands, `Directory`, which reads and changes the records of one kind, and the
records of topics.

Invariants:
1. A record holds its full name: keys of long names are cut and hashed.
2. Every change is a compare-and-set of the whole record.
3. What cannot be decoded raises `CorruptMetadata` and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Final, Generic, TypeVar

import msgspec

from magnetar.errors import BadVersion, CorruptMetadata
from magnetar.managed_ledger.names import encode_name
from magnetar.metadata.api import ABSENT, MetadataStore, Record
from magnetar.metadata.recipes import Content, cas_update
from magnetar.model.names import Domain, NamespaceName, TopicName

# On disk in every installation: none of these paths may change.
TENANTS: Final = "/broker/tenants"
CLUSTERS: Final = "/broker/clusters"
PRODUCER_NAMES: Final = "/broker/producer-names"
BROKER_CONFIGURATION: Final = "/broker/configuration"

_NAMESPACES: Final = "/broker/namespaces"
_TOPICS: Final = "/broker/topics"
_SEGMENTS: Final = "/broker/segments"
_PARTITIONED: Final = "/broker/partitioned"
_SCHEMAS: Final = "/broker/schemas"
_DEDUP: Final = "/broker/dedup"

Body = TypeVar("Body", bound=msgspec.Struct)


def namespaces_directory(tenant: str) -> str:
    return f"{_NAMESPACES}/{encode_name(tenant)}"


def topics_directory(namespace: NamespaceName, domain: Domain = Domain.PERSISTENT) -> str:
    """Segments of scalable topics stand apart: they are in no list of topics."""
    parent = _SEGMENTS if domain is Domain.SEGMENT else _TOPICS
    return f"{parent}/{encode_name(str(namespace))}"


def partitioned_directory(namespace: NamespaceName) -> str:
    return f"{_PARTITIONED}/{encode_name(str(namespace))}"


def schemas_directory(schema_id: str) -> str:
    return f"{_SCHEMAS}/{encode_name(schema_id)}"


def record_name(topic: TopicName) -> str:
    """The name of a topic's record within its namespace."""
    return str(topic).removeprefix(f"{topic.domain.value}://{topic.namespace}/")


def dedup_key(topic: TopicName) -> str:
    return f"{_DEDUP}/{encode_name(str(topic))}"


class TopicRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a persistent topic: that it exists, and what it remembers."""

    created_ms: int
    epoch: int | None = None
    """Counts the producers that had the topic for themselves."""
    properties: dict[str, str] = {}
    policies: dict[str, object] = {}
    """What overrides its namespace's policies, in their form."""


class PartitionedRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a partitioned topic; its partitions are topics of their own."""

    partitions: int
    properties: dict[str, str] = {}


# Invariant 1: the key alone cannot give a long name back.
class _Envelope(msgspec.Struct, frozen=True):
    name: str
    body: msgspec.Raw


class Directory(Generic[Body]):
    """The records of one kind."""

    def __init__(self, metadata: MetadataStore, parent: str, kind: type[Body]) -> None:
        self._metadata = metadata
        self._parent = parent
        self._kind = kind

    async def get(self, name: str) -> Body | None:
        record = await self._metadata.get(self._key(name))
        return None if record is None else self._decode(name, record)

    async def names(self) -> list[str]:
        """All names, sorted."""
        # Closed here even if a record is damaged: else the collector would close the scan, at any
        # time.
        async with aclosing(self._metadata.scan(self._parent)) as records:
            return sorted([_opened(record).name async for record in records])

    async def create(self, name: str, body: Body) -> bool:
        """False: there is one already."""
        try:
            await self._metadata.put(self._key(name), _closed(name, body), expected=ABSENT)
        except BadVersion:
            return False
        return True

    async def change(self, name: str, change: Callable[[Body], Body]) -> Body | None:
        """Replace a record by what `change` makes of it; None: there is none."""

        def changed(present: Record | None) -> Content | None:
            # Deleted meanwhile: a change does not bring it back.
            if present is None:
                return None
            body = self._decode(name, present)
            after = change(body)
            # Nothing changed, nothing written: no sync, and watchers are not woken.
            return None if after == body else Content(_closed(name, after))

        record = await cas_update(self._metadata, self._key(name), changed)
        return None if record is None else self._decode(name, record)

    async def delete(self, name: str) -> bool:
        """False: there was none."""
        return await self._metadata.delete(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self._parent}/{encode_name(name)}"

    def _decode(self, name: str, record: Record) -> Body:
        envelope = _opened(record)
        # Two long names with one hash: refused, rather than one topic's record taken for another's.
        if envelope.name != name:
            raise CorruptMetadata(f"{record.key} holds {envelope.name!r}, not {name!r}")
        try:
            return msgspec.json.decode(envelope.body, type=self._kind)
        except msgspec.MsgspecError as error:
            raise CorruptMetadata(f"{record.key}: {error}") from error


def _opened(record: Record) -> _Envelope:
    try:
        return msgspec.json.decode(record.value, type=_Envelope)
    except msgspec.MsgspecError as error:
        raise CorruptMetadata(f"{record.key}: {error}") from error


def _closed(name: str, body: msgspec.Struct) -> bytes:
    return msgspec.json.encode(_Envelope(name, msgspec.Raw(msgspec.json.encode(body))))
