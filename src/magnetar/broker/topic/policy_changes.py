"""Changes of policies, at each of their levels: stored, and followed by the topics that are loaded.

Owns: `PolicyChanges`, the only place that changes what a namespace, a topic or the broker sets.

Invariants:
1. Changes that concern one topic reach it in the order in which they were stored: those of one
   namespace, its topics' own among them, come one after the other, and so do the broker's.
2. When a change is answered, every topic that is loaded here follows it. One that is being loaded
   meanwhile sees by `version` that it has to look again before anybody gets it.
3. A topic that cannot follow holds no other up; one that is about to end reads the policies anew
   when it is loaded again.
4. A change reads one record of each topic, and leaves the loop after every few topics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from magnetar.broker.policy.effective import TopicPolicies, effective
from magnetar.broker.policy.namespaces import Namespaces
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.records import Directory, TopicRecord, record_name, topics_directory
from magnetar.broker.topic.nonpersistent import LoadedTopic
from magnetar.broker.topic.topic import TopicParts
from magnetar.errors import MagnetarError, TopicNotFound
from magnetar.model.names import Domain, NamespaceName, TopicName
from magnetar.runtime.keyed_lock import KeyedLock
from magnetar.runtime.signal import Signal
from magnetar.runtime.slices import SLICE_ITEMS, SlicePace

FOLLOW_ITEMS: Final = SLICE_ITEMS // 25
"""A topic that follows counts as so many items of work: 25 of them take about 1 ms."""

_WRITES_AT_ONCE: Final = 64


_Known: TypeAlias = dict[tuple[bool, bytes], TopicPolicies]
"""What holds for the topics of one namespace, by what they override; one change long."""


class PolicyChanges:
    """The policies of each level, and the loaded topics that follow them."""

    def __init__(
        self,
        parts: TopicParts,
        namespaces: Namespaces,
        loaded: Mapping[TopicName, LoadedTopic],
    ) -> None:
        self.version = 0
        """Advances with every change, before loaded topics are told."""
        self.namespaces_changed = Signal()
        """Advances after a namespace's policies were changed, for those above topics."""
        self._parts = parts
        self._namespaces = namespaces
        self._loaded = loaded
        self._turns: KeyedLock[NamespaceName] = KeyedLock()
        self._broker_turn = asyncio.Lock()

    # --- changes

    async def change_broker(self, policies: Policies) -> None:
        """Other policies of the broker itself; all loaded topics follow."""
        async with self._broker_turn:
            self._namespaces.broker = policies
            self.version += 1
            for namespace in await self._served():
                async with self._turns.of(namespace):
                    await self._follow(namespace, await self._namespaces.policies(namespace))

    async def change_namespace(
        self, namespace: NamespaceName, change: Callable[[Policies], Policies]
    ) -> None:
        """Change a namespace's policies; its loaded topics follow."""
        async with self._turns.of(namespace):
            policies = await self._namespaces.change(namespace, change)
            self.namespaces_changed.advance()
            await self._follow(namespace, policies)

    async def change_topic(self, name: TopicName, change: Callable[[Policies], Policies]) -> None:
        """Change what a topic overrides of its namespace's policies."""
        await self.change_topics([name], change)

    async def change_topics(
        self, names: Sequence[TopicName], change: Callable[[Policies], Policies]
    ) -> None:
        """Change what topics of one namespace override: the partitions of a topic, say."""
        async with self._turns.of(names[0].namespace):
            for at in range(0, len(names), _WRITES_AT_ONCE):
                # Together, for one sync; all are over before the next change may begin.
                changes = [self._change(name, change) for name in names[at : at + _WRITES_AT_ONCE]]
                results = await asyncio.gather(*changes, return_exceptions=True)
                problems = [each for each in results if isinstance(each, BaseException)]
                if problems:
                    raise problems[0]

    async def _change(self, name: TopicName, change: Callable[[Policies], Policies]) -> None:
        def changed(record: TopicRecord) -> TopicRecord:
            own = msgspec.to_builtins(change(_policies_of(record)))
            # Only what differs from "not set" is stored: fields that come later keep their
            # defaults.
            given = {key: value for key, value in own.items() if value != _UNSET[key]}
            return msgspec.structs.replace(record, policies=given)

        if await self._records(name).change(record_name(name), changed) is None:
            raise _missing(name)
        self.version += 1
        topic = self._loaded.get(name)
        if topic is not None and not _ends(topic):
            namespace = await self._namespaces.policies(name.namespace)
            await topic.apply(await self.in_force(name, namespace))

    async def _served(self) -> set[NamespaceName]:
        pace, found = SlicePace(), set()
        for name in list(self._loaded):
            found.add(name.namespace)
            await pace.after()
        return found

    async def _follow(self, namespace: NamespaceName, policies: Policies) -> None:
        self.version += 1
        problems: list[MagnetarError] = []
        pace, known = SlicePace(), dict[tuple[bool, bytes], TopicPolicies]()
        # A list: topics come and go in the pauses. Who comes after it was made has seen `version`.
        for name in list(self._loaded):
            await pace.after()
            if name.namespace == namespace:
                try:
                    await self._tell(name, policies, known)
                except MagnetarError as error:
                    problems.append(error)
                await pace.after(FOLLOW_ITEMS)
        # The first of them tells what is wrong; the others have followed (invariant 3).
        if problems:
            raise problems[0]

    async def _tell(self, name: TopicName, policies: Policies, known: _Known) -> None:
        held = await self.in_force(name, policies, known)
        # Looked up after the read: it may have been unloaded, and loaded anew, in between.
        topic = self._loaded.get(name)
        if topic is None or _ends(topic):
            return
        try:
            await topic.apply(held)
        except MagnetarError:
            # It began to end while it followed (invariant 3).
            if not _ends(topic):
                raise

    # --- what is set, and what holds

    async def topic_policies(self, name: TopicName) -> Policies:
        """What a topic overrides."""
        record = await self._records(name).get(record_name(name))
        if record is None:
            raise _missing(name)
        return _policies_of(record)

    async def in_force(
        self, name: TopicName, namespace: Policies, known: _Known | None = None
    ) -> TopicPolicies:
        """What holds for a topic, given what its namespace sets."""
        # It has no record, so nothing of its own.
        if name.domain is Domain.NON_PERSISTENT:
            return effective(namespace, None, self._namespaces.broker)
        record = await self._records(name).get(record_name(name))
        if known is None or record is None:
            return self.together(name, namespace, record)
        # Most topics set nothing of their own, or what their fellows set.
        key = (name.domain is Domain.SEGMENT, msgspec.json.encode(record.policies))
        if key not in known:
            known[key] = self.together(name, namespace, record)
        return known[key]

    def together(
        self, name: TopicName, namespace: Policies, record: TopicRecord | None
    ) -> TopicPolicies:
        """What holds for a topic with this record."""
        return effective(
            namespace,
            None if record is None else _policies_of(record),
            self._namespaces.broker,
            is_segment=name.domain is Domain.SEGMENT,
            segment_retention=self._parts.segment_retention,
        )

    def _records(self, name: TopicName) -> Directory[TopicRecord]:
        directory = topics_directory(name.namespace, name.domain)
        return Directory(self._parts.metadata, directory, TopicRecord)


def _policies_of(record: TopicRecord) -> Policies:
    return msgspec.convert(record.policies, Policies) if record.policies else _NOTHING


def _ends(topic: LoadedTopic) -> bool:
    return topic.closing or topic.lost is not None


def _missing(name: TopicName) -> TopicNotFound:
    return TopicNotFound(f"{name} does not exist")


_NOTHING: Final = Policies()
_UNSET: Final = msgspec.to_builtins(_NOTHING)
