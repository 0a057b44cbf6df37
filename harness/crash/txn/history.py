"""What clients of a consume-transform-produce load asked for, were told and saw.

Owns: `TxnHistory`: all transactions that were begun, what each was to do and how it ended, what a
consumer that reads along saw, and every violation of a rule.

Invariants, each a rule for the server:
1. A transaction's outcome is the one that was asked for. COMMIT may become ABORTED only by the
   deadline; what was never asked to commit is aborted. The answer never changes.
2. What a consumer sees belongs to a transaction that was asked to commit, and was not aborted.
3. An input is acknowledged by one committed transaction, and each of its outputs has one place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from magnetar.model.ids import Position
from magnetar.txn.ids import to_text
from magnetar.txn.records import State
from magnetar.wire.messages import TxnId

INPUT: Final = "persistent://public/default/numbers"
OUTPUTS: Final = ("persistent://public/default/even", "persistent://public/default/odd")
SUBSCRIPTION: Final = "transform"
ALONG: Final = "along"
"""The subscription of the consumers that read outputs while the load runs."""


class TxnFault(Enum):
    """What can be wrong."""

    LOST = "lost"
    DOUBLED = "doubled"
    EXPOSED = "not committed, and seen"
    REVERSED = "decided otherwise"
    STUCK = "stuck"
    LEFT_BEHIND = "records left behind"
    FAILED = "failed"


class Output(NamedTuple):
    """A message that a transaction wrote: the transformed input."""

    txn: str
    number: int

    @property
    def topic(self) -> str:
        return OUTPUTS[self.number % len(OUTPUTS)]

    def payload(self) -> bytes:
        return f"{self.txn} {self.number}".encode()

    @classmethod
    def of(cls, payload: bytes) -> Output:
        txn, _, number = payload.decode().partition(" ")
        return cls(txn, int(number))


@dataclass(slots=True)
class Attempt:
    """One transaction, as the client that began it knows it."""

    txn: TxnId
    numbers: Sequence[int]
    """The inputs that it transforms and acknowledges."""
    deadline: float
    """Wall time before which the server must not end it by itself."""
    asked: State = "OPEN"
    """What END_TXN was sent for; OPEN: it was not sent."""
    known: State = "OPEN"
    """What the server said."""

    @property
    def name(self) -> str:
        return to_text(self.txn)

    @property
    def may_be_over(self) -> bool:
        return time.time() >= self.deadline

    def __str__(self) -> str:
        return f"{self.name} {list(self.numbers)} asked {self.asked}, known {self.known}"


@dataclass(slots=True)
class TxnHistory:
    """Of one data folder, over all lives of its server."""

    inputs: int = 0
    """So many numbered messages have a receipt: 0, 1, 2..."""
    attempts: dict[str, Attempt] = field(default_factory=dict)
    transformed: dict[int, str] = field(default_factory=dict)
    """By which transaction each input was, as answered."""
    seen: dict[str, dict[Position, Output]] = field(default_factory=dict)
    """By topic: what was delivered to whoever reads along."""
    places: dict[Output, Position] = field(default_factory=dict)
    """Where each output was seen first."""
    where: str = ""
    """What is going on, for the texts of violations."""
    faults: Counter[TxnFault] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    @property
    def is_transformed(self) -> bool:
        return len(self.transformed) >= self.inputs

    def fault(self, fault: TxnFault, text: str) -> None:
        self.faults[fault] += 1
        self.texts.append(f"{self.where}: {fault.value}: {text[:500]}")

    def began(self, attempt: Attempt) -> None:
        if attempt.name in self.attempts:
            self.fault(TxnFault.DOUBLED, f"the id of {self.attempts[attempt.name]} came again")
        self.attempts[attempt.name] = attempt

    def ended(self, attempt: Attempt, state: State) -> None:
        """The server said how a transaction ended."""
        if attempt.known not in ("OPEN", state):
            self.fault(TxnFault.REVERSED, f"{attempt} is {state} now")
        if state == "COMMITTED" and attempt.asked != "COMMITTED":
            self.fault(TxnFault.REVERSED, f"{attempt} is {state}")
        if state == "ABORTED" and attempt.asked == "COMMITTED" and not attempt.may_be_over:
            self.fault(TxnFault.REVERSED, f"{attempt} is {state} before its deadline")
        attempt.known = state
        self.events[state.lower()] += 1
        if state == "COMMITTED":
            for number in attempt.numbers:
                first = self.transformed.setdefault(number, attempt.name)
                if first != attempt.name:
                    text = f"{number} was acknowledged by {self.attempts[first]} and by {attempt}"
                    self.fault(TxnFault.DOUBLED, text)

    def saw(self, topic: str, position: Position, output: Output) -> None:
        """It was delivered while transactions are under way."""
        seen = self.seen.setdefault(topic, {})
        text = f"{topic} {position}: {output}"
        if seen.setdefault(position, output) != output:
            self.fault(TxnFault.DOUBLED, f"{text}, and before {seen[position]}")
        first = self.places.setdefault(output, position)
        if first != position:
            self.fault(TxnFault.DOUBLED, f"{text}, and at {first}")
        attempt = self.attempts.get(output.txn)
        if attempt is None:
            self.fault(TxnFault.EXPOSED, f"{text} is nobody's")
        elif attempt.asked != "COMMITTED" or attempt.known == "ABORTED":
            self.fault(TxnFault.EXPOSED, f"{text} of {attempt}")
