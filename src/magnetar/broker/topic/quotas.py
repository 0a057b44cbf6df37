"""The backlog quotas of one topic: producers are held, or the oldest messages let go.

Owns: `TopicQuotas`; `refusal`, what producers hear; and `enforce_quotas`, one look at all topics
that are given.

Invariants:
1. Nothing is refused at SEND, and nothing is looked at without a quota.
2. The backlog is that of the durable subscription that is furthest behind; without one there is
   none. What is let go goes for all of them, and nothing above the maxReadPosition. The position
   of the topic's compaction is not one of them.
3. A topic whose look fails holds no other up.
4. A segment of a scalable topic has no quota of its own: whoever keeps the whole topic asks it for
   its backlog, and has it let go.

Relies on: `quota_rules`, where it is decided; clients, which come back after CLOSE_PRODUCER, and
with what the code of the refusal tells them: hold their messages (7), or fail them (8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from magnetar.broker.entries import publish_time_of
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic import quota_rules
from magnetar.broker.topic.quota_rules import KEPT, Exceeded, bytes_from
from magnetar.errors import BacklogFull, BacklogHeld, MagnetarError, RequestError
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.model.ids import Position
from magnetar.model.names import Domain, TopicName
from magnetar.model.subscriptions import COMPACTION
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import EVICTED_ENTRIES
from magnetar.runtime.slices import SlicePace

_LOG: Final = logger(__name__)


class Oldest(NamedTuple):
    """The oldest message of the backlog, as it was found last."""

    subscription: str
    position: Position
    published_ms: int


class Backlog(NamedTuple):
    """The backlog of the durable subscription that is furthest behind."""

    size_bytes: int
    oldest: Oldest | None
    """None: there is nothing, or nobody asked."""


NO_BACKLOG: Final = Backlog(0, None)


class QuotaTopic(Protocol):
    """The part of a topic that its quotas need."""

    @property
    def name(self) -> TopicName: ...

    @property
    def ledger(self) -> ManagedLedger: ...

    @property
    def policies(self) -> TopicPolicies: ...

    @property
    def subscriptions(self) -> Mapping[str, Subscription]: ...

    def stop_producers(self, error: MagnetarError) -> None:
        """Take no more messages from those who are here."""
        ...


class TopicQuotas:
    """See the module."""

    def __init__(self, topic: QuotaTopic, clock: Clock) -> None:
        self._topic = topic
        self._clock = clock
        self._oldest: Oldest | None = None

    def oldest(self) -> tuple[int, str | None]:
        """Age in seconds and subscription of the oldest message, as far as a quota asks; or -1."""
        found = self._oldest
        slowest = self._slowest()
        # Looked for from time to time alone: by now it may be acknowledged.
        if found is None or slowest is None or slowest.first_unacked() > found.position:
            return -1, None
        age = quota_rules.age_seconds(found.published_ms, self._clock.now_ms())
        return int(age), found.subscription

    async def check(self) -> None:
        """Raise if no producer may come now."""
        found = await self._exceeded()
        if found is not None and found.policy != "consumer_backlog_eviction":
            raise refusal(self._topic.name, found)

    async def enforce(self) -> None:
        """Do what the policy says if a quota is used up."""
        found = await self._exceeded()
        if found is None:
            return
        if found.policy != "consumer_backlog_eviction":
            self._topic.stop_producers(refusal(self._topic.name, found))
        elif found.kind == "size":
            self.evict(int(KEPT * found.limit))
        else:
            await self.evict_older(KEPT * found.limit)

    async def backlog(self, *, with_age: bool) -> Backlog:
        """What stands behind the slowest durable subscription; its first message if asked for."""
        slowest = self._slowest()
        if slowest is None:
            return NO_BACKLOG
        first = slowest.first_unacked()
        oldest = await self._find_oldest(slowest, first) if with_age else None
        return Backlog(bytes_from(self._topic.ledger.ledger_spans, first), oldest)

    def evict(self, room: int) -> None:
        """Have every durable subscription pass over all but the last so many bytes."""
        through = quota_rules.evicted_through(self._topic.ledger.ledger_spans, room)
        if through is None:
            return
        for subscription in self._durable():
            before = subscription.backlog()
            if through > subscription.cursor.mark_delete:
                subscription.expire_through(through)
            EVICTED_ENTRIES.inc(before - subscription.backlog())

    async def evict_older(self, seconds: float) -> None:
        """Have every durable subscription pass over what is older."""
        for subscription in self._durable():
            before = subscription.backlog()
            await subscription.expire(seconds)
            EVICTED_ENTRIES.inc(max(before - subscription.backlog(), 0))

    async def _exceeded(self) -> Exceeded | None:
        # Invariants 1 and 4.
        policies = self._topic.policies
        is_segment = self._topic.name.domain is Domain.SEGMENT
        if is_segment or not quota_rules.has_quota(policies):
            self._oldest = None
            return None
        found = await self.backlog(with_age=quota_rules.has_age_quota(policies))
        published_ms = None if found.oldest is None else found.oldest.published_ms
        age = quota_rules.age_seconds(published_ms, self._clock.now_ms())
        return quota_rules.exceeded(self._topic.policies, found.size_bytes, age)

    async def _find_oldest(self, slowest: Subscription, first: Position) -> Oldest | None:
        # One read for as long as the oldest message stays the same.
        if self._oldest is None or self._oldest[:2] != (slowest.name, first):
            self._oldest = None
            entries = await self._topic.ledger.read(first, 1)
            if not entries:
                return None
            published_ms = publish_time_of(entries[0].payload)
            self._oldest = Oldest(slowest.name, first, published_ms)
        return self._oldest

    def _durable(self) -> list[Subscription]:
        # What waits to be compacted is nobody's backlog, and must not be let go.
        return [
            each
            for each in self._topic.subscriptions.values()
            if each.durable and each.name != COMPACTION
        ]

    def _slowest(self) -> Subscription | None:
        return min(self._durable(), key=lambda each: each.first_unacked(), default=None)


def refusal(name: TopicName, found: Exceeded) -> RequestError:
    """The error for producers of a topic whose quota is used up."""
    unit = "bytes" if found.kind == "size" else "seconds"
    text = f"{name}: the backlog has reached its quota of {found.limit} {unit}"
    held = found.policy == "producer_request_hold"
    return BacklogHeld(text) if held else BacklogFull(text)


class _Quoted(QuotaTopic, Protocol):
    quotas: TopicQuotas

    @property
    def closing(self) -> bool: ...

    @property
    def lost(self) -> MagnetarError | None: ...


async def enforce_quotas(topics: Iterable[_Quoted]) -> None:
    """Look at all of them now."""
    pace = SlicePace()
    for topic in topics:
        try:
            # Asked for each: it may have been closed during those before.
            if not topic.closing and topic.lost is None:
                await topic.quotas.enforce()
        except MagnetarError as error:
            _LOG.warning("quota-check-failed", topic=str(topic.name), error=str(error))
        await pace.after()
