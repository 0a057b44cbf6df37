"""Pure: line plots over time as SVG, drawn by hand, readable on light and dark pages.

Owns: scales, ticks, lines, markers. Colours are names of CSS variables, which the page defines once
for each scheme.

Invariants:
1. All plots of a page have the same time axis and width, so that a moment stands at one place.
2. A gap in the data is a gap in the line: nothing is drawn where nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

WIDTH: Final = 960
HEIGHT: Final = 240

_LEFT: Final = 64
_RIGHT: Final = 16
_TOP: Final = 34
_BOTTOM: Final = 30
_TICKS: Final = 5
_TEXT_HEIGHT: Final = 13
_TIMES_MAX: Final = 14
# Steps that people read as times: seconds, then parts of a minute, then of an hour.
_STEPS: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 3600)


class PlotLine(NamedTuple):
    """One line: points of (seconds, value), or None for a gap."""

    name: str
    colour: str
    points: Sequence[tuple[float, float | None]]


class PlotMark(NamedTuple):
    """A mark on the time axis: what happened at a moment."""

    at: float
    text: str
    colour: str = "--mark"


def plot(
    title: str, unit: str, lines: Sequence[PlotLine], marks: Sequence[PlotMark], seconds: float
) -> str:
    """One plot, from 0 to `seconds`."""
    top = _ceiling(value for line in lines for _, value in line.points if value is not None)
    pieces = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>',
        *_legend(lines),
        *_grid(top, unit, seconds),
        *_marks(marks, seconds),
    ]
    # Lines are drawn last: over the grid and the marks.
    for line in lines:
        for run in _runs(line.points):
            path = " ".join(f"{_x(at, seconds):.1f},{_y(value, top):.1f}" for at, value in run)
            pieces.append(f'<polyline points="{path}" style="stroke:var({line.colour})"/>')
    return "\n".join([*pieces, "</svg>"])


def _x(at: float, seconds: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * at / max(seconds, 1e-9)


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / top


def _ceiling(values: Iterator[float]) -> float:
    """The end of the axis: 1, 2 or 5 times a power of ten, not below the largest value."""
    largest = max(values, default=0.0)
    # An empty plot still needs an axis, and the logarithm a positive number.
    if largest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    return next(each for step in (1, 2, 5, 10) if (each := step * power) >= largest)


def _runs(
    points: Sequence[tuple[float, float | None]],
) -> Iterator[list[tuple[float, float]]]:
    """The parts of a line between its gaps."""
    run: list[tuple[float, float]] = []
    for at, value in points:
        if value is not None:
            run.append((at, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _legend(lines: Sequence[PlotLine]) -> Iterator[str]:
    x = float(WIDTH - _RIGHT)
    for line in reversed(lines):
        # SVG cannot measure text: seven pixels a letter is about right for the page's font.
        x -= 7.0 * len(line.name) + 30
        yield f'<path d="M{x:.0f},12h14" style="stroke:var({line.colour})" class="key"/>'
        yield f'<text x="{x + 20:.0f}" y="16">{escape(line.name)}</text>'


def _grid(top: float, unit: str, seconds: float) -> Iterator[str]:
    for number in range(_TICKS + 1):
        value = top * number / _TICKS
        y = _y(value, top)
        yield f'<path class="grid" d="M{_LEFT},{y:.1f}H{WIDTH - _RIGHT}"/>'
        yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}">{_short(value)}</text>'
    yield f'<text class="unit" x="0" y="{_TOP - 8}">{escape(unit)}</text>'
    step = next(each for each in _STEPS if seconds / each <= _TIMES_MAX or each == _STEPS[-1])
    for number in range(int(seconds // step) + 1):
        x = _x(number * step, seconds)
        yield f'<text class="time" x="{x:.1f}" y="{HEIGHT - 10}">{number * step} s</text>'


def _marks(marks: Sequence[PlotMark], seconds: float) -> Iterator[str]:
    lines = [_x(mark.at, seconds) for mark in marks]
    for mark, x, text_x in zip(marks, lines, _beside(lines), strict=True):
        yield (
            f'<path class="mark" d="M{x:.1f},{_TOP}V{HEIGHT - _BOTTOM}" '
            f'style="stroke:var({mark.colour})"><title>{escape(mark.text)}</title></path>'
        )
        yield (
            f'<text class="said" style="fill:var({mark.colour})" '
            f'transform="translate({text_x:.1f},{_TOP + 4}) rotate(90)">{escape(mark.text)}</text>'
        )


def _beside(lines: Sequence[float]) -> list[float]:
    """Where the texts of marks stand: right of their lines, none upon another or over the edge."""
    places: list[float] = []
    for x in lines:
        places.append(max(x + 4, places[-1] + _TEXT_HEIGHT if places else 0.0))
    edge = float(WIDTH - _TEXT_HEIGHT)
    # Texts that would run over the edge are pushed back, and those before them in turn.
    for number in reversed(range(len(places))):
        places[number] = min(places[number], edge)
        edge = places[number] - _TEXT_HEIGHT
    return places


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"
