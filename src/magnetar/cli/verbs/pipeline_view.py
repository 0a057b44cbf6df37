"""The view of a running pipeline: a live table on a terminal, a line per batch elsewhere.

Owns: the two watchers of a run, and the summary at its end. Everything goes to stderr but the
summary, which is the product.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from magnetar.cli.output import print_table, table
from magnetar.spark.pipeline.progress import HEADINGS, duration, line, row
from magnetar.spark.pipeline.run import Watcher
from magnetar.spark.pipeline.state import RunState

_LINES_SECONDS: Final = 1.0
_FRAMES_PER_SECOND: Final = 4.0


class _Lines:
    """The watcher for logs: every step, and each sink at most once a second."""

    def __init__(self) -> None:
        self._told_at: dict[str, float] = {}

    def told(self, what: str) -> None:
        click.echo(what, err=True)

    def moved(self, name: str, state: RunState) -> None:
        now = time.monotonic()
        if now - self._told_at.get(name, 0.0) >= _LINES_SECONDS and state.queries[name].batch >= 0:
            self._told_at[name] = now
            click.echo(line(name, state.queries[name]), err=True)


class _Table:
    """The watcher for people: one row per sink, in its place."""

    def __init__(self, live: Live, title: str) -> None:
        self._live = live
        self._title = title
        self._what = "starting"
        self._started = time.monotonic()
        self._state: RunState | None = None

    def told(self, what: str) -> None:
        self._what = what
        # Now: what follows may keep this process busy before the next frame.
        self._live.refresh()

    def moved(self, name: str, state: RunState) -> None:
        self._state = state

    def __rich__(self) -> Group:
        """Drawn anew for every frame."""
        age = duration(time.monotonic() - self._started)
        head = Text(f"{self._title}: {self._what}, {age}  (Ctrl-C stops it after its batch)")
        # Spark is still starting: there is a title and nothing to list.
        if self._state is None:
            return Group(head)
        width = self._live.console.width
        return Group(head, table(HEADINGS, rows(self._state), width=width))


@contextmanager
def watching(title: str) -> Iterator[Watcher]:
    # A log file, a container or CI: redrawing would fill it with control characters.
    if not sys.stderr.isatty():
        yield _Lines()
        return
    # On a descriptor of its own: while Spark starts, stderr leads to the log of the JVM.
    # Transient: the summary has the last table, and there should be one of it.
    with (
        os.fdopen(os.dup(sys.stderr.fileno()), "w") as terminal,
        Live(
            console=Console(file=terminal),
            refresh_per_second=_FRAMES_PER_SECOND,
            transient=True,
        ) as live,
    ):
        view = _Table(live, title)
        live.update(view)
        yield view


def rows(state: RunState) -> list[Sequence[str]]:
    return [row(name, each) for name, each in state.queries.items()]


def summary(state: RunState) -> None:
    """What the run did, for whoever comes back to the terminal."""
    # Wall time, which may have been set back during the run.
    seconds = max(0.0, state.updated_at - state.started_at)
    batches = sum(each.batches for each in state.queries.values())
    read = sum(each.input_rows for each in state.queries.values())
    click.echo(
        f"{state.name} {state.phase} after {duration(seconds)}: {batches:,} batches, {read:,} rows"
    )
    print_table(HEADINGS, rows(state), none="no sinks")
