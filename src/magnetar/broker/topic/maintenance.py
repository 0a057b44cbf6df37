"""Periodic maintenance of loaded topics: quotas, expiry, retention, unused ones, lost ones.

Owns: `TopicMaintenance`, one loop over all of them.

Invariants:
1. A topic whose care fails holds no other up; it is looked at again next time.
2. Unused is what nobody has produced to or consumed from for as long as its policy says, and what
   no transaction holds. Segments are never deleted here, and sealed ones are kept as a whole: so
   are partitions of a regular topic that was migrated.
3. Messages older than their time to live are acknowledged on every subscription, those of segments
   too, but not above the maxReadPosition. A durable subscription that nobody uses is deleted with
   its backlog when its policy says so; one of a scalable topic belongs to its controller. What is
   for compaction is spared by both, and readers of the compacted view by the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from magnetar.broker.topic.nonpersistent import LoadedTopic, NonPersistentTopic
from magnetar.broker.topic.quotas import enforce_quotas
from magnetar.broker.topic.topic import Topic
from magnetar.errors import MagnetarError
from magnetar.model.names import Domain, TopicName
from magnetar.model.subscriptions import COMPACTION
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import EXPIRED_SUBSCRIPTIONS
from magnetar.runtime.slices import SlicePace

CARE_SECONDS: Final = 60.0
"""Between two looks at every topic for quotas, retention and disuse."""

_SECONDS_PER_MINUTE: Final = 60.0

_LOG: Final = logger(__name__)


class CaredFor(Protocol):
    """The topics of the broker."""

    @property
    def loaded(self) -> Mapping[TopicName, LoadedTopic]: ...

    async def unload(self, name: TopicName) -> None: ...

    async def delete(self, name: TopicName) -> None: ...

    async def is_migrated(self, name: TopicName) -> bool:
        """Whether it belongs to a scalable topic of its name."""
        ...


class TopicMaintenance:
    """The periodic work on the topics of one broker."""

    def __init__(self, topics: CaredFor, clock: Clock, limits: Limits) -> None:
        self._topics = topics
        self._clock = clock
        self._expiry_seconds = limits.expiry_check_seconds
        self._expiry_at = clock.monotonic() + self._expiry_seconds

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._clock.sleep(CARE_SECONDS)
            expires = self._clock.monotonic() >= self._expiry_at
            if expires:
                self._expiry_at = self._clock.monotonic() + self._expiry_seconds
            loaded = self._topics.loaded.values()
            await enforce_quotas([each for each in loaded if isinstance(each, Topic)])
            # A list: topics come and go while one of them is looked after. Mostly there is nothing
            # to do, so nothing is awaited: others get a turn all the same.
            pace = SlicePace()
            for topic in list(self._topics.loaded.values()):
                await pace.after(1 + len(topic.subscriptions))
                try:
                    if expires and isinstance(topic, Topic):
                        await self._expire(topic)
                    await self._care_for(topic)
                except MagnetarError as error:
                    _LOG.warning("topic-care-failed", topic=str(topic.name), error=str(error))

    async def _expire(self, topic: Topic) -> None:
        """Let go what is too old, and who has been away for too long (invariant 3)."""
        pace = SlicePace()
        for name, subscription in list(topic.subscriptions.items()):
            await pace.after()
            # Asked for each: the policy may change, or the topic close, during those before.
            policies = topic.policies
            if topic.closing or topic.lost is not None:
                return
            if name == COMPACTION:
                continue
            # A reader of the compacted view holds nothing back, and what it has not come to yet is
            # in the view whatever its age.
            is_table = not subscription.durable and subscription.reads_compacted
            if policies.message_ttl_seconds and not is_table:
                await subscription.expire(policies.message_ttl_seconds)
            minutes = policies.subscription_expiration_minutes
            if not minutes or topic.name.domain is Domain.SEGMENT or not subscription.durable:
                continue
            is_due = subscription.unused_seconds() >= minutes * _SECONDS_PER_MINUTE
            if is_due and not await self._topics.is_migrated(topic.name):
                await topic.delete_subscription(name)
                EXPIRED_SUBSCRIPTIONS.inc()
                _LOG.info("subscription-expired", topic=str(topic.name), subscription=name)

    async def _care_for(self, topic: LoadedTopic) -> None:
        # Somebody unloads or deletes it already.
        if topic.closing:
            return
        # Its clients were told to look it up: loading it anew begins with this.
        if topic.lost is not None:
            await self._topics.unload(topic.name)
        elif self._is_disused(topic):
            if not await self._topics.is_migrated(topic.name):
                await self._topics.delete(topic.name)
        # A sealed segment is kept, and goes, as a whole. Few other topics are terminated: only for
        # these it is looked up whether they are one.
        elif not topic.terminated or not await self._is_sealed_segment(topic.name):
            await topic.trim()

    async def _is_sealed_segment(self, name: TopicName) -> bool:
        return name.domain is Domain.SEGMENT or await self._topics.is_migrated(name)

    def _is_disused(self, topic: LoadedTopic) -> bool:
        now = self._clock.monotonic()
        # Noted here as well, because producers and consumers that stay for days tell nobody.
        if topic.in_use:
            topic.used_at = now
            return False
        idle = now - topic.used_at
        if isinstance(topic, NonPersistentTopic):
            return idle >= CARE_SECONDS  # nothing is lost with it
        # A segment goes with its layout; and an undecided transaction still has to end here.
        if topic.name.domain is Domain.SEGMENT or topic.undecided:
            return False
        policy = topic.policies.inactive
        if not policy.delete_while_inactive or idle < policy.max_inactive_duration_seconds:
            return False
        # Pulsar's two modes; a subscription that has acknowledged all may still be somebody's
        # position.
        if policy.inactive_topic_delete_mode == "delete_when_no_subscriptions":
            return not topic.subscriptions
        return all(each.backlog() == 0 for each in topic.subscriptions.values())
