"""Pure: which disk operation fails, how, and when the machine stops.

Owns: `FaultPlan`, asked before each operation of a simulated disk. What it answers depends only
on its settings, its chance and the order of the questions, so a run repeats exactly.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

from magnetar.testing.virtual.disk_model import Chance


class SimulatedCrash(BaseException):
    """The process or the machine stopped here; nothing that runs now has an effect any more."""


class Operation(Enum):
    """A kind of operation on a disk."""

    READ = "read"
    WRITE = "write"
    SYNC = "sync"
    NAME = "name"
    """Create, rename or remove a name; sync a folder."""


@dataclass(frozen=True, slots=True)
class FaultRule:
    """Fail the n-th operation (from 1) of a kind on files whose path matches a pattern."""

    operation: Operation
    pattern: str
    number: int
    error: int
    """EIO or ENOSPC."""


@dataclass(slots=True)
class FaultPlan:
    """A plan of faults; without arguments there are none. Rates are chances per operation."""

    chance: Chance | None = None
    read_error_rate: float = 0.0
    write_error_rate: float = 0.0
    sync_error_rate: float = 0.0
    no_space_rate: float = 0.0
    """Of a write, wherever it goes: file systems that copy on write do that."""
    is_paused: bool = False
    """No faults for now; a crash may come all the same."""
    rules: list[FaultRule] = field(default_factory=list)
    is_full: bool = False
    """Nothing can grow and nothing can be made; what has its space can be written."""
    crash_at: int | None = None
    """Number (from 1) of the operation at which everything stops."""
    crash_on: Operation | None = None
    crash_pattern: str = "*"
    """Which operations `crash_at` counts: all, or those of one kind or on such paths."""
    # What has happened so far, for reports of a run.
    operations: int = 0
    faults: int = 0
    io_errors: int = 0
    """Faults other than a lack of space."""
    _seen: dict[int, int] = field(default_factory=dict)
    _counted: int = 0

    def error_for(self, operation: Operation, path: str, *, takes_space: bool) -> int | None:
        """The error number that this operation fails with, or None."""
        self.operations += 1
        if self.is_paused:
            return None
        # A rule comes before chance: a test that asks for one certain fault gets that one.
        found = self._by_rule(operation, path)
        if found is None and takes_space and self.is_full:
            found = errno.ENOSPC
        if found is None and self.chance is not None:
            found = self._by_chance(operation, self.chance)
        self.faults += found is not None
        self.io_errors += found == errno.EIO
        return found

    def crashes_now(self, operation: Operation, path: str) -> bool:
        """Whether this operation is the last; asked once for each."""
        if self.crash_at is None or self.crash_on not in (None, operation):
            return False
        self._counted += fnmatchcase(path, self.crash_pattern)
        return self._counted >= self.crash_at

    def end_faults(self) -> None:
        """End all faults: the disk does what it is told from here on."""
        self.read_error_rate = self.write_error_rate = self.sync_error_rate = 0.0
        self.no_space_rate = 0.0
        self.rules.clear()
        self.is_full = False

    def _by_rule(self, operation: Operation, path: str) -> int | None:
        found = None
        for place, rule in enumerate(self.rules):
            if rule.operation is operation and fnmatchcase(path, rule.pattern):
                # Every rule counts, even if an earlier one has found its
                # fault: numbers stay what they were.
                self._seen[place] = self._seen.get(place, 0) + 1
                if self._seen[place] == rule.number:
                    found = rule.error
        return found

    def _by_chance(self, operation: Operation, chance: Chance) -> int | None:
        # One draw per operation, whatever its kind: other rates do not shift the draws that follow.
        drawn = chance.random()
        if operation is Operation.READ:
            return errno.EIO if drawn < self.read_error_rate else None
        if operation is Operation.SYNC:
            return errno.EIO if drawn < self.sync_error_rate else None
        if operation is Operation.WRITE and drawn < self.no_space_rate:
            return errno.ENOSPC
        # From the other end, so that one draw decides between both faults of a write.
        return errno.EIO if drawn > 1 - self.write_error_rate else None
