"""Compares the last bench results with those of an earlier commit (`make bench-diff`).

Relies on `bench.report`, which keeps a copy of every result under the commit that it measured.
The base is the newest earlier commit with a result of that bench, or the one that was asked for.
Ratios to an anchor of the same run compare better than values: the machine's mood is in both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.report import CHANGED, HISTORY, RESULTS, Row, figure, git, origins, read


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.diff", description=__doc__.split("\n")[0])
    parser.add_argument("--base", help="commit, tag or branch to compare with")
    base = parser.parse_args().base
    console = Console()
    results = sorted(RESULTS.glob("*.json"))
    if not results:
        print("no results in build/bench: run `make bench` first", file=sys.stderr)
        return 1
    compared = 0
    for result in results:
        earlier = _base_result(result.stem, base)
        if earlier is None:
            print(f"{result.stem}: no result of {base or 'an earlier commit'} is kept")
            continue
        console.print(_table(result.stem, earlier.parent.name, read(earlier), read(result)))
        compared += 1
    if not compared:
        print("nothing to compare: run `make bench` on the other commit first", file=sys.stderr)
        return 1
    return 0


def _base_result(name: str, base: str | None) -> Path | None:
    """The kept result to compare with: of `base`, or of the newest commit before this one's."""
    if base is not None:
        commits = [git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}") or base]
    else:
        commits = (git("rev-list", "HEAD") or "").split()
    measured = origins().get(name, "")
    if base is None and measured.removesuffix(CHANGED) in commits:
        # Uncommitted changes compare with their own commit, a commit with the ones before it.
        newest = commits.index(measured.removesuffix(CHANGED)) + (not measured.endswith(CHANGED))
        commits = commits[newest:]
    kept = (HISTORY / commit / f"{name}.json" for commit in commits)
    return next((path for path in kept if path.exists()), None)


def _table(name: str, commit: str, before: list[Row], after: list[Row]) -> Table:
    table = Table(title=f"{name}, against {commit[:12]}", title_justify="left")
    table.add_column("measure")
    table.add_column("unit")
    for heading in ("before", "now", "change", "ratio before", "now", "change"):
        table.add_column(heading, justify="right")
    old = {row.measure: row for row in before}
    new = {row.measure: row for row in after}
    for measure in dict.fromkeys([*new, *old]):
        was, now = old.get(measure), new.get(measure)
        known = now or was
        assert known is not None, "a measure comes from one of the two"
        table.add_row(
            measure,
            known.unit,
            *_change(was.value if was else None, now.value if now else None),
            *_change(was.ratio if was else None, now.ratio if now else None),
        )
    return table


def _change(before: float | None, after: float | None) -> tuple[str, str, str]:
    """Both figures, and the change in percent where there is one."""
    change = f"{after / before - 1:+.1%}" if before and after is not None else ""
    shown = ["" if value is None else figure(value) for value in (before, after)]
    return shown[0], shown[1], change


if __name__ == "__main__":
    sys.exit(main())
