"""A model of drivers that commit with tokens in a topic of notes, for exploration.

Owns: `SingleModel`, which gives every successor of a state. What a driver makes of the notes, and
which attempts it accepts, is decided by `magnetar.spark.sink.single_commit`; here are the topic,
its exclusive producer, the transactions, and Spark. Every step may be the last of its process; a
driver that was replaced goes on as long as it is let.

Checked in every state: no row is there twice, a batch is there whole or not at all, and what a
checkpoint says is done is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from magnetar.errors import MagnetarError
from magnetar.spark.sink import group_commit, single_commit
from magnetar.spark.sink.group_commit import TaskPlan, TaskReport, WriteId
from magnetar.spark.sink.single_commit import Note, Notes
from magnetar.wire.messages import TxnId
from tests.unit.spark.group_model import ROWS, Harm

State = Literal["OPEN", "COMMITTED", "ABORTED"]


class Txn(NamedTuple):
    """A transaction, and what tasks wrote in it."""

    batch: int
    state: State = "OPEN"
    rows: tuple[str, ...] = ()


class Attempt(NamedTuple):
    """One attempt of a task, before or after its claim."""

    run: str
    txn: int
    partition: int
    number: int
    has_claimed: bool = False


class Driver(NamedTuple):
    """One run; `step` is what it does next."""

    run: str
    step: str = "begin"
    batch: int = 0
    txn: int = -1
    parts: tuple[int | None, ...] = ()
    """By task, the attempt that Spark chose."""


class World(NamedTuple):
    """Everything there is."""

    txns: tuple[Txn, ...] = ()
    notes: tuple[Note, ...] = ()
    claims: tuple[Note, ...] = ()
    owner: str = ""
    """Who has the exclusive producer of the notes."""
    drivers: tuple[Driver, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    done: tuple[int, ...] = ()
    started: int = 0
    spare: int = 0
    expiries: int = 0
    numbers: int = 0

    def ended(self, txn: int, state: State) -> World:
        """A transaction that is decided stays so."""
        if self.txns[txn].state != "OPEN":
            return self
        txns = list(self.txns)
        txns[txn] = txns[txn]._replace(state=state)
        return self._replace(txns=tuple(txns))


@dataclass(frozen=True)
class SingleModel:
    """What may happen. Subclasses of tests break a rule."""

    runs: int = 2
    batches: int = 1
    tasks: tuple[tuple[str, ...], ...] = (("a", "b"),)
    """The rows of each."""
    spare: int = 0
    expiries: int = 0

    def first(self) -> World:
        return World(spare=self.spare, expiries=self.expiries)

    def check(self, world: World) -> None:
        seen = Counter(
            (each.batch, row)
            for each in world.txns
            if each.state == "COMMITTED"
            for row in each.rows
        )
        for batch in range(self.batches):
            counts = {seen[batch, row] for row in ROWS}
            if counts not in ({0}, {1}) or (batch in world.done and counts != {1}):
                raise Harm(f"batch {batch}: {dict(seen)}, done: {world.done}")

    def successors(self, world: World) -> Iterator[World]:
        """The same, once for all that come to the same."""
        return map(tidied, self.steps(world))

    def steps(self, world: World) -> Iterator[World]:
        """Everything that may happen next."""
        if world.started < self.runs:
            drivers = (*world.drivers, Driver(f"r{world.started}"))
            yield world._replace(drivers=drivers, started=world.started + 1)
        for place, driver in enumerate(world.drivers):
            for after, then in self._driver_steps(world, driver):
                kept = list(after.drivers)
                kept[place : place + 1] = [] if then is None else [then]
                yield after._replace(drivers=tuple(kept))
        for attempt in world.attempts:
            others = tuple(each for each in world.attempts if each is not attempt)
            yield from self._task_steps(world._replace(attempts=others), attempt)
        if world.expiries:
            for txn, each in enumerate(world.txns):
                if each.state == "OPEN":
                    yield world.ended(txn, "ABORTED")._replace(expiries=world.expiries - 1)

    # --- the driver

    def _driver_steps(self, world: World, driver: Driver) -> Iterator[tuple[World, Driver | None]]:
        yield world, None  # killed
        try:
            taken = getattr(self, f"_{driver.step}")(world, driver)
        except MagnetarError:
            yield world.ended(driver.txn, "ABORTED"), None  # the query fails, and Spark aborts
            return
        if taken is not None:
            yield taken
        if driver.step == "write" and world.spare:
            for task, chosen in enumerate(driver.parts):
                if chosen is None:
                    yield self._try(world._replace(spare=world.spare - 1), driver, task), driver

    def _begin(self, world: World, driver: Driver) -> tuple[World, Driver] | None:
        left = [batch for batch in range(self.batches) if batch not in world.done]
        if not left:
            return None
        txn = len(world.txns)
        world = world._replace(txns=(*world.txns, Txn(left[0])))
        driver = Driver(driver.run, "write", left[0], txn, (None,) * len(self.tasks))
        for task in range(len(self.tasks)):
            world = self._try(world, driver, task)
        return world, driver

    def _try(self, world: World, driver: Driver, task: int) -> World:
        attempt = Attempt(driver.run, driver.txn, task, world.numbers)
        return world._replace(attempts=(*world.attempts, attempt), numbers=world.numbers + 1)

    def _write(self, world: World, driver: Driver) -> tuple[World, Driver] | None:
        return None if None in driver.parts else (world, driver._replace(step="fence"))

    def _fence(self, world: World, driver: Driver) -> tuple[World, Driver]:
        note = Note("fence", "g", driver.batch, nonce=_nonce(driver))
        world = world._replace(owner=driver.run, notes=(*world.notes, note))
        return world, driver._replace(step="read")

    def _read(self, world: World, driver: Driver) -> tuple[World, Driver] | None:
        """All notes up to its own fence; None: it has to wait."""
        found = Notes()
        for note in world.notes:
            state = world.txns[note.txn[1]].state if note.kind == "token" else "COMMITTED"
            if note.kind == "fence" and note.nonce == _nonce(driver):
                return self._decide(world, driver, found)
            if state == "OPEN":
                return self.meets_undecided(world, driver, found)
            if state == "COMMITTED" and (txn := found.take(note)) is not None:
                world = world.ended(txn.least, "ABORTED")
        raise AssertionError("it has sent its fence")

    def meets_undecided(
        self, world: World, driver: Driver, found: Notes
    ) -> tuple[World, Driver] | None:
        """What is behind an undecided transaction is not delivered."""
        return None

    def _decide(self, world: World, driver: Driver, found: Notes) -> tuple[World, Driver]:
        write = WriteId("g", "g", driver.run, driver.batch)
        if group_commit.plan(write, found.committed_in("g")) is TaskPlan.SKIP:
            return world.ended(driver.txn, "ABORTED"), driver._replace(step="mark")
        txn = TxnId(0, driver.txn)
        parts = [
            TaskReport(write, txn=txn, attempt=each) for each in driver.parts if each is not None
        ]
        single_commit.check_attempts(write, single_commit.claims_of(world.claims, txn), parts)
        return world, driver._replace(step="announce")

    def _announce(self, world: World, driver: Driver) -> tuple[World, Driver]:
        return self._sent(world, driver, "announcement"), driver._replace(step="token")

    def _token(self, world: World, driver: Driver) -> tuple[World, Driver]:
        if world.txns[driver.txn].state != "OPEN":
            raise MagnetarError("the transaction is over")
        return self._sent(world, driver, "token"), driver._replace(step="end")

    def _sent(self, world: World, driver: Driver, kind: Literal["announcement", "token"]) -> World:
        self.check_owner(world, driver)
        note = Note(kind, "g", driver.batch, txn=(0, driver.txn))
        return world._replace(notes=(*world.notes, note))

    def check_owner(self, world: World, driver: Driver) -> None:
        if world.owner != driver.run:
            raise MagnetarError("the producer was fenced")

    def _end(self, world: World, driver: Driver) -> tuple[World, Driver]:
        if world.txns[driver.txn].state == "ABORTED":
            raise MagnetarError("the transaction is over")
        return world.ended(driver.txn, "COMMITTED"), driver._replace(step="mark")

    def _mark(self, world: World, driver: Driver) -> tuple[World, Driver]:
        done = tuple(sorted({*world.done, driver.batch}))
        return world._replace(done=done), Driver(driver.run)

    # --- the tasks

    def _task_steps(self, world: World, attempt: Attempt) -> Iterator[World]:
        yield world  # it died
        if not attempt.has_claimed and self.may_claim(world):
            claim = Note("claim", "g", 0, txn=(0, attempt.txn), attempt=attempt.number)
            yield world._replace(
                claims=(*world.claims, claim),
                attempts=(*world.attempts, attempt._replace(has_claimed=True)),
            )
        elif attempt.has_claimed and world.txns[attempt.txn].state == "OPEN":
            txns = list(world.txns)
            before = txns[attempt.txn]
            txns[attempt.txn] = before._replace(rows=before.rows + self.tasks[attempt.partition])
            world = world._replace(txns=tuple(txns))
            yield self._told(world, attempt)
            yield world  # it died before Spark was told

    def may_claim(self, world: World) -> bool:
        """While a driver that has read the claims is about to commit, nobody claims more."""
        return not any(each.step in ("announce", "token", "end") for each in world.drivers)

    def _told(self, world: World, attempt: Attempt) -> World:
        drivers = list(world.drivers)
        for place, driver in enumerate(drivers):
            if (driver.run, driver.txn) == (attempt.run, attempt.txn):
                parts = list(driver.parts)
                if parts[attempt.partition] is None:
                    parts[attempt.partition] = attempt.number
                drivers[place] = driver._replace(parts=tuple(parts))
        return world._replace(drivers=tuple(drivers))


def tidied(world: World) -> World:
    """Worlds that differ only in what nobody can see are one.

    Nobody sees in which order attempts were started and claims were made. What a task does in a
    transaction that is over shows only to the driver that began it.
    """
    driven = {each.txn for each in world.drivers}
    shows = {at for at, each in enumerate(world.txns) if at in driven or each.state == "OPEN"}
    return world._replace(
        claims=tuple(sorted((each for each in world.claims if each.txn[1] in driven), key=_number)),
        attempts=tuple(sorted(each for each in world.attempts if each.txn in shows)),
    )


def _number(claim: Note) -> int:
    return claim.attempt


def _nonce(driver: Driver) -> str:
    return f"{driver.run}-{driver.txn}"
