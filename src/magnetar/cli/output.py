"""The output of verbs: JSON for programs, tables for people.

Owns: the one form of each. JSON goes to stdout as it came; tables are made here and nowhere else.

Invariants:
1. Nothing in a table is cut, and no number or name is broken: text wraps between words, and a table
   that does not fit the terminal all the same becomes a list, one line for each value.
2. Without a terminal a row is a line, however long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

import click
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

# With a unit or a remark too: `12 ms`, `1,234 (3.2 min)`. Such a cell is never broken.
_NUMBER = re.compile(r"[\d,.]+( [a-z]+| \(.*\))?|-")
# What the box takes: a line on both sides of each column, and a space on both sides of its text.
_BETWEEN = 3


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    none: str,
    title: str | None = None,
) -> None:
    """One line per row; `none` is said where there is not a single one."""
    shown = list(rows)
    if not shown:
        click.echo(none)
        return
    console = Console()
    width = console.width if console.is_terminal else None
    if width is None:
        console = Console(width=_natural_width(headings, shown, title))
    console.print(table(headings, shown, width=width, title=title), markup=False, highlight=False)


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    width: int | None,
    title: str | None = None,
) -> Table | Group:
    """The table for a terminal of that width (None: any), or a list where it would not fit."""
    cells = [[_text(cell) for cell in row] for row in rows]
    columns = [[row[number] for row in cells] for number in range(len(headings))]
    # By what is shown, not by type: a column of ids as text stays on the left.
    numeric = [all(_NUMBER.fullmatch(cell) for cell in column) for column in columns]
    widths = _fitted(headings, columns, numeric, width)
    if widths is None:
        return _as_list(headings, cells, title)
    made = Table(title=title)
    for heading, is_number, wide in zip(headings, numeric, widths, strict=True):
        made.add_column(heading, justify="right" if is_number else "left", width=wide)
    for row in cells:
        made.add_row(*map(Text, row))
    return made


def _natural_width(
    headings: Sequence[str], rows: Sequence[Sequence[object]], title: str | None
) -> int:
    widest = [
        max(len(heading), *(len(_text(row[number])) for row in rows))
        for number, heading in enumerate(headings)
    ]
    return max(sum(widest) + _BETWEEN * len(widest) + 1, len(title or ""))


def _fitted(
    headings: Sequence[str],
    columns: Sequence[Sequence[str]],
    numeric: Sequence[bool],
    width: int | None,
) -> list[int] | None:
    """The width of each column; None: they do not fit, however often words wrap."""
    widths, least = [], []
    for heading, cells, is_number in zip(headings, columns, numeric, strict=True):
        widths.append(max(map(len, (heading, *cells)), default=0))
        # What stays together (invariant 1): numbers with their units, and single words.
        pieces = list(cells) if is_number else [word for cell in cells for word in cell.split()]
        least.append(max(map(len, (*heading.split(), *pieces)), default=0))
    if width is None:
        return widths
    room = width - _BETWEEN * len(widths) - 1
    if sum(least) > room:
        return None
    # The widest one gives way first: it has most words to wrap.
    while sum(widths) > room:
        can_give = [n for n, wide in enumerate(widths) if wide > least[n]]
        widths[max(can_give, key=lambda n: widths[n])] -= 1
    return widths


def _as_list(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> Group:
    indent = max(map(len, headings)) + 2
    lines = [] if title is None else [title]
    for row in rows:
        lines += [f"{heading:<{indent}}{cell}" for heading, cell in zip(headings, row, strict=True)]
        lines.append("")  # between two rows, and before what comes next
    # Not folded here: a terminal breaks what is longer than its line, and cuts nothing.
    return Group(*(Text(line, overflow="fold") for line in lines))


def _text(cell: object) -> str:
    # Before int, which bool is in Python.
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.1f}"
    return "-" if cell is None or cell == "" else str(cell)
