"""`python -m magnetar.txn.spec`: the reference page, an exploration, or what a rule is good for."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from magnetar.txn.spec.describe import page
from magnetar.txn.spec.explore import explore
from magnetar.txn.spec.rules import RULES, Rules
from magnetar.txn.spec.scenarios import SCENARIOS
from magnetar.txn.spec.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m magnetar.txn.spec", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("describe", help="print docs/reference/transactions.md")
    verbs.add_parser("explore", help="visit every state of a scenario").add_argument(
        "scenario", choices=SCENARIOS
    )
    verbs.add_parser("without", help="show what breaks without a rule").add_argument(
        "rule", choices=[rule.name for rule in RULES]
    )
    asked = parser.parse_args()
    if asked.verb == "describe":
        sys.stdout.write(page())
        return 0
    return _explored(asked.scenario) if asked.verb == "explore" else _without(asked.rule)


def _explored(scenario: str) -> int:
    report = explore(World(SCENARIOS[scenario], Rules()))
    sys.stdout.write(
        f"{scenario}: {report.states} states, {report.steps} steps, depth {report.depth}, "
        f"{report.at_rest} at rest, {'all' if report.complete else 'not all'} visited\n"
    )
    if report.violation is not None:
        sys.stdout.write(f"{report.violation}\n")
    # A search that ran into its limit proves nothing: not a success.
    return 0 if report.complete else 1


def _without(name: str) -> int:
    rule = next(rule for rule in RULES if rule.name == name)
    world = World(SCENARIOS[rule.scenario], replace(Rules(), **{name: False}))
    report = explore(world, rule.protects)
    sys.stdout.write(f"Rule: {rule.text}\nWithout it: {rule.without}.\n{report.violation}\n")
    # Here a violation is what was asked for: a rule that nothing breaks without is no rule.
    return 0 if report.violation is not None else 1


if __name__ == "__main__":
    sys.exit(main())
