"""The output of verbs: JSON for programs, tables for people.

Owns: the one form of each. JSON goes to stdout as it came; a table has a heading per column and
never breaks a name over two lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

import click
from rich.console import Console
from rich.table import Table

_WIDTH_WITHOUT_TERMINAL = 240
_NUMBER = re.compile(r"[\d,.]+|-")


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, none: str) -> None:
    """One line per row; `none` is said where there is not a single one."""
    shown = [[_text(cell) for cell in row] for row in rows]
    if not shown:
        click.echo(none)
        return
    table = Table()
    for number, heading in enumerate(headings):
        # By what is shown, not by type: a column of ids as text stays on the left.
        numeric = all(_NUMBER.fullmatch(row[number]) for row in shown)
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    for row in shown:
        table.add_row(*row)
    # Without a terminal nothing is cut: whoever reads it, reads lines.
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_WITHOUT_TERMINAL)
    console.print(table, markup=False)


def _text(cell: object) -> str:
    # Before int, which bool is in Python.
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.1f}"
    return "-" if cell is None or cell == "" else str(cell)
