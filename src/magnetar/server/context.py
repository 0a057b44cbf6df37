"""The context that the sessions of one server share.

Owns: `Context`: the broker below, the settings, who is connected, and the tasks by which sessions
end (they outlive their connections); and the addresses that clients are given: `broker_urls` of
this broker, `lookup_urls` of whoever has a topic. The topic by which v4 clients find transaction
coordinators is there without being stored; its partitions are where the coordinators are.

Invariants:
1. `sessions` holds every session from its connection until it has left all its topics.
2. No more than `connections_max` sessions are admitted at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, KeysView
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, cast

from magnetar.broker.policy.schemas import Schemas
from magnetar.broker.topic.topics import Topics
from magnetar.errors import (
    MagnetarError,
    NotAllowed,
    ServiceNotReady,
    TopicNotFound,
    TopicTerminated,
)
from magnetar.model.names import Domain, TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import CONNECTIONS, CONNECTIONS_OPENED
from magnetar.scalable.service import ScalableTopics
from magnetar.server.authority import Authority
from magnetar.server.config import ServerConfig
from magnetar.server.outbound import WriteTurn
from magnetar.server.publish_throttle import FrameBudget, PublishThrottle, ReadTurn, WriteQueue
from magnetar.txn.coordinator.coordinators import Coordinators
from magnetar.txn.coordinator_partitions import PARTITIONS

if TYPE_CHECKING:
    from magnetar.server.session import Session

_log = logger(__name__)

ASSIGN_TOPIC: Final = TopicName.parse("persistent://pulsar/system/transaction_coordinator_assign")
"""Clients ask how many partitions it has, and which broker has each; nothing is published to it."""

_ANY_HOST: Final = frozenset({"0.0.0.0", "::"})
"""A server that listens on every address of its machine does not know by which it is reached."""


class BrokerUrls(NamedTuple):
    """The addresses at which a broker is reached."""

    plain: str
    tls: str | None
    """None: it takes no encrypted connections."""


class TopicOwners(Protocol):
    """The knowledge which of several brokers has a topic."""

    async def owner_url(self, name: TopicName) -> str: ...


class NotEnabled:
    """A part that this server does not have: whatever is asked of it is refused.

    It stands where the part would, so that handlers take the part without asking first.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> NoReturn:
        raise self.refusal()

    def refusal(self) -> NotAllowed:
        return NotAllowed(f"{self._what} not enabled on this server")


class Context:
    """One per server."""

    def __init__(
        self,
        config: ServerConfig,
        topics: Topics,
        schemas: Schemas,
        clock: Clock,
        authority: Authority,
        service_url: str,
        queue: WriteQueue,
        scalable: ScalableTopics | None = None,
        owners: TopicOwners | None = None,
        coordinators: Coordinators | None = None,
    ) -> None:
        self.config = config
        self.limits = config.limits
        self.topics = topics
        self.schemas = schemas
        self.clock = clock
        self.authority = authority
        # A dict for its order: the oldest come first when a server drains them.
        self._sessions: dict[Session, None] = {}
        self.service_url = service_url
        """What lookups answer."""
        self.has_scalable = scalable is not None
        """Whether scalable topics are switched on."""
        self.scalable = scalable or cast("ScalableTopics", NotEnabled("scalable topics are"))
        self.has_transactions = coordinators is not None
        self.coordinators = coordinators or cast("Coordinators", NotEnabled("transactions are"))
        self._owners = owners
        self.publish_throttle = PublishThrottle(queue, config.limits, self._judge_publishers)
        self.frames = FrameBudget(config.limits)
        self.read_turn = ReadTurn()
        self.write_turn = WriteTurn()
        # Kept here because the loop keeps only weak references, and nobody else waits for them.
        self._endings: set[asyncio.Task[None]] = set()

    def explained(self, name: TopicName, error: MagnetarError) -> MagnetarError:
        """The refusal of a regular topic, which names the scalable one that has taken its place."""
        if name.domain is not Domain.PERSISTENT or not self.has_scalable:
            return error
        scalable = name.scalable_topic()
        # None for nearly all: the topic was terminated or deleted by somebody.
        if self.scalable.layouts.cached(scalable) is None:
            return error
        hint = f"use a client of version 5, which finds its messages by that name or as {scalable}"
        # The same class: clients go by its code.
        if isinstance(error, TopicTerminated):
            return TopicTerminated(f"{name} was migrated to {scalable}", hint=hint)
        if isinstance(error, TopicNotFound):
            text = f"there is no regular topic {name}: {scalable} has its name, made so or migrated"
            return TopicNotFound(text, hint=hint)
        return error

    def check_scalable(self) -> None:
        """Raise if scalable topics are switched off."""
        if isinstance(self.scalable, NotEnabled):
            raise self.scalable.refusal()

    @property
    def is_reachable(self) -> bool:
        """Whether clients can be told an address at all: one was set, or it is the one they use."""
        # An address that was set is right by definition; of "any address" nobody knows which one
        # is.
        if self.config.advertised_host:
            return True
        return self.config.host not in _ANY_HOST

    async def owner_urls(self, name: TopicName) -> BrokerUrls:
        """The broker that has a topic: this one, unless another is named."""
        if self._owners is None:
            return broker_urls(self)
        return urls_of(self, await self._owners.owner_url(name))

    @property
    def sessions(self) -> KeysView[Session]:
        """Oldest first."""
        return self._sessions.keys()

    def admit(self, session: Session) -> bool:
        """Take a new connection in, unless there are too many."""
        full = len(self.sessions) >= self.limits.connections_max
        self._sessions[session] = None  # an unwelcome one too, until it has ended
        CONNECTIONS_OPENED.inc()
        CONNECTIONS.set(len(self.sessions))
        return not full

    def _judge_publishers(self) -> None:
        # Consumers are never held (publish throttle, invariant 2).
        for session in self.sessions:
            if session.producers:
                session.judge_reading()

    def end(self, session: Session, work: Coroutine[Any, Any, None]) -> None:
        """Run the end of a session, whatever becomes of its connection."""
        task = asyncio.create_task(work, name=f"end of {session.address}")
        self._endings.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._endings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("session-end-failed", error, session=task.get_name())

    def forget(self, session: Session) -> None:
        """A session has left all its topics."""
        self._sessions.pop(session, None)
        CONNECTIONS.set(len(self.sessions))

    async def all_ended(self) -> None:
        """Wait until no session is left."""
        # Sessions come and go while this waits: the first of those that are left, again and again.
        while self.sessions:
            await next(iter(self.sessions)).ended.wait()


def broker_urls(context: Context) -> BrokerUrls:
    """Where this broker is reached; the one place where its addresses are put together."""
    # No TLS yet: answers have the plain address alone.
    return BrokerUrls(context.service_url, None)


def urls_of(context: Context, plain: str) -> BrokerUrls:
    """Where the broker with this address is reached; all brokers are set up alike."""
    own = broker_urls(context)
    return own if plain == own.plain else BrokerUrls(plain, None)


async def lookup_urls(context: Context, name: TopicName) -> BrokerUrls:
    """Where a topic is; it need not exist yet, for whoever asks is about to use it."""
    # Scalable names are answered like others, if this server has them at all.
    if name.domain.is_scalable:
        context.check_scalable()
    # Partitions of the coordinators' topic are where the coordinators are, and are not stored.
    urls = _coordinator_urls(context, name)
    if urls is None:
        await context.topics.namespaces.policies(name.namespace)  # refused if there is none
        urls = await context.owner_urls(name)
    return urls


def coordinator_count(context: Context, name: TopicName) -> int | None:
    """How many coordinators the topic by which clients find them stands for; None: another one."""
    return PARTITIONS if name == ASSIGN_TOPIC and context.has_transactions else None


def _coordinator_urls(context: Context, name: TopicName) -> BrokerUrls | None:
    if name.partition is None or name.without_partition() != ASSIGN_TOPIC:
        return None
    if not context.has_transactions or name.partition >= PARTITIONS:
        return None
    url = context.coordinators.partitions.assignments()[name.partition].url
    # Between two leaders: an error that clients retry.
    if url is None:
        raise ServiceNotReady(f"nobody leads coordinator {name.partition} now")
    return urls_of(context, url)
