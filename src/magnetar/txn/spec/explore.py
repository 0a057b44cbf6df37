"""Visits every state of a bounded world, breadth first (pure).

Owns: `explore`, which checks the invariants on all states and steps that can be reached, and the
`Violation` it finds, with the shortest way there.

Invariants:
1. Deterministic: equal worlds give equal reports.
2. Exhaustive: a report with `complete` set has visited every reachable state, up to the names of
   transactions in a symmetric scenario.
3. A state is at rest if only faults can change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from magnetar.txn.spec import acking, cursors, deciding, groups, owning, publishing
from magnetar.txn.spec.invariants import INVARIANTS, Invariant
from magnetar.txn.spec.owning import readable_end
from magnetar.txn.spec.state import (
    NO_PIN,
    NOWHERE,
    OPEN,
    UNKNOWN,
    AckWork,
    Cursor,
    CursorOwner,
    Group,
    Job,
    Ledger,
    Owner,
    Segment,
    State,
    Subscription,
    Work,
    put,
    with_owner,
)
from magnetar.txn.spec.symmetry import swapped
from magnetar.txn.spec.world import Action, World, is_final, truth

ACTIONS: Final = (
    *publishing.ACTIONS,
    *owning.ACTIONS,
    *acking.ACTIONS,
    *cursors.ACTIONS,
    *deciding.ACTIONS,
    *groups.ACTIONS,
)


class Step(NamedTuple):
    """One step: which action, where, and the state after it."""

    action: Action
    where: str
    after: State


class Violation(NamedTuple):
    """A broken invariant and the shortest way to it."""

    invariant: str
    problem: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {at:2}. {line}" for at, line in enumerate(self.trace, start=1))
        return f"{self.invariant}: {self.problem}\n{steps}"


class Report(NamedTuple):
    """What an exploration found."""

    states: int
    steps: int
    depth: int
    fired: Counter[str]
    at_rest: int
    complete: bool
    violation: Violation | None


def initial(world: World) -> State:
    """Every transaction open, every segment and the subscription served by a first owner."""
    scenario = world.scenario
    txns = scenario.txns
    work = (Work(),) * txns
    nothing = (False,) * txns
    owner = Owner(1, 1, "serving", nothing, work, (NOWHERE,) * txns, True)
    segment = Segment(
        epoch=1,
        ledgers=(Ledger(1, False, ()),),
        sealed=False,
        pins=(NO_PIN,) * txns,
        aborted=(NOWHERE,) * txns,
        owners=(owner,),
    )
    acks = scenario.acks or (0,) * txns
    cursor_owner = CursorOwner(1, "serving", nothing, 1, (), (AckWork(),) * txns, (), 0)
    used = int(bool(scenario.messages))
    group = Group(1, 0, (), ())
    jobs = [("commit", txn) for txn in range(len(scenario.members))]
    jobs += [("abort", txn) for txn in scenario.abortable]
    return State(
        headers=(OPEN,) * txns,
        outcomes=(UNKNOWN,) * txns,
        collectable=nothing,
        sends=scenario.sends,
        acks=acks,
        failed=nothing,
        intents=((),) * txns,
        answered=((),) * txns,
        segments=(segment,) * len(scenario.sends[0]),
        subscription=Subscription(used, Cursor(used, used, ()), (), (cursor_owner,) * used),
        group=group,
        jobs=tuple(
            Job(kind, txn, scenario.members[txn][0], "idle", group) for kind, txn in jobs
        ),
        copies=(UNKNOWN,) * txns,
        budget=scenario.budget,
    )


def actions_of(scenario: Scenario) -> tuple[Action, ...]:
    """The actions that a scenario has a use for."""
    writes = any(any(row) for row in scenario.sends)
    used = [*deciding.ACTIONS]
    used += [*publishing.ACTIONS, *owning.ACTIONS] if writes else []
    used += [*acking.ACTIONS, *cursors.ACTIONS] if scenario.messages else []
    used += groups.ACTIONS if scenario.members else []
    return tuple(action for action in ACTIONS if action in used)


def successors(world: World, state: State) -> Iterator[Step]:
    """Everything that may happen next, in a fixed order."""
    for action in world.actions:
        for where, after in action.steps(world, state):
            yield Step(action, where, _settled(world, state, after))


def _settled(world: World, before: State, after: State) -> State:
    """The state after a step, with what follows from it without a step of its own."""
    for txn, outcome in enumerate(after.outcomes):
        said = truth(world, after, txn)
        if outcome == UNKNOWN and is_final(said):
            after = after._replace(outcomes=put(after.outcomes, txn, said))
    return _woken(world, before, after) if world.scenario.dispatch else after


def _woken(world: World, before: State, after: State) -> State:
    """A dispatcher is woken when the end of what it may read has moved."""
    for number, segment in enumerate(after.segments):
        if not segment.owners:
            continue
        at = len(segment.owners) - 1
        owner = segment.owners[at]
        appended = segment.ledgers != before.segments[number].ledgers
        moved = readable_end(world, segment, owner) != owner.seen
        if moved and not owner.awake and (world.rules.wake_on_ceiling or appended):
            after = with_owner(after, number, at, owner._replace(awake=True))
    return after


Seen = dict[State, State | None]


def explore(
    world: World,
    wanted: Sequence[str] | None = None,
    states_max: int = 2_000_000,
) -> Report:
    """Visit every state; stop at the first broken invariant (of the `wanted` ones, if given)."""
    checked = [rule for rule in INVARIANTS if wanted is None or rule.name in wanted]
    of_step = [(rule, rule.of_step) for rule in checked if rule.of_step is not None]
    canonical = _canonical(world)
    first = canonical(initial(world))
    seen: Seen = {first: None}
    level, depth, steps, at_rest = [first], 0, 0, 0
    fired: Counter[str] = Counter()
    while level:
        found: list[State] = []
        for state in level:
            rests = True
            for step in successors(world, state):
                steps += 1
                fired[step.action.name] += 1
                rests = rests and step.action.kind == "fault"
                for rule, check in of_step:
                    for problem in check(world, state, step.action.name, step.after):
                        trace = (*_trace(world, seen, state), _line(step))
                        broken = Violation(rule.name, problem, trace)
                        return Report(len(seen), steps, depth, fired, at_rest, False, broken)
                after = canonical(step.after)
                if after not in seen:
                    seen[after] = state
                    found.append(after)
            at_rest += rests
            problem_here = _broken(world, checked, state, rests)
            if problem_here is not None:
                broken = Violation(*problem_here, _trace(world, seen, state))
                return Report(len(seen), steps, depth, fired, at_rest, False, broken)
        if len(seen) > states_max:
            return Report(len(seen), steps, depth, fired, at_rest, False, None)
        level = found
        depth += 1
    return Report(len(seen), steps, depth, fired, at_rest, True, None)


def _broken(
    world: World, checked: Sequence[Invariant], state: State, rests: bool
) -> tuple[str, str] | None:
    for rule in checked:
        if rule.of_state is not None:
            for problem in rule.of_state(world, state):
                return rule.name, problem
        if rests and rule.at_rest is not None:
            for problem in rule.at_rest(world, state):
                return rule.name, f"at rest: {problem}"
    return None


def _canonical(world: World) -> Callable[[State], State]:
    if not world.scenario.symmetric:
        return lambda state: state
    return lambda state: min(state, swapped(state))


def _trace(world: World, seen: Seen, state: State) -> tuple[str, ...]:
    """The steps to a state. States of a symmetric world are stored under either naming of the
    transactions, so the way is walked again under the names of its beginning."""
    path: list[State] = []
    at: State | None = state
    while at is not None:
        path.append(at)
        at = seen[at]
    path.reverse()
    canonical = _canonical(world)
    here, lines = initial(world), []
    for goal in path[1:]:
        step = next(step for step in successors(world, here) if canonical(step.after) == goal)
        lines.append(_line(step))
        here = step.after
    return tuple(lines)


def _line(step: Step) -> str:
    return f"{step.action.name:18} {step.where}"
