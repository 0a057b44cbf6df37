"""A model of Spark's driver, tasks and checkpoint over the server's group record, for exploration.

Owns: `Model`, which gives every successor of a state, and `explore`, which visits all of them.
Tasks and driver decide with `magnetar.spark.sink.group_commit`; the record changes by
`magnetar.txn.transitions`, the server's own rules. Every step may be the last of its process: a
driver that dies is followed by another run, and its tasks, or itself, may go on as zombies.

Checked in every state: the output of a query has no row twice, holds a batch whole or not at all,
and holds every batch that the checkpoint says is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from magnetar.errors import MagnetarError
from magnetar.spark.sink import group_commit
from magnetar.spark.sink.group_commit import Known, TaskPlan, TaskReport, Ticket, WriteId
from magnetar.txn import transitions
from magnetar.txn.ids import metadata_id
from magnetar.txn.records import Group, GroupMembership, Header, State
from magnetar.wire.messages import TxnId

W = TypeVar("W")

APP = "app"
ROWS = ("a", "b")
"""Of every batch; a partition has one of them, or both."""
LIMIT = 1000


class Attempt(NamedTuple):
    """One attempt of a task."""

    write: WriteId
    rows: tuple[str, ...]
    partition: int
    ticket: Ticket | None = None
    """None: it has not opened the group yet."""
    may_begin: bool = False


class Driver(NamedTuple):
    """One run of a query."""

    generation: str
    run: str
    batch: int | None = None
    layout: tuple[tuple[str, ...], ...] = ()
    parts: tuple[TaskReport | None, ...] = ()
    is_committed: bool = False
    """It has been told so, and now writes it into the checkpoint."""


@dataclass(frozen=True)
class World:
    """Everything there is."""

    group: Group | None = None
    headers: tuple[Header, ...] = ()
    contents: tuple[tuple[str, int, tuple[str, ...]], ...] = ()
    """By transaction: generation, batch, rows."""
    drivers: tuple[Driver, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    done: tuple[tuple[str, int], ...] = ()
    """What checkpoints say."""
    started: int = 0
    """Runs so far."""
    spare: int = 0
    """Attempts beside the first of each task that may still be started."""
    expiries: int = 0
    """Transactions that may still time out."""

    def state_of(self, header: Header) -> State:
        return transitions.state_of(header, self.group)

    def visible(self) -> Counter[tuple[str, int, str]]:
        return Counter(
            (generation, batch, row)
            for header, (generation, batch, rows) in zip(self.headers, self.contents, strict=True)
            if self.state_of(header) == "COMMITTED"
            for row in rows
        )


class Harm(Exception):
    """Rows were lost, repeated, or are there in part."""


@dataclass(frozen=True)
class Model:
    """What may happen. Subclasses of tests break a rule."""

    runs: tuple[str, ...] = ("g", "g")
    """The query of each run, in the order of starting."""
    batches: int = 1
    layouts: tuple[tuple[tuple[str, ...], ...], ...] = ((("a",), ("b",)), (("a", "b"),))
    """How each run cuts a batch into tasks; the last of them for all further runs."""
    spare: int = 0
    expiries: int = 0
    zombies: bool = True
    """Drivers that were replaced go on."""

    def first(self) -> World:
        return World(spare=self.spare, expiries=self.expiries)

    def check(self, world: World) -> None:
        seen = world.visible()
        for generation in set(self.runs):
            for batch in range(self.batches):
                counts = {seen[generation, batch, row] for row in ROWS}
                if counts not in ({0}, {1}):
                    raise Harm(f"batch {batch} of {generation}: {dict(seen)}")
                if (generation, batch) in world.done and counts != {1}:
                    raise Harm(f"batch {batch} of {generation} is done and not there")

    def successors(self, world: World) -> Iterator[World]:
        yield from self._starts(world)
        for number, driver in enumerate(world.drivers):
            for after, then in self._driver_steps(world, driver):
                kept = list(after.drivers)
                kept[number : number + 1] = [] if then is None else [then]
                yield replace(after, drivers=tuple(kept))
        for attempt in world.attempts:
            others = tuple(each for each in world.attempts if each is not attempt)
            gone = replace(world, attempts=others)
            for after, next_step in self._task_steps(gone, attempt):
                more = () if next_step is None else (next_step,)
                yield replace(after, attempts=(*after.attempts, *more))
            yield gone  # it died
        yield from self._expires(world)

    # --- the drivers

    def _starts(self, world: World) -> Iterator[World]:
        if world.started < len(self.runs):
            driver = Driver(self.runs[world.started], f"r{world.started}")
            others = world.drivers if self.zombies else ()
            kept = world.attempts if self.zombies else ()
            yield replace(
                world, drivers=(*others, driver), attempts=kept, started=world.started + 1
            )

    def _driver_steps(self, world: World, driver: Driver) -> Iterator[tuple[World, Driver | None]]:
        yield world, None  # killed
        if driver.batch is None:
            left = [n for n in range(self.batches) if (driver.generation, n) not in world.done]
            if left:
                yield self._plans(world, driver, left[0])
        elif driver.is_committed:
            done = tuple(sorted({*world.done, (driver.generation, driver.batch)}))
            yield replace(world, done=done), Driver(driver.generation, driver.run)
        elif None not in driver.parts:
            yield from self._commits(world, driver)
        elif world.spare:
            for number, part in enumerate(driver.parts):
                if part is None:
                    again = self._attempt(driver, number)
                    attempts = (*world.attempts, again)
                    yield replace(world, attempts=attempts, spare=world.spare - 1), driver

    def _plans(self, world: World, driver: Driver, batch: int) -> tuple[World, Driver]:
        layout = self.layouts[min(int(driver.run[1:]), len(self.layouts) - 1)]
        planned = driver._replace(batch=batch, layout=layout, parts=(None,) * len(layout))
        tasks = tuple(self._attempt(planned, number) for number in range(len(layout)))
        return replace(world, attempts=(*world.attempts, *tasks)), planned

    def _attempt(self, driver: Driver, number: int) -> Attempt:
        assert driver.batch is not None
        write = WriteId(APP, driver.generation, driver.run, driver.batch)
        return Attempt(write, driver.layout[number], number)

    def _commits(self, world: World, driver: Driver) -> Iterator[tuple[World, Driver | None]]:
        assert driver.batch is not None
        try:
            after = self.commit(world, driver.batch, [*driver.parts])
        except MagnetarError:
            yield self._aborted(world, driver), None
        else:
            yield after, driver._replace(is_committed=True)
            yield self._aborted(after, driver), None  # the answer was lost, and Spark aborts

    def commit(self, world: World, batch: int, parts: list[TaskReport | None]) -> World:
        """What the driver does; raises what it is told."""
        wanted = group_commit.decision(batch, parts)
        told = parts[0]
        assert told is not None
        if wanted.is_repeated:
            group_commit.confirm(told.write, self._known(world))
            return world
        ticket = wanted.ticket
        assert ticket is not None
        return self.commit_group(world, ticket.epoch, batch, wanted.transactions)

    def commit_group(self, world: World, epoch: int, batch: int, txns: tuple[TxnId, ...]) -> World:
        named = {each.txn: each for each in world.headers if each.id in txns}
        outcome = transitions.committed(
            world.group, APP, epoch, batch, named, now_ms=0, ids_max=LIMIT
        )
        if outcome.replayed:
            return world
        # What was decided is copied to the headers before its ids are forgotten.
        return replace(rolled(world), group=outcome.group)

    def _aborted(self, world: World, driver: Driver) -> World:
        """Spark calls abort with what it has: only what is open is touched."""
        for part in driver.parts:
            for header in world.headers:
                is_named = part is not None and header.id == part.txn
                if is_named and world.state_of(header) == "OPEN":
                    world = _abort(world, header)
        return world

    # --- the tasks

    def _task_steps(self, world: World, attempt: Attempt) -> Iterator[tuple[World, Attempt | None]]:
        try:
            if attempt.ticket is None:
                yield self._opens(world, attempt)
            elif attempt.may_begin:
                yield self.writes(world, attempt)
        except MagnetarError:
            return  # it fails

    def _opens(self, world: World, attempt: Attempt) -> tuple[World, Attempt | None]:
        write = attempt.write
        group_commit.check_writer(write, self._known(world))
        group = transitions.opened(
            world.group, APP, write.generation, write.run, now_ms=0, retired_max=LIMIT
        )
        world = replace(world, group=group)
        ticket = Ticket(APP, group.epoch, 0)
        if group_commit.plan(write, group.sequence) is TaskPlan.SKIP:
            return self._tells(world, attempt, TaskReport(write, ticket, is_skipped=True)), None
        return world, attempt._replace(ticket=ticket, may_begin=True)

    def writes(self, world: World, attempt: Attempt) -> tuple[World, Attempt | None]:
        """Begin a transaction, send the rows, tell the driver."""
        assert attempt.ticket is not None
        write = attempt.write
        member = GroupMembership(APP, attempt.ticket.epoch, write.sequence)
        transitions.check_new_member(world.group, member)
        txn = metadata_id(0, len(world.headers))
        header = transitions.begun(txn, now_ms=0, timeout_ms=1, group=member)
        world = replace(
            world,
            headers=(*world.headers, header),
            contents=(*world.contents, (write.generation, write.sequence, attempt.rows)),
        )
        part = TaskReport(write, attempt.ticket, txn, rows=len(attempt.rows))
        return self._tells(world, attempt, part), None

    def _tells(self, world: World, attempt: Attempt, part: TaskReport) -> World:
        """The first attempt of a task that is done counts; its driver may be gone."""
        write = attempt.write
        drivers = list(world.drivers)
        for number, driver in enumerate(drivers):
            is_its = (driver.run, driver.batch) == (write.run, write.sequence)
            if is_its and driver.parts[attempt.partition] is None:
                parts = list(driver.parts)
                parts[attempt.partition] = part
                drivers[number] = driver._replace(parts=tuple(parts))
        return replace(world, drivers=tuple(drivers))

    # --- the server

    def _known(self, world: World) -> Known | None:
        group = world.group
        return None if group is None else Known(group.generation, group.sequence)

    def _expires(self, world: World) -> Iterator[World]:
        if world.expiries:
            for header in world.headers:
                if world.state_of(header) == "OPEN":
                    yield replace(_abort(world, header), expiries=world.expiries - 1)


class Explored(Protocol[W]):
    """A model of something."""

    def first(self) -> W: ...

    def check(self, world: W, /) -> None: ...

    def successors(self, world: W, /) -> Iterator[W]: ...


def explore(model: Explored[W], most: int = 400_000) -> int:
    """Visit every state; how many there are. Raises `Harm`."""
    first = model.first()
    seen, waiting = {first}, [first]
    while waiting:
        world = waiting.pop()
        model.check(world)
        for after in model.successors(world):
            if after not in seen:
                seen.add(after)
                waiting.append(after)
        assert len(seen) < most, "the model is too large to explore"
    return len(seen)


def rolled(world: World) -> World:
    """With headers that say what the record says."""
    states = [world.state_of(each) for each in world.headers]
    now = [
        each if state == "OPEN" else transitions.ended(each, state, 0)
        for each, state in zip(world.headers, states, strict=True)
    ]
    return replace(world, headers=tuple(now))


def _abort(world: World, header: Header) -> World:
    group = transitions.member_aborted(world.group, header, now_ms=0, aborted_max=LIMIT)
    return world if group is None else replace(world, group=group)
