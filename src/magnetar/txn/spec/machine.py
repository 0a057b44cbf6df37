"""The beginning of a world, and all steps that may happen next (pure).

Owns: `ACTIONS`, the table of all actions; `initial` and `successors`.

Invariants:
1. Equal states have equal successors, in equal order.
2. What follows from a step without a choice (the ghost outcome, a dispatcher's wake-up) is a part
   of that step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from magnetar.txn.spec.actions import acking, cursors, deciding, groups, owning, publishing
from magnetar.txn.spec.actions.owning import readable_end
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
from magnetar.txn.spec.world import Action, Scenario, World, is_final, truth

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


def initial(world: World) -> State:
    """Every transaction open, every segment and the subscription served by a first owner."""
    scenario = world.scenario
    txns = scenario.txns
    # Epoch 1 everywhere, so that epoch and ledger 0 mean "none" in a state without None.
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
    # No messages to acknowledge: no owner either, and none of its steps.
    used = int(bool(scenario.messages))
    group = Group(1, 0, (), ())
    # Each COMMIT_GROUP and each abort is a job of its own, so that two coordinators may meet.
    listed = scenario.listed or tuple((txn,) for txn in range(len(scenario.members)))
    jobs = [("commit", asked) for asked in listed]
    jobs += [("abort", (txn,)) for txn in scenario.abortable]
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
            Job(kind, asked, scenario.members[asked[0]][0], "idle", group) for kind, asked in jobs
        ),
        copies=(UNKNOWN,) * txns,
        budget=scenario.budget,
    )


def actions_of(scenario: Scenario) -> tuple[Action, ...]:
    """The actions that a scenario has a use for."""
    # Actions that can never fire would only cost time in each of a hundred thousand states.
    writes = any(any(row) for row in scenario.sends)
    used = [*deciding.ACTIONS]
    used += [*publishing.ACTIONS, *owning.ACTIONS] if writes else []
    used += [*acking.ACTIONS, *cursors.ACTIONS] if scenario.messages else []
    used += groups.ACTIONS if scenario.members else []
    return tuple(action for action in ACTIONS if action in used)


def successors(world: World, actions: Sequence[Action], state: State) -> Iterator[Step]:
    """Yield all steps that may happen next, in a fixed order."""
    for action in actions:
        for where, after in action.steps(world, state):
            yield Step(action, where, _settled(world, state, after))


def _settled(world: World, before: State, after: State) -> State:
    """The state after a step, with what follows from it without a step of its own."""
    # The ghost: what the records first told is the outcome, and 'one decision' holds them to it.
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
        # The present owner's dispatcher: a zombie may sleep for good, nobody is connected to it.
        at = len(segment.owners) - 1
        owner = segment.owners[at]
        appended = segment.ledgers != before.segments[number].ledgers
        moved = readable_end(world, segment, owner) != owner.seen
        if moved and not owner.awake and (world.rules.wake_on_ceiling or appended):
            after = with_owner(after, number, at, owner._replace(awake=True))
    return after
