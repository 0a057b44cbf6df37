"""In which order seeds are tried where a rule was taken away.

A test names the seed that saw the harm when it was written: that one is run first, so that it
costs one run. A change of the simulation may make that seed blind: then all the others are tried,
and the one that sees it is printed, to be the next hint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from harness.simulation.seeds import Report


def hinted(seeds: int, first: int) -> Iterator[int]:
    """Every seed below `seeds` once, and `first` before them, wherever it lies."""
    yield first
    yield from (seed for seed in range(seeds) if seed != first)


def first_violation(simulate: Callable[[int], Report], seeds: int, first: int) -> str:
    """What the first seed says that finds something; empty if none does."""
    for seed in hinted(seeds, first):
        report = simulate(seed)
        if report.violations:
            if seed != first:
                sys.stdout.write(f"seen by seed {seed}, not by seed {first}\n")
            return f"seed {seed}: {report.violations[0]}"
    return ""
