"""The producers of one topic: unique names, access modes, and who waits for the topic.

Owns: `TopicProducers`, the same for persistent and non-persistent topics, and `ProducerNames`.

Invariants (`check_invariants`):
1. Names are unique among connected and waiting producers.
2. An exclusive producer is the only one that is connected. Nobody is admitted past those who wait
   for the topic, unless it takes the topic by force.
3. Every producer that gets the topic for itself gets a topic epoch, made durable before, and higher
   than any before it; one that comes back keeps its own, if nobody had the topic in between.
4. A producer leaves only when all that it has in flight is settled.
5. Where messages must be encrypted, nobody sends who did not say that it encrypts.

Relies on: `set_epoch`, which makes a topic epoch durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Final

from magnetar.broker.api import AccessMode, ProducerRequest
from magnetar.broker.policy.records import PRODUCER_NAMES
from magnetar.broker.publish.producer import Producer
from magnetar.broker.publish.send_limits import SendLimits
from magnetar.broker.rates.rate_limiter import RateLimiter
from magnetar.errors import (
    InvariantBroken,
    MagnetarError,
    MetadataError,
    ProducerBusy,
    ProducerFenced,
)
from magnetar.metadata.api import MetadataStore
from magnetar.metadata.recipes import Counter

_ENCRYPTED_ONLY: Final = "this topic takes encrypted messages only"

SetEpoch = Callable[[int], Awaitable[None]]


class ProducerNames:
    """Unique names for producers that have none."""

    def __init__(self, metadata: MetadataStore, cluster: str) -> None:
        self._numbers = Counter(metadata, PRODUCER_NAMES)
        self._cluster = cluster

    async def next_name(self) -> str:
        return f"{self._cluster}-{await self._numbers.next()}"


class TopicProducers:
    """The producers of one topic."""

    def __init__(self, epoch: int | None, set_epoch: SetEpoch, *, close_seconds: float) -> None:
        self.epoch = epoch
        """Of the last producer that had the topic for itself; None: there was none."""
        self._set_epoch = set_epoch
        self._close_seconds = close_seconds
        self._connected: dict[str, Producer] = {}
        self._waiting: dict[str, Producer] = {}
        self._exclusive: Producer | None = None
        self._limits: SendLimits | None = None
        self._limiter: RateLimiter | None = None
        # Changes take turns: admission awaits the epoch and the ends of others, and must not
        # overlap.
        self._turn = asyncio.Lock()

    # --- who there is

    @property
    def connected(self) -> Mapping[str, Producer]:
        return MappingProxyType(self._connected)

    @property
    def waiting(self) -> Mapping[str, Producer]:
        """Producers that wait to have the topic for themselves, in order."""
        return MappingProxyType(self._waiting)

    def named(self, name: str) -> Producer | None:
        return self._connected.get(name) or self._waiting.get(name)

    def check_invariants(self) -> None:
        if self._connected.keys() & self._waiting.keys():
            raise InvariantBroken("a producer is connected and waits")
        if self._exclusive is not None and list(self._connected.values()) != [self._exclusive]:
            raise InvariantBroken(f"{self._exclusive.name} is exclusive and not alone")

    # --- coming

    def check_room(self, most: int, name: str | None) -> None:
        """ProducerBusy if so many are connected (0: any number), without the one of that name."""
        if most and len(self._connected) - (name in self._connected) >= most:
            raise ProducerBusy(f"the topic has {most} producers, its limit")

    async def add(self, producer: Producer, most: int = 0) -> None:
        """Admit a producer (it is `ready`), or let it wait; at most so many of them (0: any).

        ProducerBusy: its name is taken (see `named` for by whom), or the topic is another's.
        ProducerFenced: it wants the topic for itself and must not have it.
        """
        async with self._turn:
            self.check_encrypted(producer.options)
            await self._free_name(producer)
            # Those who came at the same time had their turns before.
            self.check_room(most, producer.name)
            admit = {
                AccessMode.SHARED: self._add_shared,
                AccessMode.EXCLUSIVE: self._add_exclusive,
                AccessMode.WAIT_FOR_EXCLUSIVE: self._add_waiting,
                AccessMode.EXCLUSIVE_WITH_FENCING: self._add_fencing,
            }
            await admit[producer.access_mode](producer)
            # Here and not before: the policy may have changed while it was admitted.
            self._judge(producer)
            producer.limiter = self._limiter

    def check_encrypted(self, options: ProducerRequest) -> None:
        """Raise `MetadataError` if a producer will not encrypt what it must."""
        if self._encrypted_only and not options.encrypted:
            raise MetadataError(_ENCRYPTED_ONLY)

    @property
    def _encrypted_only(self) -> bool:
        return self._limits is not None and self._limits.encrypted_only

    async def _free_name(self, producer: Producer) -> None:
        present = self.named(producer.name)
        if present is None:
            return
        # A connection that died may still be here: its client gets ProducerBusy and tries again.
        # One on the same connection replaces its former self at once.
        if not present.stopped and not producer.is_successor_of(present):
            raise ProducerBusy(f"the topic has a producer named {producer.name!r}")
        # Settled first: the successor is told the last sequence, which must be final by then.
        await present.close(self._close_seconds)
        self._forget(present)

    async def _add_shared(self, producer: Producer) -> None:
        # PIP-68: while somebody waits for the topic no shared producer passes (invariant 2).
        if self._exclusive is not None or self._waiting:
            raise ProducerBusy("another producer has the topic for itself, or waits for that")
        self._connected[producer.name] = producer
        producer.grant(self.epoch)

    async def _add_exclusive(self, producer: Producer) -> None:
        # Fenced, not busy: the client takes it as final instead of retrying for ever.
        if self._connected or self._waiting:
            raise ProducerFenced("the topic has other producers")
        await self._give_to(producer)

    async def _add_waiting(self, producer: Producer) -> None:
        if self._connected or self._waiting:
            self._waiting[producer.name] = producer
        else:
            await self._give_to(producer)

    async def _add_fencing(self, producer: Producer) -> None:
        self._check_epoch(producer)
        fenced = ProducerFenced(f"{producer.name} took the topic for itself")
        others = [*self._connected.values(), *self._waiting.values()]
        # All of them before the first await: none may send behind one that was settled already.
        for other in others:
            other.stop(fenced)
        for other in others:
            await other.close(self._close_seconds)
            self._forget(other)
        await self._give_to(producer)

    def _check_epoch(self, producer: Producer) -> None:
        wanted = producer.options.topic_epoch
        # Another had the topic since: this one's state may be outdated (PIP-68).
        if wanted is not None and self.epoch is not None and wanted < self.epoch:
            raise ProducerFenced(f"the topic is at epoch {self.epoch}, past {wanted}")

    async def _give_to(self, producer: Producer) -> None:
        self._check_epoch(producer)
        epoch = producer.options.topic_epoch
        if epoch is None:
            epoch = 0 if self.epoch is None else self.epoch + 1
        # Durable before anybody sends under it: after a crash a former one must still be found
        # older.
        if epoch != self.epoch:
            await self._set_epoch(epoch)
            self.epoch = epoch
        self._connected[producer.name] = producer
        self._exclusive = producer
        producer.grant(epoch)

    # --- going

    async def remove(self, producer: Producer) -> None:
        """Let a producer go once it is settled; the next that waits gets the topic."""
        # Outside the turn: appends in flight may take long, and others can join meanwhile.
        await producer.close(self._close_seconds)
        async with self._turn:
            self._forget(producer)
            await self._promote()

    def stop(self, error: MagnetarError) -> None:
        """Stop all of them; each is removed by its session, or by `close`."""
        for producer in (*self._connected.values(), *self._waiting.values()):
            producer.stop(error)

    async def close(self, error: MagnetarError | None = None) -> None:
        """Stop all and let them go."""
        async with self._turn:
            others = [*self._connected.values(), *self._waiting.values()]
            for producer in others:
                producer.stop(error)
            for producer in others:
                await producer.close(self._close_seconds)
                self._forget(producer)

    def limit_sends(self, limits: SendLimits | None) -> None:
        """Let none send what is beyond these limits, and stop who will not encrypt what it must."""
        self._limits = limits
        for producer in (*self._connected.values(), *self._waiting.values()):
            self._judge(producer)

    def limit_rate(self, limiter: RateLimiter | None) -> None:
        """Have their sends wait for this rate; None: there is none."""
        self._limiter = limiter
        for producer in (*self._connected.values(), *self._waiting.values()):
            producer.limiter = limiter

    def _judge(self, producer: Producer) -> None:
        producer.limit_sends(self._limits)
        if self._encrypted_only and not producer.options.encrypted:
            producer.stop(MetadataError(_ENCRYPTED_ONLY))

    def settle(self) -> None:
        """Note the outcome of everything that is done."""
        for producer in self._connected.values():
            producer.settle()

    async def drained(self) -> None:
        """Wait until nothing is in flight any more of those that were stopped."""
        for producer in list(self._connected.values()):
            if producer.stopped:
                await producer.close(self._close_seconds)

    def _forget(self, producer: Producer) -> None:
        for group in (self._connected, self._waiting):
            if group.get(producer.name) is producer:
                del group[producer.name]
        if self._exclusive is producer:
            self._exclusive = None

    async def _promote(self) -> None:
        while self._waiting and not self._connected:
            following = next(iter(self._waiting.values()))
            del self._waiting[following.name]
            # It gave up, or lost its connection, while it waited.
            if following.stopped:
                continue
            try:
                await self._give_to(following)
            # The store failed: this one is told, and the next in line is tried.
            except MagnetarError as error:
                following.stop(error)
