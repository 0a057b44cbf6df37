"""The simulation of transactions finds what it is for: each case takes one rule away.

A rule is taken away by patching it (`txn_mutations`). The seed that finds its absence is then run
with the rule in place, and finds nothing.
"""

from __future__ import annotations

import sys
from typing import Final

import pytest

from harness.simulation.txn.run import simulate_txn
from tests.simulation.search import hinted
from tests.simulation.txn_mutations import MUTATIONS, Mutation

pytestmark = pytest.mark.slow

SEEDS: Final = 40
"""Within so many seeds each rule's absence must be found."""


@pytest.mark.parametrize("rule", MUTATIONS)
def test_without_this_rule_an_invariant_breaks(
    rule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutation = MUTATIONS[rule]
    with monkeypatch.context() as patch:
        mutation.patch(patch)
        seed, found = _first_found(mutation)
    with capsys.disabled():
        sys.stdout.write(f"\n{rule}: seed {seed}: {found}\n")
    assert simulate_txn(seed, course=mutation.course).violations == ()


def _first_found(mutation: Mutation) -> tuple[int, str]:
    others: list[str] = []
    for seed in hinted(SEEDS, mutation.first):
        report = simulate_txn(seed, course=mutation.course)
        found = [each for each in report.violations if each.startswith(mutation.breaks)]
        others += [f"seed {seed}: {each}" for each in report.violations if each not in found]
        if found:
            return seed, found[0]
    raise AssertionError(f"{SEEDS} seeds do not see that this is missing; {others[:5]}")
