"""The command that runs the simulations: storage, broker, scalable topics, transactions, client.

    python -m harness.simulation --seeds 200 [--first 0] [--only storage|broker|scalable|txn|client]
    python -m harness.simulation --only storage --seed 17 --verbose

Owns: the command line and the report; each simulation is the `run` of its folder.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import Final

from rich.console import Console
from rich.progress import track

from harness.simulation.broker.run import simulate_broker
from harness.simulation.client.run import simulate_client
from harness.simulation.scalable.run import simulate_scalable
from harness.simulation.seeds import Report
from harness.simulation.storage.run import simulate
from harness.simulation.txn.run import simulate_txn

Simulate = Callable[..., Report]

PARTS: Final = ("storage", "broker", "scalable", "txn", "client")


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    logging.getLogger("magnetar").addHandler(logging.NullHandler())
    seeds = range(options.first, options.first + options.seeds)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    simulations: tuple[Simulate, ...] = (
        simulate,
        simulate_broker,
        simulate_scalable,
        simulate_txn,
        simulate_client,
    )
    for part, simulated in zip(PARTS, simulations, strict=True):
        if options.only in (None, part) and not _run(part, simulated, seeds, options.verbose):
            return 1
    return 0


def _run(part: str, simulated: Simulate, seeds: range, verbose: bool) -> bool:
    """Whether all seeds found nothing; the first that finds something is the last."""
    console = Console()
    total = Report(0)
    shown: Iterable[int] = seeds
    if console.is_terminal and len(seeds) > 1:
        shown = track(seeds, f"simulating {part}", console=console)
    for seed in shown:
        lines: list[str] | None = [] if verbose else None
        report = simulated(seed, lines=lines)
        for line in lines or ():
            print(line)
        if len(seeds) == 1 or report.violations:
            print(f"{part} seed {seed}: {report.operations} operations, digest {report.digest}")
        if report.violations:
            _complain(part, report)
            return False
        total.add(report)
    changes = f"{total.splits} splits, {total.merges} merges, {total.failovers} failovers, "
    changes = changes if part in ("scalable", "txn", "client") else ""
    changes += f"{total.transactions} transactions, " if part == "txn" else ""
    print(
        f"{part}: {len(seeds)} seeds, {total.operations} operations, {total.lives} starts, "
        f"{total.crashes} crashes in mid-operation, {total.faults} faults, "
        f"{changes}0 violations"
    )
    return True


def _complain(part: str, report: Report) -> None:
    for violation in report.violations:
        print(f"violation: {violation}")
    command = f"python -m harness.simulation --only {part} --seed {report.seed} --verbose"
    print(f"replay: {command}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulate", description="simulate faults and crashes")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--only", choices=PARTS, help="one of the simulations")
    parser.add_argument("--verbose", action="store_true", help="print every step")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of strings is drawn anew for each process, unless told otherwise.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "harness.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, environment)
    sys.exit(main())
