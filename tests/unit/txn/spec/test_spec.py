"""The protocol's model: all rules on, nothing breaks; one rule off, the named invariant does.

`-s` prints the sizes and the counterexamples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

import pytest
from _pytest.mark.structures import ParameterSet

from magnetar.txn.spec import names
from magnetar.txn.spec.actions import acking, publishing
from magnetar.txn.spec.actions.publishing import Edge
from magnetar.txn.spec.describe import FLOWS, is_of_the_protocol, page
from magnetar.txn.spec.explore import explore, swapped
from magnetar.txn.spec.invariants import INVARIANTS
from magnetar.txn.spec.machine import ACTIONS, actions_of, initial, successors
from magnetar.txn.spec.rules import RULES, Rules
from magnetar.txn.spec.scenarios import LARGE, SCENARIOS
from magnetar.txn.spec.state import State, ack_works, works
from magnetar.txn.spec.world import World

REFERENCE: Final = Path(__file__).parents[4] / "docs" / "reference" / "transactions.md"

# The known failures of metadata-driven transactions elsewhere, and the rules that rule them out.
FINDINGS: Final = {
    "F1": {"rebuild_pending_acks"},
    "F2": {"flush_before_ack_delete"},
    "F3": {"pin_holds_bound"},
    "F4": {"gate_shut_until_recovered"},
    "F5": {"plain_publish_keeps_gate"},
    "F6": {"pins_before_aborted"},
    "F8": {"untrack_when_pin_fails", "unpend_when_ack_fails", "track_before_read"},
    "F9": {"abort_waits_for_appends"},
    "F10": {"recheck_after_pin"},
}
# Rules of the design that must be shown to be needed.
DESIGNED: Final = {
    "new_ledger_per_load",
    "fence_before_pins",
    "reread_pin",
    "lease_check_before_answer",
    "ops_before_cursor",
    "adopt_pins",
    "named_op_keys",
    "group_decides_alone",
    "decided_ids_kept",
}
# Explored whole in a moment; the others are left to `make test`, the large to `make soak-models`.
QUICK: Final = {"store-failures", "split", "group-winners", "group-fencing", "group-member"}
# What `make test` sees of a large one: every order of its first fifteen steps or so.
BEGINNING: Final = 20_000
# Enough of each scenario to meet every action in one of them.
GLANCE: Final = 6_000


def _marked(name: str) -> ParameterSet:
    marks = [] if name in QUICK else [pytest.mark.slow]
    marks += [pytest.mark.soak] if name in LARGE else []
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", [_marked(name) for name in SCENARIOS])
def test_nothing_breaks_under_all_rules(name: str) -> None:
    report = explore(World(SCENARIOS[name], Rules()))
    sys.stdout.write(f"{name}: {report.states} states, {report.steps} steps\n")
    assert report.violation is None, str(report.violation)
    assert report.complete
    assert report.at_rest > 0, "a world that never rests checks no leak"
    assert report.states == SCENARIOS[name].states, "the scenario changed: tell its new size"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LARGE))
def test_nothing_breaks_at_the_beginning_of_a_large_one(name: str) -> None:
    report = explore(World(SCENARIOS[name], Rules()), states_max=BEGINNING)
    assert report.violation is None, str(report.violation)
    sys.stdout.write(f"{name}: every order of {report.depth} steps, {report.states} states\n")
    assert report.depth >= 12


@pytest.mark.slow
@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_each_rule_is_needed(name: str) -> None:
    rule = next(rule for rule in RULES if rule.name == name)
    world = World(SCENARIOS[rule.scenario], replace(Rules(), **{name: False}))
    report = explore(world, rule.protects)
    assert report.violation is not None, f"nothing breaks without {name} in {rule.scenario}"
    sys.stdout.write(f"without {name}:\n{report.violation}\n")
    assert report.violation.invariant in rule.protects
    assert report.violation.trace


def test_rules_cover_findings_and_design() -> None:
    found: dict[str, set[str]] = {}
    for rule in RULES:
        if rule.finding:
            found.setdefault(rule.finding, set()).add(rule.name)
    assert found == FINDINGS
    assert {rule.name for rule in RULES} >= DESIGNED
    assert [rule.name for rule in RULES] == [switch.name for switch in fields(Rules)]
    assert Rules() == Rules(**dict.fromkeys((rule.name for rule in RULES), True))


def test_invariants_are_the_twelve_and_each_is_protected() -> None:
    twelve = [value for name, value in vars(names).items() if name.isupper()]
    assert [invariant.name for invariant in INVARIANTS] == twelve
    assert len(twelve) == 12
    protected = {name for rule in RULES for name in rule.protects}
    assert protected == set(twelve)


@pytest.mark.slow
def test_scenarios_use_every_action_and_diagrams_show_every_change() -> None:
    fired: set[str] = set()
    changes: set[tuple[str, str, str]] = set()
    ack_changes: set[tuple[str, str, str]] = set()
    for scenario in (one for one in SCENARIOS.values() if one.name not in LARGE):
        for before, action, after in _steps(World(scenario, Rules()), GLANCE):
            fired.add(action)
            changes |= {(*change, action) for change in _stage_changes(before, after)}
            ack_changes |= {(*change, action) for change in _ack_stage_changes(before, after)}
    assert fired == {action.name for action in ACTIONS if is_of_the_protocol(action)}
    assert changes == _drawn(publishing.EDGES)
    assert ack_changes == _drawn(acking.EDGES)


def test_flows_name_actions() -> None:
    known = {action.name for action in ACTIONS}
    assert {name for flow in FLOWS.values() for name in flow} <= known


def test_exploring_is_deterministic_and_bounded() -> None:
    world = World(SCENARIOS["split"], Rules())
    assert explore(world) == explore(world)
    assert not explore(world, states_max=100).complete


def test_swapping_twice_changes_nothing() -> None:
    for name in ("publish", "ack-conflict"):
        for _, _, after in _steps(World(SCENARIOS[name], Rules()), 300):
            assert swapped(swapped(after)) == after


def test_symmetric_worlds_have_symmetric_futures() -> None:
    for scenario in (one for one in SCENARIOS.values() if one.symmetric):
        world = World(scenario, Rules())
        actions = actions_of(scenario)
        for state in {before for before, _, _ in _steps(world, 200)}:
            futures = {swapped(step.after) for step in successors(world, actions, state)}
            mirrored = {step.after for step in successors(world, actions, swapped(state))}
            assert futures == mirrored


def test_reference_page_is_up_to_date() -> None:
    assert REFERENCE.read_text("utf-8") == page(), "python -m magnetar.txn.spec describe"


def _steps(world: World, states_max: int) -> Iterator[tuple[State, str, State]]:
    """The steps of the first states, breadth first, without symmetry."""
    actions = actions_of(world.scenario)
    seen = {initial(world): None}
    queue = list(seen)
    for state in queue:
        for step in successors(world, actions, state):
            yield state, step.action.name, step.after
            if step.after not in seen and len(seen) < states_max:
                seen[step.after] = None
                queue.append(step.after)


def _stage_changes(before: State, after: State) -> set[tuple[str, str]]:
    old = {(number, owner.epoch, txn): work for number, _, txn, owner, work in works(before)}
    new = {(number, owner.epoch, txn): work for number, _, txn, owner, work in works(after)}
    moves = {(old[at].stage, new[at].stage) for at in old.keys() & new.keys()}
    return {(source, target) for source, target in moves if source != target}


def _ack_stage_changes(before: State, after: State) -> set[tuple[str, str]]:
    old = {(owner.epoch, txn): work for _, txn, owner, work in ack_works(before)}
    new = {(owner.epoch, txn): work for _, txn, owner, work in ack_works(after)}
    moves = {(old[at].stage, new[at].stage) for at in old.keys() & new.keys()}
    return {(source, target) for source, target in moves if source != target}


def _drawn(edges: tuple[Edge, ...]) -> set[tuple[str, str, str]]:
    """The changes of stage in a diagram; its loops only tell what else happens there."""
    return {
        (edge.before, edge.after, action.partition(":")[0].partition(" ")[0])
        for edge in edges
        for action in edge.action.split(", ")
        if edge.before != edge.after
    }
