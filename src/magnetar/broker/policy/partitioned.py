"""Partitioned topics: records that say how many partitions a topic has.

Owns: `PartitionedTopics`. The partitions themselves are ordinary topics, `<name>-partition-<n>`.

Invariants:
1. The number of partitions never shrinks.
2. A name is a partitioned topic or a topic of its own, not both: the caller checks the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from magnetar.broker.policy.records import Directory, PartitionedRecord, partitioned_directory
from magnetar.errors import NotAllowed, TopicNotFound
from magnetar.metadata.api import MetadataStore
from magnetar.model.names import Domain, NamespaceName, TopicName

# Each partition is a topic with records of its own: a larger number is a slip of the pen.
PARTITIONS_MAX: Final = 10_000


class PartitionedTopics:
    """All partitioned topics of one metadata store."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata

    async def get(self, name: TopicName) -> PartitionedRecord | None:
        """None: it is no partitioned topic."""
        # Asked at every lookup: these cannot have a record.
        if name.domain.is_scalable or name.partition is not None:
            return None
        return await self._of(name.namespace).get(_key(name))

    async def names(self, namespace: NamespaceName) -> list[TopicName]:
        """All of a namespace, sorted by domain and name."""
        return [_topic(namespace, key) for key in await self._of(namespace).names()]

    async def create(
        self, name: TopicName, partitions: int, properties: Mapping[str, str] | None = None
    ) -> bool:
        """False: there is one already."""
        if name.domain.is_scalable or name.partition is not None:
            raise NotAllowed(f"{name} cannot be a partitioned topic")
        record = PartitionedRecord(_checked(name, partitions), dict(properties or {}))
        return await self._of(name.namespace).create(_key(name), record)

    async def grow(self, name: TopicName, partitions: int) -> None:
        """More partitions; as many as there are is no change."""
        _checked(name, partitions)

        # Inside the compare-and-set: two that grow at once cannot shrink each other's result.
        def grown(record: PartitionedRecord) -> PartitionedRecord:
            if partitions < record.partitions:
                raise NotAllowed(
                    f"{name} has {record.partitions} partitions and cannot have {partitions}",
                    hint="partitions can only be added",
                )
            return msgspec.structs.replace(record, partitions=partitions)

        if await self._of(name.namespace).change(_key(name), grown) is None:
            raise TopicNotFound(f"{name} is no partitioned topic")

    async def change_properties(
        self, name: TopicName, change: Callable[[dict[str, str]], dict[str, str]]
    ) -> bool:
        """False: it is no partitioned topic."""
        if name.domain.is_scalable or name.partition is not None:
            return False

        def changed(record: PartitionedRecord) -> PartitionedRecord:
            return msgspec.structs.replace(record, properties=change(record.properties))

        return await self._of(name.namespace).change(_key(name), changed) is not None

    async def delete(self, name: TopicName) -> bool:
        """False: there was none."""
        return await self._of(name.namespace).delete(_key(name))

    def _of(self, namespace: NamespaceName) -> Directory[PartitionedRecord]:
        return Directory(self._metadata, partitioned_directory(namespace), PartitionedRecord)


def _key(name: TopicName) -> str:
    # Persistent and non-persistent topics of one name are two topics, in one directory.
    return f"{name.domain.value}/{name.local_name}"


def _topic(namespace: NamespaceName, key: str) -> TopicName:
    domain, _, local_name = key.partition("/")
    return TopicName(Domain(domain), namespace, local_name)


def _checked(name: TopicName, partitions: int) -> int:
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise NotAllowed(f"{name} cannot have {partitions} partitions: 1 to {PARTITIONS_MAX}")
    return partitions
