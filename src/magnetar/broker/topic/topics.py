"""All topics of one broker: loaded once, created by the rules, listed, kept in order.

Owns: `Topics`: the loaded topics, and the records that say which exist. `maintenance` looks after
those that are loaded, `compaction_checks` has them compacted, `policy_changes` has them follow
their policies, `_locks` keeps what is done to one of them apart.

Invariants:
1. A topic is loaded at most once at a time; whoever asks meanwhile waits for that one load.
   Loading, unloading and deleting one topic exclude each other.
2. A persistent topic exists if and only if it has a record: written before its managed ledger
   begins, deleted after that is gone. Loading it creates neither if it must not be created.
3. `x-partition-n` is a partition if `x` is a partitioned topic, and then n is below its count. The
   name of a partitioned topic is no topic itself.
4. `list_changed` of a namespace advances after every change of its list of topics by this broker.
5. Segments of scalable topics are topics that are created explicitly, stand in no list, and are
   deleted only by whoever keeps their scalable topic. No regular topic is created beside a scalable
   one of the same name.
6. A topic is loaded only while this broker owns it: claimed before, released after (`ownership`).
7. While the publish gate is closed no persistent topic has a producer, and none is made; segments
   are, since a layout change that has begun takes next to no space. No send looks at the gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final
from weakref import WeakValueDictionary

import msgspec
from crc32c import crc32c

from magnetar.broker.policy.namespaces import Namespaces
from magnetar.broker.policy.partitioned import PartitionedTopics
from magnetar.broker.policy.paths import scalable_key
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.records import (
    Directory,
    TopicRecord,
    record_name,
    topics_directory,
)
from magnetar.broker.policy.values import AutoTopicCreation
from magnetar.broker.topic.compaction_checks import CompactionChecks
from magnetar.broker.topic.maintenance import TopicMaintenance
from magnetar.broker.topic.nonpersistent import LoadedTopic, NonPersistentTopic
from magnetar.broker.topic.policy_changes import PolicyChanges
from magnetar.broker.topic.quotas import enforce_quotas
from magnetar.broker.topic.topic import Topic, TopicParts
from magnetar.errors import MagnetarError, NotAllowed, ServiceNotReady, TopicNotFound
from magnetar.managed_ledger import managed_ledger
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.names import Domain, NamespaceName, TopicName
from magnetar.runtime.disk_space import PublishGate
from magnetar.runtime.keyed_lock import KeyedLock
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal

# Closing writes cursors and snapshots: thousands at once would only queue behind each other.
CLOSES_AT_ONCE: Final = 64
# Between two of them others have their turn.
_TOPICS_PER_TURN: Final = 100

_LOG: Final = logger(__name__)
_HIDDEN: Final = "__"
_HASH_BYTES: Final = 4


class ListMode(Enum):
    """The kinds of topics that a list shows."""

    PERSISTENT = "persistent"
    NON_PERSISTENT = "non-persistent"
    ALL = "all"


def topics_hash(names: list[str]) -> str:
    """What clients compare to see whether a list of topics changed."""
    # As TopicList.calculateHash of Pulsar's clients: they compare it with their own result.
    return crc32c(",".join(sorted(names)).encode()).to_bytes(_HASH_BYTES, "little").hex()


class Topics(Service):
    """The topics of one broker."""

    def __init__(self, parts: TopicParts, namespaces: Namespaces) -> None:
        super().__init__("topics", stop_seconds=parts.limits.close_seconds)
        self.namespaces = namespaces
        self.partitioned = PartitionedTopics(parts.metadata)
        self._parts = parts
        # Insertion order is load order: `loaded_since` relies on it.
        self._loaded: dict[TopicName, LoadedTopic] = {}
        # By name and by whether it may create: who must not create a topic cannot wait for who may.
        self._loads: dict[tuple[TopicName, bool], asyncio.Task[LoadedTopic]] = {}
        self._locks: KeyedLock[TopicName] = KeyedLock()
        # Held by those who watch: a client may name any namespaces, and they must not add up.
        self._list_changes: WeakValueDictionary[NamespaceName, Signal] = WeakValueDictionary()
        self._policies = PolicyChanges(parts, namespaces, self._loaded)
        self.change_broker = self._policies.change_broker
        self.change_namespace = self._policies.change_namespace
        self.change_topic = self._policies.change_topic
        self.change_topics = self._policies.change_topics
        self.topic_policies = self._policies.topic_policies
        self.namespaces_changed = self._policies.namespaces_changed
        self.loaded_changed = Signal()
        """Advances after a topic was loaded or unloaded."""
        self._loads_done = 0

    async def _start(self) -> None:
        self.spawn(TopicMaintenance(self, self._parts.clock, self._parts.limits).run(), "care")
        checks = CompactionChecks(self._loaded, self._parts.clock, self._parts.limits)
        self.spawn(checks.run(), "compaction")
        self.spawn(self._follow_gate(), "publish gate")

    async def _stop(self) -> None:
        """Unload everything: receipts owed are given, cursors written."""
        leaving = ServiceNotReady("the broker is stopping")
        # A load under way cannot be stopped half-way: it ends, and is closed like the others.
        for load in list(self._loads.values()):
            await asyncio.wait({load})
        problems: list[BaseException] = []
        # Again and again, because a load that was waited for may have added one.
        while self._loaded:
            some = [self._loaded.pop(name) for name in list(self._loaded)[:CLOSES_AT_ONCE]]
            closing = [self._leave(topic, leaving) for topic in some]
            results = await asyncio.gather(*closing, return_exceptions=True)
            problems += [result for result in results if isinstance(result, BaseException)]
            self.loaded_changed.advance()
        if problems:
            raise problems[0]

    async def _leave(self, topic: LoadedTopic, error: MagnetarError) -> None:
        try:
            await topic.close(error)
        # Also after a failure: this process ends, and others must be able to take the topic.
        finally:
            await self._release(topic.name)

    # --- the publish gate

    @property
    def publish_gate(self) -> PublishGate:
        return self._parts.publish_gate

    async def _follow_gate(self) -> None:
        """Close the producers of all topics whenever the gate closes.

        Clients hear why when they open them again, as for a backlog quota: an error to a SEND would
        have some of them reconnect in a loop.
        """
        gate, seen = self.publish_gate, 0
        while True:
            seen = await gate.changed.past(seen)
            for number, topic in enumerate(list(self._loaded.values()), start=1):
                # Open again: who is here by now may have come since.
                if gate.refusal is None:
                    break
                if isinstance(topic, Topic):
                    topic.stop_producers(gate.refusal)
                if number % _TOPICS_PER_TURN == 0:
                    await asyncio.sleep(0)

    # --- loading

    @property
    def loaded(self) -> Mapping[TopicName, LoadedTopic]:
        return MappingProxyType(self._loaded)

    async def check_owned(self, name: TopicName) -> None:
        """ServiceNotReady if another broker serves the topic by now."""
        await self._parts.ownership.claim(name)

    def loaded_since(self, number: int) -> tuple[int, list[LoadedTopic]]:
        """How many topics were loaded so far, and those of them after the first `number`."""
        found = []
        for topic in reversed(self._loaded.values()):
            if topic.load_number <= number:
                break
            found.append(topic)
        return self._loads_done, found

    async def get(self, name: TopicName, *, create: bool = True) -> LoadedTopic:
        """A topic, loaded; created if there is none, `create` is set and the policy allows it."""
        topic = self._loaded.get(name)
        if topic is not None and topic.lost is None and not topic.closing:
            return topic
        if self.stopping:
            raise ServiceNotReady("the broker is stopping")
        # Invariant 1: all who ask while it loads wait for the same task.
        load = self._loads.get((name, create))
        if load is None:
            load = asyncio.create_task(self._load(name, create), name=f"load {name}")
            self._loads[name, create] = load
            load.add_done_callback(lambda done: self._load_ended((name, create), done))
        # A client that hangs up must not stop a load for which others wait.
        return await asyncio.shield(load)

    def _load_ended(self, key: tuple[TopicName, bool], load: asyncio.Task[LoadedTopic]) -> None:
        del self._loads[key]
        if not load.cancelled():
            load.exception()  # whoever waits gets it; if nobody does any more, it is not lost

    async def _load(self, name: TopicName, create: bool) -> LoadedTopic:
        async with self._locks.of(name):
            # Looked at again under the lock: another load, with the other `create`, may have been
            # first.
            topic = self._loaded.get(name)
            if topic is not None:
                if topic.lost is None and not topic.closing:
                    return topic
                # Lost, or closing: its end is waited for, so that never two objects have one
                # ledger.
                await self._unload(topic)
            version = self._policies.version
            namespace = await self.namespaces.policies(name.namespace)
            is_partition = await self._check_partition(name)
            # It has no record: it exists because somebody uses it, if that may create topics.
            if name.domain is Domain.NON_PERSISTENT:
                if not create or not (is_partition or self._creation(namespace)):
                    raise _missing(name)
                await self._parts.ownership.claim(name)
                policies = await self._policies.in_force(name, namespace)
                topic = NonPersistentTopic(name, self._parts, policies)
            else:
                record = await self._record(name, namespace, create, is_partition)
                topic = await self._open(name, record, namespace)
            await self._catch_up(topic, version)
            # Only now can anybody find it: it is recovered, and its subscriptions are there.
            self._loads_done += 1
            topic.load_number = self._loads_done
            self._loaded[name] = topic
            self.loaded_changed.advance()
            if name.domain is Domain.NON_PERSISTENT:
                self._list_changed(name.namespace)
            return topic

    async def _open(self, name: TopicName, record: TopicRecord, namespace: Policies) -> Topic:
        # Invariant 6: before the ledger is opened, which would fence another broker that serves it.
        await self._parts.ownership.claim(name)
        try:
            policies = self._policies.together(name, namespace, record)
            return await Topic.open(name, self._parts, record, policies)
        except BaseException:
            await self._release(name)
            raise

    async def _catch_up(self, topic: LoadedTopic, version: int) -> None:
        """Follow the policies that were changed since: those changes told only loaded topics."""
        try:
            while version != self._policies.version:
                version = self._policies.version
                namespace = await self.namespaces.policies(topic.name.namespace)
                await topic.apply(await self._policies.in_force(topic.name, namespace))
        # Nobody can find it yet, so nobody else would give it back.
        except BaseException:
            await topic.close()
            await self._release(topic.name)
            raise

    async def _release(self, name: TopicName) -> None:
        try:
            await self._parts.ownership.release(name)
        except MagnetarError as error:
            # It stays claimed: this broker still may load it, and its end releases it.
            _LOG.warning("topic-release-failed", topic=str(name), error=str(error))

    async def _check_partition(self, name: TopicName) -> bool:
        """Whether it is a partition; NotAllowed if the name cannot be a topic's."""
        if name.domain is Domain.TOPIC:
            raise NotAllowed(f"{name} is scalable: its segments are topics, it is none itself")
        # `x-partition-3` is an ordinary name unless `x` is partitioned (invariant 3).
        base = await self.partitioned.get(name.without_partition())
        if base is None:
            return False
        if name.partition is None:
            raise NotAllowed(
                f"{name} is partitioned", hint=f"use {name}-partition-0 to -{base.partitions - 1}"
            )
        if name.partition >= base.partitions:
            raise NotAllowed(f"{name}: there are only {base.partitions} partitions")
        return True

    async def _record(
        self, name: TopicName, namespace: Policies, create: bool, is_partition: bool
    ) -> TopicRecord:
        found = await self._records_of(name).get(record_name(name))
        if found is not None:
            return found
        # The record of a partition is made with the partitioned topic; a crash may have lost it.
        may_create = create and name.domain is not Domain.SEGMENT and self._creation(namespace)
        # Partitions need no permission: making the partitioned topic gave it.
        if not is_partition and not may_create:
            raise _missing(name)
        await self._check_not_scalable(name)
        return await self._create_record(name, namespace)

    async def is_migrated(self, name: TopicName) -> bool:
        """Whether it belongs to a scalable topic of its name, or is about to."""
        if name.domain is not Domain.PERSISTENT:
            return False
        return await self._parts.metadata.get(scalable_key(name)) is not None

    async def _check_not_scalable(self, name: TopicName) -> None:
        if await self.is_migrated(name):
            raise NotAllowed(
                f"{name} cannot be created: a scalable topic has its name",
                hint=f"use {name.scalable_topic()}",
            )

    async def _create_record(
        self, name: TopicName, namespace: Policies, properties: Mapping[str, str] | None = None
    ) -> TopicRecord:
        is_segment = name.domain is Domain.SEGMENT
        if not is_segment:
            self.publish_gate.check()
        records = self._records_of(name)
        # Segments do not count: their number is the auto-scale policy's.
        if not is_segment:
            await self._check_topics(name.namespace, namespace, 1)
        record = TopicRecord(self._parts.clock.now_ms(), properties=dict(properties or {}))
        # Before the ledger begins (invariant 2): a crash in between leaves a topic that is empty.
        await records.create(record_name(name), record)
        if not is_segment:
            self._list_changed(name.namespace)
        return record

    # --- which there are

    async def exists(self, name: TopicName) -> bool:
        """Whether there is such a topic; a partitioned one counts as well."""
        if name in self._loaded or await self.partitioned.get(name) is not None:
            return True
        if name.domain not in (Domain.PERSISTENT, Domain.SEGMENT):
            return False
        return await self._records_of(name).get(record_name(name)) is not None

    async def created_ms(self, name: TopicName) -> int | None:
        """When a persistent topic was created; None: there is none."""
        record = await self._records_of(name).get(record_name(name))
        return None if record is None else record.created_ms

    async def properties(self, name: TopicName) -> dict[str, str]:
        """The properties of a topic, partitioned or not."""
        found = await self.partitioned.get(name)
        record = found or await self._records_of(name).get(record_name(name))
        if record is None:
            raise _missing(name)
        return record.properties

    async def change_properties(
        self, name: TopicName, change: Callable[[dict[str, str]], dict[str, str]]
    ) -> None:
        """Change the properties of a topic, partitioned or not."""
        if await self.partitioned.change_properties(name, change):
            return

        def changed(record: TopicRecord) -> TopicRecord:
            return msgspec.structs.replace(record, properties=change(record.properties))

        if await self._records_of(name).change(record_name(name), changed) is None:
            raise _missing(name)

    async def names(self, namespace: NamespaceName, mode: ListMode) -> list[str]:
        """The topics of a namespace, partitions one by one, without those of the broker itself.

        There are none in a namespace that does not exist.
        """
        found: list[str] = []
        if mode is not ListMode.NON_PERSISTENT:
            local_names = await self._records(namespace).names()
            found += [f"persistent://{namespace}/{name}" for name in local_names]
        if mode is not ListMode.PERSISTENT:
            found += [
                str(name)
                for name in self._loaded
                if name.namespace == namespace and name.domain is Domain.NON_PERSISTENT
            ]
        # System topics: clients that consume by pattern must not get them.
        prefix = f"/{namespace}/{_HIDDEN}"
        return sorted(name for name in found if prefix not in name)

    async def segment_names(self, topic: TopicName) -> list[TopicName]:
        """All segments of a scalable topic that have a record, in use or not, by id."""
        wanted = topic.scalable_topic()
        found = await self._segments_in(topic.namespace)
        return sorted(
            (name for name in found if name.scalable_topic() == wanted),
            key=lambda name: name.descriptor.segment_id if name.descriptor else -1,
        )

    async def _segments_in(self, namespace: NamespaceName) -> list[TopicName]:
        names = await self._records(namespace, Domain.SEGMENT).names()
        return [TopicName.parse(f"segment://{namespace}/{name}") for name in names]

    def list_changed(self, namespace: NamespaceName) -> Signal:
        """Advances when topics of a namespace come or go; whoever waits for it keeps it."""
        return self._list_changes.setdefault(namespace, Signal())

    def _list_changed(self, namespace: NamespaceName) -> None:
        signal = self._list_changes.get(namespace)
        if signal is not None:
            signal.advance()

    # --- creating

    async def create(self, name: TopicName, properties: Mapping[str, str] | None = None) -> bool:
        """A topic without partitions, whatever auto-creation says; False: it exists already."""
        namespace = await self.namespaces.policies(name.namespace)
        await self._check_partition(name)
        if name.domain is Domain.NON_PERSISTENT:
            raise NotAllowed(f"{name} exists while it is used; it cannot be created")
        # The lock is that of loading: a load that creates the same topic is over, or comes later.
        async with self._locks.of(name):
            if await self._records_of(name).get(record_name(name)) is not None:
                return False
            await self._check_not_scalable(name)
            await self._create_record(name, namespace, properties)
            return True

    async def partitions(self, name: TopicName, *, create: bool = True) -> int:
        """How many partitions a topic has, 0 for none; what a client asks first.

        A topic that does not exist is created now if it is to be partitioned; if not, it will be
        when it is loaded.
        """
        namespace = await self.namespaces.policies(name.namespace)
        # Three cases: partitioned; a topic or partition that exists; one that its first use
        # creates.
        record = await self.partitioned.get(name)
        if record is not None:
            return record.partitions
        if await self._check_partition(name) or await self.exists(name):
            return 0
        creation = None if name.domain is Domain.SEGMENT else self._creation(namespace)
        if not create or creation is None:
            raise _missing(name)
        # A plain topic: SUBSCRIBE or PRODUCER creates it, so that a lookup alone leaves nothing
        # behind.
        if creation.topic_type != "partitioned" or name.partition is not None:
            return 0
        assert creation.default_num_partitions is not None
        await self.create_partitioned(name, creation.default_num_partitions)
        # Read back: another broker may have made it with another number.
        record = await self.partitioned.get(name)
        return 0 if record is None else record.partitions

    async def create_partitioned(
        self, name: TopicName, partitions: int, properties: Mapping[str, str] | None = None
    ) -> bool:
        """A partitioned topic with its partitions; False: it exists already."""
        namespace = await self.namespaces.policies(name.namespace)
        async with self._locks.of(name):
            if await self.partitioned.get(name) is not None:
                return False
            if await self.exists(name):
                raise NotAllowed(f"{name} exists, and is not partitioned")
            self.publish_gate.check()
            await self._check_not_scalable(name)
            await self._check_topics(name.namespace, namespace, partitions)
            # The record first: partitions that a crash prevents are made when they are loaded.
            if not await self.partitioned.create(name, partitions, properties):
                return False
        await self._create_partitions(name, partitions, namespace)
        return True

    async def grow(self, name: TopicName, partitions: int) -> None:
        """Add partitions; they get every durable subscription of the first one."""
        namespace = await self.namespaces.policies(name.namespace)
        record = await self.partitioned.get(name)
        await self._check_not_scalable(name)
        more = partitions - (0 if record is None else record.partitions)
        await self._check_topics(name.namespace, namespace, more)
        # The number first: a partition that a client asks for early is made when it is loaded.
        await self.partitioned.grow(name, partitions)
        await self._create_partitions(name, partitions, namespace)
        assert record is not None, "grow found it"
        first = await self.get(name.with_partition(0))
        if not isinstance(first, Topic):
            return
        # As Pulsar: a consumer that follows the new partitions misses nothing that is sent there
        # first.
        durable = [each.name for each in first.subscriptions.values() if each.durable]
        for number in range(record.partitions, partitions) if durable else ():
            topic = await self.get(name.with_partition(number))
            for subscription in durable:
                await topic.create_subscription(subscription, EARLIEST)

    async def _create_partitions(
        self, name: TopicName, partitions: int, namespace: Policies
    ) -> None:
        if name.domain is not Domain.PERSISTENT:
            return
        for number in range(partitions):
            partition = name.with_partition(number)
            if not await self.exists(partition):
                await self._create_record(partition, namespace)

    # --- ending

    async def unload(self, name: TopicName) -> None:
        """Close a topic; it is loaded again when somebody asks for it."""
        async with self._locks.of(name):
            topic = self._loaded.get(name)
            if topic is not None:
                await self._unload(topic)

    async def _unload(self, topic: LoadedTopic) -> None:
        try:
            await topic.close()
        except MagnetarError as error:
            # What it could not finish, the next load recovers.
            _LOG.warning("topic-unload-failed", topic=str(topic.name), error=str(error))
        # Whatever happened, this object is never used again.
        finally:
            self._loaded.pop(topic.name, None)
            self.loaded_changed.advance()
        await self._release(topic.name)

    async def delete(self, name: TopicName, *, force: bool = False) -> None:
        """Remove a topic with its data; refused while it is used unless `force`."""
        # Loaded to be deleted: only the owner of a topic may, and its ledger knows what belongs to
        # it.
        topic = await self.get(name, create=False)
        async with self._locks.of(name):
            # Unloaded, or loaded anew, while the lock was waited for.
            if self._loaded.get(name) is not topic:
                raise ServiceNotReady(f"{name} is being loaded or unloaded")
            await topic.delete(force=force)
            self._loaded.pop(name, None)
            self.loaded_changed.advance()
            if isinstance(topic, Topic):
                # Last (invariant 2): as long as it is there, a deletion that stopped half-way can
                # be repeated.
                await self._records_of(name).delete(record_name(name))
            await self._release(name)
        if name.domain is Domain.SEGMENT:
            return  # the schema is that of the scalable topic, and lists do not have it
        # Partitions share one schema, which goes with the partitioned topic.
        if name.partition is None and isinstance(topic, Topic):
            await self._parts.schemas.forget(name.schema_id)
        self._list_changed(name.namespace)

    async def forget_partitions(self, name: TopicName) -> None:
        """A partitioned topic was migrated, and the last of its partitions is gone."""
        if await self.partitioned.delete(name):
            self._list_changed(name.namespace)

    async def rescan(self, name: TopicName) -> None:
        """Have a topic finish with transactions that ended; it is loaded if need be."""
        topic = await self.get(name, create=False)
        if isinstance(topic, Topic):
            await topic.rescan()

    async def forget_schema(self, name: TopicName) -> None:
        """Forget the schema of a scalable topic, which its segments share."""
        await self._parts.schemas.forget(name.schema_id)

    async def delete_partitioned(self, name: TopicName, *, force: bool = False) -> None:
        """Remove a partitioned topic with all its partitions."""
        record = await self.partitioned.get(name)
        if record is None:
            raise TopicNotFound(f"{name} is no partitioned topic")
        partitions = [name.with_partition(number) for number in range(record.partitions)]
        # Looked at before the first one goes: half a partitioned topic would help nobody.
        used = [each for each in partitions if each in self._loaded and self._loaded[each].in_use]
        if used and not force:
            raise NotAllowed(f"{used[0]} has producers or consumers", hint="close them first")
        for partition in partitions:
            if await self.exists(partition):
                await self.delete(partition, force=force)
        await self.partitioned.delete(name)
        await self._parts.schemas.forget(name.schema_id)
        self._list_changed(name.namespace)

    async def delete_namespace(self, namespace: NamespaceName, *, force: bool = False) -> bool:
        """Remove a namespace; with `force`, all its topics too. False: there was none."""
        if not await self.namespaces.exists(namespace):
            return False
        records = self._records(namespace)
        names = [TopicName(Domain.PERSISTENT, namespace, name) for name in await records.names()]
        names += [
            name
            for name in self._loaded
            if name.namespace == namespace and name.domain is Domain.NON_PERSISTENT
        ]
        names += await self._segments_in(namespace)
        partitioned = await self.partitioned.names(namespace)
        if (names or partitioned) and not force:
            raise NotAllowed(f"namespace {namespace} has topics", hint="delete them first")
        # Partitioned ones first: their partitions are among the others, and gone by then.
        for name in partitioned:
            await self.delete_partitioned(name, force=True)
        for name in names:
            if await self.exists(name):
                await self.delete(name, force=True)
        return await self.namespaces.delete(namespace)

    # --- storage

    async def enforce_quotas(self) -> None:
        """Look at the backlogs of all loaded topics now."""
        await enforce_quotas([each for each in self._loaded.values() if isinstance(each, Topic)])

    async def stored(self, name: TopicName) -> tuple[tuple[LedgerSpan, ...], bool]:
        """The ledgers of a topic that is not loaded, and whether it takes no more messages."""
        return await managed_ledger.stored(name.managed_ledger_name, self._parts.metadata)

    # --- parts

    async def _check_topics(self, name: NamespaceName, policies: Policies, more: int) -> None:
        """NotAllowed if a namespace would have too many topics; partitions count one by one."""
        own, broker = policies.max_topics_per_namespace, self.namespaces.broker
        limit = (broker.max_topics_per_namespace or 0) if own is None else own
        if limit and more > 0 and len(await self._records(name).names()) + more > limit:
            raise NotAllowed(
                f"namespace {name} would have more than {limit} topics, its limit",
                hint="delete some, or raise maxTopicsPerNamespace",
            )

    def _creation(self, namespace: Policies) -> AutoTopicCreation | None:
        """How topics are created when somebody asks for them; None: they are not."""
        broker = self.namespaces.broker.auto_topic_creation
        creation = namespace.auto_topic_creation or broker or AutoTopicCreation()
        return creation if creation.allow_auto_topic_creation else None

    def _records(
        self, namespace: NamespaceName, domain: Domain = Domain.PERSISTENT
    ) -> Directory[TopicRecord]:
        return Directory(self._parts.metadata, topics_directory(namespace, domain), TopicRecord)

    def _records_of(self, name: TopicName) -> Directory[TopicRecord]:
        """Where the record of this topic is."""
        return self._records(name.namespace, name.domain)


def _missing(name: TopicName) -> TopicNotFound:
    return TopicNotFound(f"{name} does not exist")
