"""The simulation of transactions finds what it is for: each case takes one rule away.

A rule is taken away by patching it (`txn_mutations`). That the same seeds find nothing with the
rules in place is shown by `test_txn_seeds.py` and `make sim`.
"""

from __future__ import annotations

import sys
from typing import Final

import pytest

from magnetar.testing.simulate_txn import simulate_txn
from tests.simulation.txn_mutations import MUTATIONS

pytestmark = pytest.mark.slow

SEEDS: Final = 40
"""Within so many seeds each rule's absence must be found."""


@pytest.mark.parametrize("rule", MUTATIONS)
def test_without_this_rule_an_invariant_breaks(
    rule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutation = MUTATIONS[rule]
    mutation.patch(monkeypatch)
    others: list[str] = []
    for seed in range(mutation.first, mutation.first + SEEDS):
        report = simulate_txn(seed, course=mutation.course)
        found = [each for each in report.violations if each.startswith(mutation.breaks)]
        others += [f"seed {seed}: {each}" for each in report.violations if each not in found]
        if found:
            with capsys.disabled():
                sys.stdout.write(f"\n{rule}: seed {seed}: {found[0]}\n")
            return
    raise AssertionError(f"{SEEDS} seeds do not see that this is missing: {rule}; {others[:5]}")
