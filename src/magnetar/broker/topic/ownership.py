"""Ownership of topics: which broker serves which, alone or where several share a metadata store.

Owns: `Ownership`, what `Topics` asks of it; `SoleOwner`, for a broker that is alone; and
`SharedOwnership`: an ephemeral record for each topic that a broker serves (`OWNERS/<topic>`, the
broker's URL), and one for each broker that lives (`LIVING/<url>`).

Invariants:
1. A topic is loaded only between `claim` and `release`.
2. Two brokers that both believe to have a topic do no harm: the managed ledger lets only the later
   one write. Ownership says where clients should go.
3. A claim that returned stands for a record of this broker's present session. With the session
   everything claimed is gone: `lost` advances, and claims begin anew.
4. A claim never takes a topic from another broker: it is refused until that one releases it, or
   its session ends. A record with this broker's own URL is of its former life, and is replaced: an
   address has one process at a time.
5. While nobody has a topic, every broker that sees the same live ones names the same of them as
   its owner to be.

Relies on: managed ledgers, which fence a broker that goes on after it lost its session; a broker
that obeys `lost` by closing its topics.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final, Protocol

from magnetar.errors import (
    BadVersion,
    OutcomeUnknown,
    ServiceNotReady,
    SessionLost,
    StoreClosed,
    Unavailable,
)
from magnetar.managed_ledger.names import encode_name
from magnetar.metadata.api import ABSENT, MetadataStore, Record, SessionEvent, Stat
from magnetar.metadata.recipes import PAUSE_S
from magnetar.model.names import TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal


class Ownership(Protocol):
    """Says who serves which topic."""

    async def claim(self, name: TopicName) -> None:
        """Make this broker the one that serves the topic; again: no change.

        ServiceNotReady, with the owner's URL in its text, if another broker does.
        """
        ...

    async def owner_url(self, name: TopicName) -> str | None:
        """Where clients find the broker that serves a topic; None: none does yet."""
        ...

    async def release(self, name: TopicName) -> None:
        """Give up a topic that was unloaded; one that it does not have is ignored."""
        ...


class SoleOwner:
    """The only broker there is: it serves every topic."""

    def __init__(self, url: str = "") -> None:
        self._url = url

    async def claim(self, name: TopicName) -> None:
        """Claim nothing: there is no other broker."""

    async def owner_url(self, name: TopicName) -> str | None:
        return self._url

    async def release(self, name: TopicName) -> None:
        """Release nothing: there is no other broker."""


# The first is where lookups send clients (Pulsar's bundle ownership), the second is its
# BrokerRegistry.
OWNERS: Final = "/broker/owners"
LIVING: Final = "/broker/living"
STOP_SECONDS: Final = 5.0


class SharedOwnership(Service):
    """The topics of one broker among several."""

    def __init__(self, store: MetadataStore, url: str, clock: Clock) -> None:
        super().__init__("ownership", stop_seconds=STOP_SECONDS)
        self.lost = Signal()
        """Advances when everything that this broker had claimed is gone."""
        self._store = store
        self._url = url
        self._clock = clock
        self._claims: dict[TopicName, int] = {}
        """The version of each record of this broker."""

    async def _start(self) -> None:
        await self._announce()
        self.spawn(self._follow_session(), "session")

    # --- topics

    async def claim(self, name: TopicName) -> None:
        """Make this broker the topic's owner; ServiceNotReady if another is, or may be."""
        # Claimed in this session: no I/O for topics that are asked for all the time.
        if name in self._claims:
            return
        losses = self.lost.version
        try:
            version = await self._take(_owner_key(name))
        except (BadVersion, OutcomeUnknown, SessionLost, Unavailable) as error:
            raise ServiceNotReady(f"{name} cannot be claimed now: {error}") from error
        # The record may be that of a session that is over, and gone with it (invariant 3).
        if losses != self.lost.version:
            raise ServiceNotReady(f"{name}: the session ended while it was claimed")
        self._claims[name] = version

    async def release(self, name: TopicName) -> None:
        """Let another broker have it."""
        # Forgotten first: whatever the store answers, this broker serves the topic no more.
        version = self._claims.pop(name, None)
        if version is None:
            return
        try:
            await self._store.delete(_owner_key(name), expected=version)
        except BadVersion:
            return  # it is another's already
        except (OutcomeUnknown, Unavailable, StoreClosed):
            return  # if it stays, whoever asks is sent here, and it is claimed again

    async def owner_url(self, name: TopicName) -> str:
        """The broker that has a topic, or else the one that should load it."""
        record = await self._store.get(_owner_key(name))
        if record is not None:
            return record.value.decode()
        # Nobody has it: all brokers name the same one (invariant 5), which loads it when clients
        # come.
        live_brokers = [each.value.decode() async for each in self._store.scan(LIVING)]
        return preferred(name, live_brokers) if live_brokers else self._url

    async def _take(self, key: str) -> int:
        """The version of this broker's record of a topic, made if nobody has one."""
        current = await self._store.get(key)
        if current is None:
            return (await self._put(key, ABSENT)).version
        if current.value != self._url.encode():
            raise _taken(current)
        # Of this session: an earlier claim whose answer was lost.
        if current.stat.mine:
            return current.version
        # Of a former life at this address (invariant 4): replaced, so that it does not vanish when
        # that session is found dead.
        return (await self._put(key, current.version)).version

    async def _put(self, key: str, expected: int | None) -> Stat:
        return await self._store.put(key, self._url.encode(), expected=expected, ephemeral=True)

    # --- the session

    async def _follow_session(self) -> None:
        async for state in self._store.session_events():
            if state is SessionEvent.LOST:
                # In this step: a claim that is under way sees the signal and does not note its
                # record.
                self._claims.clear()
                self.lost.advance()
            elif state is SessionEvent.REESTABLISHED:
                await self._announce_again()

    async def _announce_again(self) -> None:
        """Be among the living once more, unless this session is lost as well."""
        while True:
            try:
                await self._announce()
            # May pass: a broker that is not among the live ones gets no new topics.
            except (OutcomeUnknown, Unavailable):
                await self._clock.sleep(PAUSE_S)
            except (SessionLost, StoreClosed):
                return
            else:
                return

    async def _announce(self) -> None:
        await self._put(f"{LIVING}/{encode_name(self._url)}", None)


def preferred(name: TopicName, urls: list[str]) -> str:
    """Rendezvous hashing: when a broker comes or goes, only topics of that one move."""
    # The URL breaks a tie, though two equal digests will not happen.
    return max(urls, key=lambda url: (sha256(f"{url} {name}".encode()).digest(), url))


def _owner_key(name: TopicName) -> str:
    return f"{OWNERS}/{encode_name(str(name))}"


def _taken(record: Record) -> ServiceNotReady:
    return ServiceNotReady(f"{record.value.decode()} has this topic")
