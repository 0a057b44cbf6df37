"""Writers that decide many transactions at once, in a simulation, and their zombies.

Owns: `lead`: a distributed writer over its runs. Each run begins some transactions for a sequence,
names winners, and asks for that decision more than once; former runs go on meanwhile.

Invariants:
1. A transaction is named as a winner only if all that it sent has receipts.
2. A decision whose answer did not come is asked for again until there is one.
"""

from __future__ import annotations

import asyncio
from random import Random

from harness.simulation.scalable.links import CLIENT_ERRORS
from harness.simulation.txn.clients import commit_group, open_group
from harness.simulation.txn.history import Attempt
from harness.simulation.txn.session import Session, TxnStage, answered, member, over_processes
from magnetar.errors import RequestError
from magnetar.txn.coordinator_partitions import partition_of
from magnetar.txn.spec import names


async def lead(stage: TxnStage, random: Random, name: str, application: str) -> None:
    """Run after run."""
    runs = 0

    async def work(session: Session) -> None:
        nonlocal runs
        runs += 1
        run = _Run(session, application, f"{name}-{runs}")
        await run.open()
        for _ in range(random.choice((1, 3, 6))):
            if stage.world.ending:
                break
            await asyncio.sleep(random.expovariate(5))
            await run.sequence_once()
        if random.random() < 0.5:
            await run.overtaken(f"{name}-{runs}-next")

    await over_processes(stage, random, name, work, until=lambda: stage.world.ending)


class _Run:
    """One run of a writer."""

    def __init__(self, session: Session, application: str, run: str) -> None:
        self._session = session
        self._stage = session.stage
        self._random = session.random
        self._history = session.history
        self._application = application
        self._run = run
        self._epoch = 0
        self._sequence = 0

    async def open(self) -> None:
        self._epoch, last = await answered(
            self._stage,
            self._random,
            lambda: open_group(self._session.links, self._application, "generation", self._run),
        )
        self._stage.world.note(f"group {self._application}: epoch {self._epoch} of {self._run}")
        self._sequence = last + 1

    async def sequence_once(self) -> None:
        """Begin, write and decide one sequence."""
        random = self._random
        attempts = [await self._write() for _ in range(random.choice((1, 2, 3)))]
        winners = [each for each, whole in attempts if whole and random.random() < 0.8]
        for attempt, _ in attempts:
            if attempt not in winners:
                await self._lose(attempt)
        if random.random() < 0.15:
            return  # left alone
        if winners and random.random() < 0.1:
            await self._end_alone(winners[0])
        await asyncio.sleep(random.choice((0.0, 0.0, 0.2)))
        await self._commit(winners)
        self._sequence += 1

    async def _write(self) -> tuple[Attempt, bool]:
        session = self._session
        group = member(self._application, self._epoch, self._sequence)
        attempt = await session.begin(group, partition_of(self._application))
        return attempt, await session.send_all(attempt, session.targets())

    async def _lose(self, attempt: Attempt) -> None:
        """One that is no winner: aborted, or left for the decision on the others."""
        if self._random.random() < 0.4:
            await self._session.end(attempt, commit=False)

    async def _end_alone(self, attempt: Attempt) -> None:
        """A member cannot be committed alone."""
        await self._session.end(attempt, commit=True)
        if attempt.answer == "COMMITTED":
            text = f"{attempt.name} is one of a group, and was committed alone"
            self._stage.world.broken(names.ONE_DECISION, text)

    async def _commit(self, winners: list[Attempt]) -> None:
        asked = [self._asked(self._session, winners)]
        if self._random.random() < 0.3:
            asked.append(self._asked(self._session, winners))
        if self._random.random() < 0.2:
            asked.append(self._asked(self._session, winners[:-1]))
        results = await asyncio.gather(*asked, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, CLIENT_ERRORS):
                raise result
        if all(isinstance(result, BaseException) for result in results):
            raise next(each for each in results if isinstance(each, BaseException))

    async def _asked(self, session: Session, winners: list[Attempt]) -> None:
        txns = [each.txn for each in winners]
        replayed = await answered(
            self._stage,
            self._random,
            lambda: commit_group(
                session.links, self._application, self._epoch, self._sequence, txns
            ),
        )
        self._stage.world.note(
            f"group {self._application} {self._epoch}.{self._sequence}: "
            f"{[each.name for each in winners]}, {'again' if replayed else 'decided'}"
        )
        for attempt in winners:
            state = self._stage.world.mirror.truth(attempt.name).decision
            if not replayed or state is None:
                self._history.answered(attempt, "COMMITTED")

    async def overtaken(self, run: str) -> None:
        """Another run begins; this one does not know, and goes on."""
        attempts = [await self._write()]
        other = _Run(self._session, self._application, run)
        await other.open()
        winners = [each for each, whole in attempts if whole]
        try:
            await self._asked(self._session, winners)
        except RequestError as error:
            self._stage.world.note(f"{self._run} is told {error.wire_code!r}")
        else:
            text = f"{self._run} of epoch {self._epoch} has decided after {other._epoch} began"
            if other._epoch != self._epoch:
                self._stage.world.broken(names.ONE_DECISION, text)
        for attempt in winners:
            await self._session.zombie(attempt)
