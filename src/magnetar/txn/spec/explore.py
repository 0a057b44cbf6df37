"""Visits every state of a bounded world, breadth first (pure).

Owns: `explore`, which checks the invariants on all states and steps that can be reached, and the
`Violation` it finds, with the shortest way there; `swapped`, a state with transaction 0 renamed to
1 and the other way round: in a symmetric scenario both states have the same future, so only the
lesser of the two is visited.

Invariants:
1. Deterministic: equal worlds give equal reports.
2. Exhaustive: a report with `complete` set has visited every reachable state, up to the names of
   transactions in a symmetric scenario.
3. A state is at rest if only faults can change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from magnetar.txn.spec.invariants import INVARIANTS
from magnetar.txn.spec.machine import Step, actions_of, initial, successors
from magnetar.txn.spec.state import (
    PLAIN,
    CursorOwner,
    Owner,
    Segment,
    State,
    Subscription,
    T,
)
from magnetar.txn.spec.world import World


def swapped(state: State) -> State:
    """Rename two transactions in a state."""
    return state._replace(
        headers=_turned(state.headers),
        outcomes=_turned(state.outcomes),
        collectable=_turned(state.collectable),
        sends=_turned(state.sends),
        acks=_turned(state.acks),
        failed=_turned(state.failed),
        intents=_turned(state.intents),
        answered=_turned(state.answered),
        segments=tuple(_segment(segment) for segment in state.segments),
        # Group and jobs are not renamed: no scenario with members is symmetric.
        subscription=_subscription(state.subscription),
    )


def _turned(values: tuple[T, ...]) -> tuple[T, ...]:
    return values[::-1]


def _segment(segment: Segment) -> Segment:
    ledgers = tuple(
        ledger._replace(entries=tuple(_renamed(txn) for txn in ledger.entries))
        for ledger in segment.ledgers
    )
    return segment._replace(
        ledgers=ledgers,
        pins=_turned(segment.pins),
        aborted=_turned(segment.aborted),
        owners=tuple(_owner(owner) for owner in segment.owners),
    )


def _renamed(txn: int) -> int:
    return txn if txn == PLAIN else 1 - txn


def _owner(owner: Owner) -> Owner:
    return owner._replace(
        left=_turned(owner.left), work=_turned(owner.work), aborted=_turned(owner.aborted)
    )


def _subscription(subscription: Subscription) -> Subscription:
    # Sorted again: equal sets of ops must be equal states, or each would be visited twice.
    ops = tuple(sorted(op._replace(txn=1 - op.txn) for op in subscription.ops))
    return subscription._replace(
        ops=ops, owners=tuple(_cursor_owner(owner) for owner in subscription.owners)
    )


def _cursor_owner(owner: CursorOwner) -> CursorOwner:
    return owner._replace(left=_turned(owner.left), work=_turned(owner.work))


# A mistake in a guard can make a world endless; the largest scenario has a quarter of this.
STATES_MAX: Final = 1_000_000


class Violation(NamedTuple):
    """A broken invariant and the shortest way to it."""

    invariant: str
    problem: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {at:2}. {line}" for at, line in enumerate(self.trace, start=1))
        return f"{self.invariant}: {self.problem}\n{steps}"


class Report(NamedTuple):
    """The findings of an exploration. `fired` counts the steps of each action."""

    states: int
    steps: int
    depth: int
    at_rest: int
    fired: dict[str, int]
    complete: bool
    violation: Violation | None


def explore(
    world: World, wanted: Sequence[str] | None = None, states_max: int = STATES_MAX
) -> Report:
    """Visit every state; stop at the first broken invariant (of the `wanted` ones, if given)."""
    return _Search(world, wanted).run(states_max)


class _Search:
    """An exploration under way: what was seen, and from where it was reached first."""

    def __init__(self, world: World, wanted: Sequence[str] | None) -> None:
        self._world = world
        self._actions = actions_of(world.scenario)
        # A rule switched off breaks more than what it protects: `wanted` finds the shortest way to
        # the invariant that the rule names.
        checked = [one for one in INVARIANTS if wanted is None or one.name in wanted]
        self._of_state = [(one.name, one.of_state) for one in checked if one.of_state is not None]
        self._of_step = [(one.name, one.of_step) for one in checked if one.of_step is not None]
        self._at_rest = [(one.name, one.at_rest) for one in checked if one.at_rest is not None]
        # Each state and the one it was first reached from: breadth first, so
        # that way is the shortest.
        self._seen: dict[State, State | None] = {}
        self._fired: Counter[str] = Counter()
        self._resting = 0

    def run(self, states_max: int) -> Report:
        level = [self._canonical(initial(self._world))]
        self._seen[level[0]] = None
        depth = 0
        while level and len(self._seen) <= states_max:
            found: list[State] = []
            for state in level:
                violation = self._visit(state, found)
                if violation is not None:
                    return self._report(depth, False, violation)
            level = found
            depth += 1
        return self._report(depth, not level, None)

    def _report(self, depth: int, complete: bool, violation: Violation | None) -> Report:
        return Report(
            states=len(self._seen),
            steps=self._fired.total(),
            depth=depth,
            at_rest=self._resting,
            fired=dict(self._fired),
            complete=complete,
            violation=violation,
        )

    def _visit(self, state: State, found: list[State]) -> Violation | None:
        """Check a state and all its steps; what is new goes into `found`."""
        rests = True
        for step in successors(self._world, self._actions, state):
            name = step.action.name
            self._fired[name] += 1
            # Faults do not count: a world that only a crash could move on is at
            # rest, and must be clean.
            rests = rests and step.action.kind == "fault"
            for invariant, check in self._of_step:
                for problem in check(self._world, state, name, step.after):
                    return Violation(invariant, problem, self._trace(state, step))
            # Before the canonical form, which is the dear part in a symmetric world.
            if step.after in self._seen:
                continue
            after = self._canonical(step.after)
            if after not in self._seen:
                self._seen[after] = state
                found.append(after)
        self._resting += rests
        # A state is checked when it is visited, not when it is found: only
        # then is it known to rest.
        for invariant, of_state in self._of_state + (self._at_rest if rests else []):
            for problem in of_state(self._world, state):
                return Violation(invariant, problem, self._trace(state))
        return None

    def _canonical(self, state: State) -> State:
        return min(state, swapped(state)) if self._world.scenario.symmetric else state

    def _trace(self, state: State, last: Step | None = None) -> tuple[str, ...]:
        """The steps to a state, and one more.

        A symmetric world's states are kept under either naming of the transactions, so the way is
        walked again, from the beginning and under its names.
        """
        path: list[State] = []
        back: State | None = state
        while back is not None:
            path.append(back)
            back = self._seen[back]
        goals = path[-2::-1] + ([self._canonical(last.after)] if last is not None else [])
        here, lines = initial(self._world), []
        for goal in goals:
            steps = successors(self._world, self._actions, here)
            step = next(step for step in steps if self._canonical(step.after) == goal)
            lines.append(f"{step.action.name:18} {step.where}")
            here = step.after
        return tuple(lines)
