"""Where every bench publishes: a table to read, a file to compare.

Owns: the shape of a result, `build/bench/<name>.json` (the last run) and its copy of the commit
that was measured, `build/bench/history/<commit>/<name>.json`.

Invariants:
1. A file is a list of {measure, value, unit, anchor, ratio, samples}, one row per measure.
2. `ratio` is the value divided by that of the anchor, taken in the same run; a row has both or
   neither. A figure without an anchor says little about another machine.
3. Changes that are not committed are kept apart from their commit (`<commit>-changed`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "bench"
HISTORY = RESULTS / "history"
CHANGED = "-changed"
TABLE_WIDTH = 130
# Which commit each file of the last run measured.
ORIGINS = HISTORY / "origins.json"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `anchor` names what was measured beside it, `ratio` is value / anchor's value."""

    measure: str
    value: float
    unit: str
    anchor: str | None = None
    ratio: float | None = None
    samples: int = 1

    def __post_init__(self) -> None:
        if (self.anchor is None) != (self.ratio is None):
            raise ValueError(f"{self.measure}: an anchor and a ratio come together")


def publish(name: str, rows: Sequence[Row]) -> Path:
    """Print the rows and keep them."""
    # A pipe has no width of its own, and folded rows cannot be compared.
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    console.print(_table(name, rows))
    return keep(name, rows)


def keep(name: str, rows: Sequence[Row]) -> Path:
    """Write the rows as the result of `name`, and a copy for this commit."""
    commit = measured_commit()
    text = msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n"
    for folder in (RESULTS, HISTORY / commit):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_bytes(text)
    ORIGINS.write_bytes(msgspec.json.encode({**origins(), name: commit}))
    return RESULTS / f"{name}.json"


def read(path: Path) -> list[Row]:
    """The rows that `publish` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=list[Row])


def origins() -> dict[str, str]:
    """Name of a bench -> commit that its last result measured."""
    if not ORIGINS.exists():
        return {}
    return msgspec.json.decode(ORIGINS.read_bytes(), type=dict[str, str])


def measured_commit() -> str:
    """The commit in the working tree, marked if files differ from it."""
    commit = git("rev-parse", "HEAD")
    if commit is None:
        return "unversioned"
    return commit + CHANGED if git("status", "--porcelain") else commit


def git(*arguments: str) -> str | None:
    """What git prints, or None where it fails: outside a repository, or without git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def figure(value: float) -> str:
    """A number with as many digits as are worth reading."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("ratio", justify="right")
    table.add_column("to")
    table.add_column("samples", justify="right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(
            row.measure, figure(row.value), row.unit, ratio, row.anchor or "", str(row.samples)
        )
    return table
