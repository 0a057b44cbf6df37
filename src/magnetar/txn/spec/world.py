"""Bounded worlds, and what an action is (pure).

Owns: `Scenario` (who takes part and how much may happen), `World` (a scenario under a set of
rules), `Action` and the decorator that registers one, and how a transaction's state is read.

Invariants:
1. An action is one durable write, one read, or one step in memory: a crash or another's step fits
   between any two of them.
2. A write that was sent before its owner lost ownership may arrive afterwards: a zombie's next
   step is that late write. A write that never arrives is a zombie that stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from magnetar.txn.spec.rules import Rules
from magnetar.txn.spec.state import (
    ABORTED,
    COMMITTED,
    MISSING,
    NO_PIN,
    OPEN,
    UNKNOWN,
    Budget,
    Group,
    State,
)


@dataclass(frozen=True)
class Scenario:
    """A bounded world: its participants, and how much may happen."""

    name: str
    text: str
    txns: int = 1
    # Per transaction: its messages to each segment.
    sends: tuple[tuple[int, ...], ...] = ((0,),)
    # Acks of each transaction, of `messages` messages.
    acks: tuple[int, ...] = ()
    messages: int = 0
    # Epoch and sequence of each transaction in the group; empty: no group.
    members: tuple[tuple[int, int], ...] = ()
    # The transactions that each COMMIT_GROUP lists; empty: one for each member.
    listed: tuple[tuple[int, ...], ...] = ()
    # Members that a deadline, an END_TXN abort or an operator may abort.
    abortable: tuple[int, ...] = ()
    budget: Budget = field(default_factory=Budget)
    # A former owner goes on until it notices; else it stops at once.
    zombies: bool = False
    # Segment 1 is the child of segment 0: nobody writes to it before 0 is sealed.
    child: bool = False
    dispatch: bool = False
    # How many states it has under all rules, up to the names of transactions if symmetric.
    states: int = 0
    # Transactions may change places without changing anything.
    symmetric: bool = False


class World(NamedTuple):
    """A scenario under a set of rules."""

    scenario: Scenario
    rules: Rules


Steps: TypeAlias = Iterator[tuple[str, State]]


class Action(NamedTuple):
    """One kind of step. `steps` yields where it happens and what comes of it."""

    name: str
    actor: str
    kind: str
    text: str
    steps: Callable[[World, State], Steps]


class Actions(list[Action]):
    """The actions of a module, in the order of their definition."""

    def __init__(self, actor: str) -> None:
        super().__init__()
        self._actor = actor

    def __call__(
        self, name: str, kind: str, text: str
    ) -> Callable[[Callable[[World, State], Steps]], Callable[[World, State], Steps]]:
        def register(steps: Callable[[World, State], Steps]) -> Callable[[World, State], Steps]:
            self.append(Action(name, self._actor, kind, text, steps))
            return steps

        return register


def verdict(world: World, group: Group, txn: int) -> str:
    """What a group record says of a member."""
    epoch, sequence = world.scenario.members[txn]
    # As `transitions.member_state`, with a rule that can be switched off.
    outdated = epoch < group.epoch
    if txn in group.decided and (world.rules.decided_before_epoch or not outdated):
        return COMMITTED
    if outdated or txn in group.aborted or sequence <= group.sequence:
        return ABORTED
    return OPEN


def truth(world: World, state: State, txn: int) -> str:
    """The state of a transaction, read from all its records in one moment."""
    header = state.headers[txn]
    # A final header wins: it is a copy of what the record said, perhaps of a forgotten sequence.
    if header == OPEN and world.scenario.members:
        return verdict(world, state.group, txn)
    return header


def look(world: World, state: State, txn: int, peeked: str) -> tuple[bool, str]:
    """One read of a transaction's state: (True, state), or (False, what to remember of the first).

    A member of a group takes two reads. A missing header is missing whatever the group says.
    """
    header = state.headers[txn]
    if not world.scenario.members:
        return True, header
    # The group first: a decision that is rolled forward and forgotten in between is then found in
    # the header. The other way round it is found in neither.
    if world.rules.group_before_header:
        if peeked == UNKNOWN:
            return False, verdict(world, state.group, txn)
        return True, peeked if header == OPEN else header
    # (Only without `group_before_header`.)
    if peeked == UNKNOWN:
        return False, f"header {header}"
    header = peeked.removeprefix("header ")
    return True, verdict(world, state.group, txn) if header == OPEN else header


def has_ops(state: State, txn: int) -> bool:
    """Is any op record of this transaction left?"""
    return any(segment.pins[txn] != NO_PIN for segment in state.segments) or any(
        op.txn == txn for op in state.subscription.ops
    )


def is_final(outcome: str) -> bool:
    return outcome not in (MISSING, OPEN)
