"""What clients of transactions did and saw, and whether the promises to them were kept.

Owns: `TxnHistory`, told of every send, acknowledgement, end and delivery. It compares them with
what is durable (`txn_mirror`): invariants 1, 5 and 6 with each delivery, 2 with each answer, 9 with
each receipt, and 3 when everything is over.

Invariants:
1. A delivery is judged by what was durable when the broker wrote it, whenever it arrives.
2. A commit is asked for only when every send and acknowledgement of it was answered.
3. An input is one message at one position, for one subscription: it is transformed by exactly one
   committed transaction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from harness.simulation.txn.clients import Taken
from harness.simulation.txn.truth import Stored, place_of
from magnetar.errors import WireCode
from magnetar.model.ids import Position
from magnetar.txn.ids import to_text
from magnetar.txn.records import State
from magnetar.txn.spec import names
from magnetar.wire.messages import TxnId

if TYPE_CHECKING:
    from harness.simulation.txn.world import TxnWorld

KNOWN_SECONDS: Final = 15.0
"""By then, undisturbed, every broker knows of a decision."""

_SHOWN: Final = 3

Input = tuple[str, str, Position, int]
"""Subscription, place, position, index in the batch."""


@dataclass(slots=True)
class Attempt:
    """A transaction, as its client knows it."""

    txn: TxnId
    sends: dict[int, bool] = field(default_factory=dict)
    """Numbers of messages; whether there was a receipt."""
    inputs: list[Input] = field(default_factory=list)
    """What was acknowledged, as answered."""
    answer: State | None = None
    answered_at: float = 0.0

    @property
    def name(self) -> str:
        return to_text(self.txn)


@dataclass(slots=True)
class Reading:
    """What a reader got, in order."""

    place: str
    positions: list[Position] = field(default_factory=list)
    ended_at: float | None = None


class TxnHistory:
    """Of one run."""

    def __init__(self, world: TxnWorld) -> None:
        self.attempts: dict[str, Attempt] = {}
        self.readings: list[Reading] = []
        self.events: Counter[str] = Counter()
        self.consumes: dict[str, Callable[[str], bool]] = {}
        """By subscription that must get everything: whether it consumes a place."""
        self.also_delivered: Callable[[Taken, str], None] | None = None
        """Told of each delivery, with its subscription."""
        self._world = world
        self._mirror = world.mirror
        self._numbers = 0

    # --- what clients do

    def new_numbers(self, count: int) -> tuple[int, ...]:
        """Of messages: none comes twice."""
        first = self._numbers + 1
        self._numbers += count
        return tuple(range(first, first + count))

    def began(self, txn: TxnId) -> Attempt:
        attempt = Attempt(txn)
        if attempt.name in self.attempts:
            self._world.broken(names.ONE_DECISION, f"the id {attempt.name} was given twice")
        self.attempts[attempt.name] = attempt
        self._note(f"{attempt.name} begins")
        return attempt

    def sent(self, attempt: Attempt | None, numbers: tuple[int, ...], *, receipt: bool) -> None:
        """A send is under way, or has its receipt."""
        if attempt is not None:
            for number in numbers:
                attempt.sends[number] = receipt or attempt.sends.get(number, False)
        who = "-" if attempt is None else attempt.name
        self._note(f"{who} {'receipt of' if receipt else 'sends'} {numbers}")

    def acked(self, attempt: Attempt, inputs: list[Input]) -> None:
        attempt.inputs += inputs
        self._note(f"{attempt.name} has acknowledged {inputs}")

    def ended(self, attempt: Attempt, asked: State, refusal: WireCode | None) -> State | None:
        """END_TXN was answered; the outcome, if that tells it."""
        truth = self._mirror.truth(attempt.name)
        self._note(f"{attempt.name} {asked}: {'ok' if refusal is None else refusal.name}")
        state: State | None = None
        if refusal is None:
            state = asked
        elif refusal is WireCode.INVALID_TXN_STATUS:
            state = "ABORTED" if asked == "COMMITTED" else "COMMITTED"
        elif refusal is WireCode.TRANSACTION_NOT_FOUND:
            if truth.header is not None:
                text = f"{attempt.name} has a header, and is not found"
                self._world.broken(names.ONE_DECISION, text)
            return None
        if state is None:
            return None
        self.answered(attempt, state)
        return state

    def answered(self, attempt: Attempt, state: State) -> None:
        """A coordinator has said how a transaction ended."""
        truth = self._mirror.truth(attempt.name)
        if truth.decision != state or attempt.answer not in (None, state):
            text = f"{attempt.name} is said to be {state}, was {attempt.answer}, is {truth}"
            self._world.broken(names.ONE_DECISION, text)
        if attempt.answer is None:
            attempt.answer, attempt.answered_at = state, self._world.now()
        self.events[state.lower()] += 1

    def taken_late(self, attempt: Attempt, asked_at: float, what: str) -> None:
        """Something was accepted that was asked for after the end of a transaction."""
        if attempt.answer is None or attempt.answered_at > asked_at:
            return
        known_for = asked_at - attempt.answered_at
        if len(self._world.hosts) == 1 or (self._world.calm and known_for > KNOWN_SECONDS):
            text = f"{attempt.name} is {attempt.answer} for {known_for:.3f} s; {what} is accepted"
            self._world.broken(names.FENCE, text)

    # --- what clients see

    def reading(self, topic: str) -> Reading:
        """Somebody reads a topic from its beginning, in order."""
        self.readings.append(Reading(place_of(topic)))
        return self.readings[-1]

    def read_until(self, reading: object) -> None:
        if isinstance(reading, Reading) and reading.ended_at is None:
            reading.ended_at = self._world.now()

    def delivered(self, taken: Taken, subscription: str, reading: object) -> None:
        place, position, moment = place_of(taken.topic), taken.position, taken.sent_at
        self._world.findings.operations += 1
        self._note(f"{subscription} of {place} gets {position} {taken.numbers} of {moment:.6f}")
        stored = self._mirror.places[place].entries.get(position)
        what = f"{subscription} gets {position} of {place}"
        if stored is None or stored.numbers != taken.numbers:
            text = f"{what}: {taken.numbers}, and stored is {stored}"
            self._world.broken(names.ALL_OR_NOTHING, text)
            return
        if stored.txn is not None and not self._mirror.truth(stored.txn).was("COMMITTED", moment):
            text = f"{what} at {moment:.3f}: {self._mirror.truth(stored.txn)}"
            self._world.broken(names.READ_COMMITTED, text)
        pin = self._mirror.undecided_below(place, position, moment)
        if pin is not None:
            self._world.broken(names.GATE, f"{what} at {moment:.3f}, above {pin}")
        bare = self._mirror.unmarked_below(place, position, moment)
        if bare is not None:
            text = f"{what} at {moment:.3f}, above {bare}: aborted, and not known as such there"
            self._world.broken(names.ABORTED_STAYS_KNOWN, text)
        if self.also_delivered is not None:
            self.also_delivered(taken, subscription)
        if isinstance(reading, Reading):
            if reading.positions and position <= reading.positions[-1]:
                text = f"{what} after {reading.positions[-1]}"
                self._world.broken(names.SEALING_IRRELEVANT, text)
            reading.positions.append(position)

    def _note(self, text: str) -> None:
        self._world.note(text)

    # --- what is left to do

    def untransformed(self) -> dict[str, int]:
        """By subscription: how many messages no committed transaction has acknowledged."""
        by_subscription: Counter[str] = Counter()
        done = self._transformed()
        for subscription, is_consumed in self.consumes.items():
            for place in filter(is_consumed, list(self._mirror.places)):
                for each in self._inputs(subscription, place):
                    by_subscription[subscription] += each not in done
        return {name: count for name, count in by_subscription.items() if count}

    def first_untransformed(self, subscription: str, place: str) -> Position | None:
        done = self._transformed()
        for each in self._inputs(subscription, place):
            if each not in done:
                return each[2]
        return None

    def _inputs(self, subscription: str, place: str) -> list[Input]:
        return [
            (subscription, place, position, index)
            for position, stored in self._mirror.visible(place)
            for index in range(len(stored.numbers))
        ]

    def _transformed(self) -> dict[Input, list[str]]:
        found: dict[Input, list[str]] = defaultdict(list)
        for attempt in self.attempts.values():
            if self._mirror.truth(attempt.name).decision == "COMMITTED":
                for each in attempt.inputs:
                    found[each].append(attempt.name)
        return found

    # --- when everything is over

    async def check_end(self) -> None:
        """Invariant 3, and of 6 that whoever reads from the beginning gets the committed set."""
        self._check_inputs()
        self._check_outputs()
        for reading in self.readings:
            self._check_reading(reading)

    def _check_inputs(self) -> None:
        done = self._transformed()
        twice = {
            each: txns for each, txns in done.items() if len(txns) > 1 and each[0] in self.consumes
        }
        for each, txns in list(twice.items())[:_SHOWN]:
            self._world.broken(names.ALL_OR_NOTHING, f"{each} was acknowledged by {txns}")
        left = self.untransformed()
        if left:
            text = f"messages that nobody gets, though nothing disturbs: {left}"
            self._world.broken(names.ALL_OR_NOTHING, text)

    def _check_outputs(self) -> None:
        """What a committed transaction has a receipt for stands in a log, once."""
        found: Counter[tuple[str, int]] = Counter()
        for place in self._mirror.places.values():
            for stored in place.entries.values():
                for number in stored.numbers if stored.txn is not None else ():
                    assert stored.txn is not None
                    found[stored.txn, number] += 1
        for attempt in self.attempts.values():
            if self._mirror.truth(attempt.name).decision != "COMMITTED":
                continue
            for number, has_receipt in attempt.sends.items():
                times = found[attempt.name, number]
                if times > 1 or (has_receipt and times == 0):
                    text = f"{attempt.name} is committed; {number} is stored {times} times"
                    self._world.broken(names.ALL_OR_NOTHING, text)

    def _check_reading(self, reading: Reading) -> None:
        if not reading.positions:
            return
        last, got = reading.positions[-1], set(reading.positions)
        ended = self._world.now() if reading.ended_at is None else reading.ended_at
        missed: list[tuple[Position, Stored]] = []
        for position, stored in self._mirror.visible(reading.place):
            dropped_at = self._mirror.dropped.get(position.ledger_id)
            was_there = dropped_at is None or dropped_at > ended
            if position < last and position not in got and was_there:
                missed.append((position, stored))
        if missed:
            text = f"a reader of {reading.place} got {last} and not {missed[:_SHOWN]}"
            self._world.broken(names.ABORTED_STAYS_KNOWN, text)
