"""What the simulations have in common: the report of a seed, and the faults that a seed draws.

Owns: `Report`, `draw_plan` (which disk faults a life has, and where its machine stops), `alone` (a
run without the collector's own timing) and `where`.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Final

from magnetar.testing.virtual.faults import FaultPlan, Operation

EPOCH_MS: Final = 1_700_000_000_000
LIFE_SECONDS_MAX: Final = 3600.0

_CRASHES: Final = (
    (Operation.SYNC, "*", 15),
    (Operation.WRITE, "*", 30),
    (None, "*", 100),
    (None, "*", 3000),
    (Operation.WRITE, "journal/*", 400),
    (Operation.SYNC, "journal/*", 400),
    (Operation.NAME, "*", 30),
    (None, "ledgers/*", 400),
    (Operation.SYNC, "metadata/*", 60),
    (Operation.WRITE, "metadata/*", 600),
)
"""Where machines stop: kind of operation, path, and the most of them that a life may see."""


@dataclass(slots=True)
class Report:
    """What a seed came to."""

    seed: int
    operations: int = 0
    lives: int = 0
    crashes: int = 0
    faults: int = 0
    splits: int = 0
    merges: int = 0
    failovers: int = 0
    transactions: int = 0
    digest: str = ""
    violations: tuple[str, ...] = ()

    def add(self, other: Report) -> None:
        self.operations += other.operations
        self.lives += other.lives
        self.crashes += other.crashes
        self.faults += other.faults
        self.splits += other.splits
        self.merges += other.merges
        self.failovers += other.failovers
        self.transactions += other.transactions


def draw_plan(random: Random) -> FaultPlan:
    """The faults of one life."""
    plan = FaultPlan(Random(random.randrange(1 << 32)))
    if random.random() < 0.6:
        plan.write_error_rate = random.choice((0.0, 0.002))
        plan.sync_error_rate = random.choice((0.0, 0.0, 0.005))
        plan.read_error_rate = random.choice((0.0, 0.02))
        plan.no_space_rate = random.choice((0.0, 0.02))
    if random.random() < 0.85:
        plan.crash_on, plan.crash_pattern, most = random.choice(_CRASHES)
        plan.crash_at = 1 + int(random.random() ** 2 * most)
    return plan


@contextmanager
def alone() -> Iterator[None]:
    """The collector runs at moments of its own, and ends forgotten scans then: not meanwhile."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def where(error: BaseException) -> str:
    """Where an error comes from, for a message."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].name}:{frames[-1].lineno}" if frames else "?"
