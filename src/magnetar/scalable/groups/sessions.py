"""Consumers of scalable topics that are connected to this broker.

Owns: `ConsumerSessions`, the front end for the groups of all topics, and `ConsumerSession`, one
consumer's membership seen from its connection. Any broker can hold any member: it writes the member
into the group's record and follows that record; who gets what is decided by a controller somewhere,
or, of a regular topic, which has none, by `RegularGroups`.

Invariants:
1. What a session wishes (to be attached, lost or gone) is written by one task of its own, one write
   at a time, and again until it is stored: a caller that gives up waiting leaves no member behind.
2. Every attachment has a token of its own. A session changes its member only while the record
   carries that token, so a connection that ends late cannot end the one that took its place.
3. A connected session that the record shows as lost or gone (its broker was taken for dead) is
   attached again; one that the record shows with another token has been taken over, and is over.
4. `assignment` was made with this member in the group, and its layout epoch never falls; it is
   NEVER before a regular topic is migrated. `changes` advances after it changed; it is closed when
   the session is over.
5. One watch per topic serves all its sessions, and is closed with the last of them.
6. No record of a group stays behind a deleted topic: who wrote one looks at the topic once more.

Relies on: `ScalableStore.change` for compare-and-set within a deadline; `Layouts` and
`RegularGroups` being started before and stopped after this service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Final

from magnetar.errors import (
    ConsumerBusy,
    ConsumerNotFound,
    CorruptMetadata,
    DeadlineExceeded,
    MagnetarError,
    NotAllowed,
    ServiceNotReady,
    StoreClosed,
    TopicNotFound,
)
from magnetar.metadata.api import EventKind
from magnetar.model.hashing import HashRange
from magnetar.model.names import TopicName
from magnetar.model.segments import NEVER, Segment, SegmentLayout
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.scalable.groups.assignment import bucket_ranges
from magnetar.scalable.groups.group_records import (
    assignment_of,
    attached,
    detached,
    left,
    member_of,
)
from magnetar.scalable.groups.regular_groups import RegularGroups, is_regular
from magnetar.scalable.layout.layouts import Layouts
from magnetar.scalable.records import (
    GroupKind,
    GroupRecord,
    LayoutRecord,
    ScalableRecord,
    group_key,
    segment_topic,
    state_directory,
)
from magnetar.scalable.store import ScalableStore

_LOG: Final = logger(__name__)


@dataclass(frozen=True, slots=True)
class SegmentToRead:
    """A segment of an assignment; with bucket ranges, it is shared by them."""

    segment: Segment
    topic: TopicName
    bucket_ranges: tuple[HashRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """All that a consumer is to read, in ring order."""

    layout_epoch: int
    segments: tuple[SegmentToRead, ...]


class _Wish(Enum):
    """The state of the member that the record shall have; a session only moves down this list."""

    ATTACHED = "attached"
    LOST = "lost"
    GONE = "gone"


class ConsumerSession:
    """One consumer's membership in a group: made by `ConsumerSessions.attach`."""

    def __init__(
        self,
        topic: TopicName,
        group: str,
        name: str,
        kind: GroupKind,
        token: str,
        shares: bool,
        clock: Clock,
        settle_seconds: float,
    ) -> None:
        self.topic = topic
        self.group = group
        self.name = name
        self.kind = kind
        self.shares = shares
        self.changes = Signal()
        """Advances after `assignment` changed; closed with the reason when the session is over."""
        # What it wants the record to say, and with which token; written by one task (invariant 1).
        self._token = token
        self._clock = clock
        self._settle_seconds = settle_seconds
        self._wish = _Wish.ATTACHED
        self._lost_ms = NEVER
        self._was_attached = False
        # What it last saw of the record, what it made of that, and why it is over, if so.
        self._record: GroupRecord | None = None
        self._assignment: Assignment | None = None
        self._end: MagnetarError | None = None
        self._news = Signal()

    @property
    def assignment(self) -> Assignment:
        assert self._assignment is not None, "a session is handed out once it is placed"
        return self._assignment

    @property
    def is_over(self) -> bool:
        return self._end is not None

    async def detach(self) -> None:
        """The connection was lost: the member has the grace period to come back.

        What the store does not take now is written as soon as it can be.
        """
        self._lose()
        if not await self._settled():
            _LOG.warning("detach-delayed", topic=str(self.topic), consumer=self.name)

    async def leave(self) -> None:
        """The consumer closes: its segments go to others at once. Leaving again is no error."""
        self._ask(_Wish.GONE)
        if not await self._settled():
            raise ServiceNotReady(f"{self.name} has not left {self.group} yet", hint="try again")

    # --- for the service

    @property
    def _key(self) -> str:
        return group_key(self.topic, self.kind, self.group)

    def _lose(self) -> None:
        # Only from ATTACHED: a consumer that leaves for good is not turned back into a lost one.
        if self._wish is _Wish.ATTACHED:
            self._lost_ms = self._clock.now_ms()
            self._ask(_Wish.LOST)

    def _ask(self, wish: _Wish) -> None:
        self._wish = wish
        self._news.advance()

    def _finish(self, reason: MagnetarError) -> None:
        if self._end is None:
            self._end = reason
            self.changes.close(reason)
            self._news.advance()

    async def _settled(self) -> bool:
        """Wait until the session is over; False: not within the deadline."""
        try:
            async with asyncio.timeout(self._settle_seconds):
                while not self.is_over:
                    await self._news.past(self._news.version)
        except TimeoutError:
            return False
        return True

    async def _placed(self) -> None:
        # The end is looked at, too: a session that was taken over meanwhile is never placed.
        while self._assignment is None or self._end is not None:
            if self._end is not None:
                raise self._end
            await self._news.past(self._news.version)

    def _must_write(self) -> bool:
        # LOST and GONE are written in any case; ATTACHED only if the record does
        # not show it (invariant 3).
        if self._wish is not _Wish.ATTACHED:
            return True
        member = None if self._record is None else member_of(self._record, self.name)
        return member is None or member.connection != self._token or member.lost_ms != NEVER

    def _change(self, group: GroupRecord | None, wish: _Wish, broker: str) -> GroupRecord | None:
        """What the record is to be; it decides on the stored record, never on the view."""
        if wish is not self._wish:
            # The store was away for long, and the consumer may have attached elsewhere meanwhile.
            return group
        # Three wishes. Attached: unless a later connection of the same
        # consumer has taken the place.
        if wish is _Wish.ATTACHED:
            present = group or GroupRecord(self.group, self.kind)
            if self._was_taken_over(present):
                return group
            return attached(present, self.name, broker, self._token, self.shares)
        # The group went with its topic, or its last member: there is nothing to be lost from.
        if group is None:
            return None
        if wish is _Wish.LOST:
            return detached(group, self.name, self._token, self._lost_ms)
        # A group without members is the controller's to delete, with what else there is of it.
        return left(group, self.name, self._token)

    def _was_taken_over(self, group: GroupRecord) -> bool:
        member = member_of(group, self.name)
        if member is None or member.connection == self._token:
            return False
        # Another token there. Had this session been in the record, then it was
        # replaced. Else it has yet to attach, and takes the place over, unless the
        # other one came later at this broker.
        return self._was_attached or _is_later(member.connection, self._token)

    def _written(self, group: GroupRecord | None, wish: _Wish) -> None:
        who = f"{self.name} of {self.group}"
        if wish is not self._wish:
            return  # it has another one by now, which is written next
        # Stored: LOST and GONE are the end of this session, and who waits for that is woken.
        if wish is not _Wish.ATTACHED:
            self._finish(ConsumerNotFound(f"{who} is {wish.value}"))
        elif group is not None and self._was_taken_over(group):
            self._finish(ConsumerBusy(f"{who} has attached by another connection"))
        else:
            self._was_attached = True

    def _see(self, group: GroupRecord | None, layout: SegmentLayout | None) -> None:
        """The group's record, or the layout, is this now."""
        self._record = group
        self._news.advance()
        member = None if group is None else member_of(group, self.name)
        if group is None or member is None or layout is None or self.is_over:
            return
        # A layout that is older than the assignment may lack segments: it will follow.
        # Invariant 4: clients would get ids of segments that they cannot look up.
        up_to_date = group.layout_epoch <= layout.epoch
        # Placed with this very connection: an assignment for a predecessor may be about to change.
        if member.connection == self._token and member.placed and up_to_date:
            self._take(Assignment(group.layout_epoch, self._segments(group, layout)))

    def _segments(self, group: GroupRecord, layout: SegmentLayout) -> tuple[SegmentToRead, ...]:
        topic = self.topic.scalable_topic()
        return tuple(
            SegmentToRead(
                each.segment,
                segment_topic(topic, each.segment),
                tuple(bucket_ranges(each.segment)) if each.shared else (),
            )
            for each in assignment_of(group, self.name, layout)
        )

    def _take(self, assignment: Assignment) -> None:
        # Any other member's change moves the record, too: clients are told only of their own.
        if assignment != self._assignment:
            self._assignment = assignment
            self.changes.advance()


class _FollowedTopic:
    """The sessions of one topic, and the one watch that keeps them up to date."""

    def __init__(
        self, store: ScalableStore, layouts: Layouts, regular: RegularGroups, topic: TopicName
    ) -> None:
        self._store = store
        self._layouts = layouts
        self._regular = regular
        self._topic = topic
        # Opened before the first read, so that nothing between the two is missed.
        self._watch = store.metadata.watch(parent=state_directory(topic))
        self._sessions: dict[str, dict[ConsumerSession, None]] = {}
        """By the key of their group."""
        self._groups: dict[str, GroupRecord | None] = {}
        self._layout: tuple[LayoutRecord, SegmentLayout] | None = None
        self._partitions: SegmentLayout | None = None
        """Of a regular topic, as they were when a group was last given ones unknown before."""

    def sessions(self) -> list[ConsumerSession]:
        return [session for sessions in self._sessions.values() for session in sessions]

    def add(self, session: ConsumerSession) -> None:
        # What it attaches with is an event of the watch, so its group is read then at the latest.
        self._sessions.setdefault(session._key, {})[session] = None
        self._show_one(session)

    def remove(self, session: ConsumerSession) -> bool:
        """Whether it was the last one: the watch is closed then."""
        here = self._sessions.get(session._key, {})
        here.pop(session, None)
        if not here:
            self._sessions.pop(session._key, None)
            self._groups.pop(session._key, None)
        if not self._sessions:
            self._watch.close()
        return not self._sessions

    async def run(self) -> None:
        """Follow until the watch is closed, or the store is."""
        async with self._watch, asyncio.TaskGroup() as tasks:
            layout = tasks.create_task(self._follow_layout())
            await self._follow_groups()
            layout.cancel()

    async def _follow_groups(self) -> None:
        try:
            await self._read(tuple(self._sessions))
            async for event in self._watch:
                # After a resync any record may have changed: all of them are read again.
                if event.kind in (EventKind.RESYNC, EventKind.RANGE_DELETED):
                    await self._read(tuple(self._sessions))
                elif event.key in self._sessions:
                    await self._read((event.key,))
        except StoreClosed:
            return

    async def _read(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                group = await self._store.get(key, GroupRecord)
                # The group of a regular topic was given partitions that are not known here yet.
                if group is not None and self._layout_for(group) is None:
                    await self._look_at_partitions(group)
            # Its consumers are told at once instead of waiting for an assignment that never comes.
            except CorruptMetadata as error:
                for session in self._sessions.get(key, ()):
                    session._finish(error)
                continue
            # Checked again after the await: the last session of the group may have gone.
            if key in self._sessions:
                self._groups[key] = group
                self._show((key,))

    async def _look_at_partitions(self, group: GroupRecord) -> None:
        if group.layout_epoch == NEVER and group.owners:
            try:
                self._partitions = await self._regular.layout(self._topic)
            except TopicNotFound:
                return  # `RegularGroups` finds out too, and ends the group

    async def _follow_layout(self) -> None:
        changed = self._layouts.changed(self._topic)
        while True:
            seen = changed.version
            self._show(tuple(self._sessions))
            await changed.past(seen)

    def _show(self, keys: Iterable[str]) -> None:
        for key in keys:
            for session in self._sessions[key]:
                self._show_one(session)

    def _show_one(self, session: ConsumerSession) -> None:
        group = self._groups.get(session._key)
        session._see(group, None if group is None else self._layout_for(group))

    def _layout_for(self, group: GroupRecord) -> SegmentLayout | None:
        """The layout whose segments the group was given; None: it is not known yet."""
        if group.layout_epoch != NEVER:
            return self._present_layout()
        partitions = self._partitions
        # More partitions were given out than were known here at the last look.
        if partitions is None or not partitions.segments.keys() >= group.owners.keys():
            return None
        return partitions

    def _present_layout(self) -> SegmentLayout | None:
        record = self._layouts.cached(self._topic)
        if record is None or record.layout is None:
            return None
        if self._layout is None or self._layout[0] is not record.layout:
            self._layout = record.layout, record.layout.layout()
        return self._layout[1]


class ConsumerSessions(Service):
    """The consumers that are connected to this broker, of all topics.

    `attach_seconds` is how long a consumer waits to be placed by a controller, `settle_seconds` how
    long a caller waits for the end of a session to be stored.
    """

    def __init__(
        self,
        store: ScalableStore,
        layouts: Layouts,
        regular: RegularGroups,
        broker_id: str,
        clock: Clock,
        *,
        attach_seconds: float,
        settle_seconds: float,
        stop_seconds: float,
        members_max: int,
    ) -> None:
        super().__init__("consumer sessions", stop_seconds=stop_seconds)
        self._store = store
        self._layouts = layouts
        self._regular = regular
        self._broker_id = broker_id
        self._clock = clock
        self._attach_seconds = attach_seconds
        self._settle_seconds = settle_seconds
        self._members_max = members_max
        self._topics: dict[TopicName, _FollowedTopic] = {}
        self._serial = count(1)

    @property
    def watches(self) -> int:
        """How many topics are followed."""
        return len(self._topics)

    async def attach(
        self,
        topic: TopicName,
        group: str,
        consumer_name: str,
        kind: GroupKind,
        connection: str,
        shares: bool,
    ) -> ConsumerSession:
        """Make a consumer a member of a group, or give it its place back, and wait for its share.

        ServiceNotReady if no controller has placed it in time; TopicNotFound.
        """
        if self.stopping:
            raise ServiceNotReady("this broker is stopping")
        session = ConsumerSession(
            topic.scalable_topic(),
            group,
            consumer_name,
            kind,
            # Unique over all processes (invariant 2); the serial orders connections to this broker.
            f"{self._broker_id}/{connection}#{next(self._serial)}",
            shares,
            self._clock,
            self._settle_seconds,
        )
        self._follow(session)
        try:
            async with asyncio.timeout(self._attach_seconds):
                await session._placed()
        # No controller has answered. The member, if it was stored at all, is lost from now on: it
        # keeps its place for the grace period, and the client's next attempt finds it.
        except TimeoutError as error:
            session._lose()
            text = f"{topic}: no controller has placed {consumer_name} in {group} yet"
            raise ServiceNotReady(text) from error
        except BaseException:
            session._lose()
            raise
        return session

    async def _stop(self) -> None:
        # The controllers see that this broker's record went: nothing more has to be written.
        for followed in list(self._topics.values()):
            for session in followed.sessions():
                session._finish(ServiceNotReady("this broker is stopping"))

    # --- one task per topic, one per session

    def _follow(self, session: ConsumerSession) -> None:
        followed = self._topics.get(session.topic)
        if followed is None:
            followed = _FollowedTopic(self._store, self._layouts, self._regular, session.topic)
            self._topics[session.topic] = followed
            self.spawn(self._run(session.topic, followed), f"follow {session.topic}")
        followed.add(session)
        self.spawn(self._keep(session, followed), f"keep {session.name} of {session.topic}")

    async def _run(self, topic: TopicName, followed: _FollowedTopic) -> None:
        await followed.run()
        for session in followed.sessions():
            session._finish(ServiceNotReady(f"{topic}: the metadata store was closed"))

    async def _keep(self, session: ConsumerSession, followed: _FollowedTopic) -> None:
        """Make the record say what the session wishes until the session is over."""
        while not session.is_over:
            seen = session._news.version
            # A topic that seems gone is looked at in the store: its deletion takes sessions along.
            if session._must_write() or self._seems_gone(session.topic):
                try:
                    await self._write(session)
                # The store is away: the wish stands, and the write is tried again (invariant 1).
                except DeadlineExceeded as error:
                    _LOG.warning("session-write-delayed", key=session._key, error=str(error))
                    continue
                # A topic that does not exist, a group that is full: trying again would not help.
                except MagnetarError as error:
                    session._finish(error)
            if not session.is_over:
                await session._news.past(seen)
        if followed.remove(session) and self._topics.get(session.topic) is followed:
            del self._topics[session.topic]

    async def _write(self, session: ConsumerSession) -> None:
        wish = session._wish
        if wish is _Wish.ATTACHED:
            await self._check_topic(session.topic)

        def change(group: GroupRecord | None) -> GroupRecord | None:
            self._check_room(group, session.name)
            return session._change(group, wish, self._broker_id)

        written = await self._store.change(session._key, GroupRecord, change)
        session._written(written, wish)
        if wish is _Wish.ATTACHED and not session.is_over:
            try:
                # Invariant 6: the topic may have been deleted between the check and the write, and
                # nobody else would ever look at this group again.
                regular = await self._check_topic(session.topic)
            except TopicNotFound:
                await self._store.change(session._key, GroupRecord, lambda _: None)
                raise
            if regular:
                self._regular.look_after(session.topic)

    def _check_room(self, group: GroupRecord | None, name: str) -> None:
        if group is None or len(group.members) < self._members_max:
            return
        if member_of(group, name) is None:
            raise NotAllowed(f"{group.name} has {len(group.members)} consumers, its limit")

    # --- the topic

    def _seems_gone(self, topic: TopicName) -> bool:
        record = self._layouts.cached(topic)
        if record is None:
            return not self._regular.looks_after(topic)
        return _is_being_deleted(record)

    async def _check_topic(self, topic: TopicName) -> bool:
        """Whether it is a regular one; TopicNotFound if it is none at all."""
        try:
            async with asyncio.timeout(self._settle_seconds):
                record = await self._layouts.read(topic)
                if is_regular(record):
                    await self._regular.layout(topic)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{topic}: not read in {self._settle_seconds:g} s") from error
        # Four kinds of topic: regular (no record, or its migration is not committed), being
        # deleted, being created, there.
        if record is None or is_regular(record):
            return True
        if _is_being_deleted(record):
            raise TopicNotFound(f"{topic} does not exist")
        if record.layout is None:
            raise ServiceNotReady(f"{topic} is being created")
        return False


def _is_being_deleted(record: ScalableRecord) -> bool:
    return record.change is not None and record.change.kind == "delete"


def _is_later(token: str, than: str) -> bool:
    """Whether a connection to the same broker attached after another one, whoever wrote first."""
    broker, _, serial = token.partition("/")
    other, _, earlier = than.partition("/")
    return broker == other and int(serial.rpartition("#")[2]) > int(earlier.rpartition("#")[2])
