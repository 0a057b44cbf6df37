"""Pure: plots over time as SVG, drawn by hand, readable on light and dark pages, wide and narrow.

Owns: scales, ticks, lines, segments, marks, shades. Colours are names of CSS variables, which the
page defines once for each scheme.

Invariants:
1. All plots of a page have the same time axis and width, so that a moment stands at one place. Each
   is drawn twice, for wide and for narrow screens; the page shows one of them, with text of its own
   size.
2. A gap in the data is a gap in the line: nothing is drawn where nothing was measured.
3. What happened in a shade (an outage) does not stretch a scale: beyond its end the line stays at
   the top, and a text there says how far it went.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

_RIGHT: Final = 12
_TOP: Final = 24
_BOTTOM: Final = 26
_TICKS: Final = 4
_NUMBER_WIDTH: Final = 16
"""Of the number of a mark, with the space around it."""
_RING: Final = 65536
# Steps that people read as times: seconds, then parts of a minute, then of an hour.
_STEPS: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 3600)
_SEGMENT_COLOURS: Final = ("--in", "--third", "--mark", "--out")


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


class PlotShade(NamedTuple):
    """A span of the time axis in which things were not as usual."""

    since: float
    until: float
    text: str


class SegmentSpan(NamedTuple):
    """One segment: its part of the ring, and the time in which it took messages."""

    number: int
    first: int
    last: int
    since: float
    until: float | None
    """None: it still does."""


class Timeline(NamedTuple):
    """The time axis that the plots of a page share."""

    seconds: float
    marks: Sequence[PlotMark] = ()
    shades: Sequence[PlotShade] = ()


class Frame(NamedTuple):
    """The size of a drawing, and the class by which the page shows or hides it."""

    name: str
    width: int
    height: int
    left: int
    times_max: int

    def x(self, at: float, seconds: float) -> float:
        share = min(1.0, max(0.0, at / max(seconds, 1e-9)))
        return self.left + (self.width - self.left - _RIGHT) * share

    def y(self, value: float, top: float) -> float:
        share = min(1.0, value / top)
        return self.height - _BOTTOM - (self.height - _TOP - _BOTTOM) * share


_Inside = Callable[[Frame], Iterable[str]]
"""Draws what is in a plot."""

FRAMES: Final = (Frame("wide", 960, 220, 60, 14), Frame("narrow", 345, 190, 42, 6))


def plot(title: str, unit: str, lines: Sequence[PlotLine], timeline: Timeline) -> str:
    """One plot, as a figure of the page."""
    top = _ceiling(_usual(lines, timeline))
    keys = "".join(
        f'<span class="key"><i style="background:var({line.colour})"></i>{escape(line.name)}</span>'
        for line in lines
    )

    def inside(frame: Frame) -> Iterator[str]:
        yield from _grid(frame, top, unit)
        # Lines are drawn last: over the grid, the shades and the marks.
        for line in lines:
            for run in _runs(line.points):
                path = " ".join(
                    f"{frame.x(at, timeline.seconds):.1f},{frame.y(value, top):.1f}"
                    for at, value in run
                )
                yield f'<polyline points="{path}" style="stroke:var({line.colour})"/>'
        yield from _beyond(frame, lines, top, timeline)

    return _figure(title, keys, timeline, inside)


def segments(title: str, spans: Sequence[SegmentSpan], timeline: Timeline) -> str:
    """The segments of a topic: when each took messages, and for which part of the ring."""

    def inside(frame: Frame) -> Iterator[str]:
        for share, text in ((0.0, "0000"), (0.5, "8000"), (1.0, "ffff")):
            y = frame.y(share, 1.0)
            yield f'<text class="tick" x="{frame.left - 6}" y="{y + 4:.1f}">{text}</text>'
        for span in spans:
            x = frame.x(span.since, timeline.seconds)
            until = timeline.seconds if span.until is None else span.until
            width = max(0.0, frame.x(until, timeline.seconds) - x)
            y = frame.y((span.last + 1) / _RING, 1.0)
            height = frame.y(span.first / _RING, 1.0) - y
            colour = _SEGMENT_COLOURS[span.number % len(_SEGMENT_COLOURS)]
            yield (
                f'<rect class="segment" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}" style="fill:var({colour})"><title>segment {span.number}: '
                f"{span.first:04x}-{span.last:04x}</title></rect>"
            )
            # Only where it has room: half a number would be read as another one.
            if width > 8 * len(str(span.number)) + 12 and height > 14:
                yield (
                    f'<text class="number" x="{x + 6:.1f}" y="{y + height / 2 + 4:.1f}">'
                    f"{span.number}</text>"
                )

    return _figure(title, "", timeline, inside)


def legend(timeline: Timeline) -> str:
    """What the numbers of marks and the shades mean."""
    rows = [
        f'<li><b style="color:var({mark.colour})">{number}</b> '
        f"<span>{mark.at:.1f} s</span> {escape(mark.text)}</li>"
        for number, mark in enumerate(timeline.marks, start=1)
    ]
    rows += [
        f'<li><b class="shaded"></b> <span>{shade.since:.1f} to {shade.until:.1f} s</span> '
        f"{escape(shade.text)}</li>"
        for shade in timeline.shades
    ]
    return f'<ul class="legend">{"".join(rows)}</ul>' if rows else ""


def _figure(title: str, keys: str, timeline: Timeline, inside: _Inside) -> str:
    pieces = [f"<figure><figcaption><b>{escape(title)}</b>{keys}</figcaption>"]
    for frame in FRAMES:
        pieces += [
            f'<svg class="{frame.name}" viewBox="0 0 {frame.width} {frame.height}" role="img" '
            f'aria-label="{escape(title)}">',
            *_shades(frame, timeline),
            *_times(frame, timeline.seconds),
            *inside(frame),
            *_marks(frame, timeline),
            "</svg>",
        ]
    return "\n".join([*pieces, "</figure>"])


# --- scales


def _usual(lines: Sequence[PlotLine], timeline: Timeline) -> list[float]:
    """The values by which a plot is scaled: those outside of the shades, if there are any."""
    found = [(at, value) for line in lines for at, value in line.points if value is not None]
    outside = [value for at, value in found if not _is_shaded(at, timeline)]
    return outside or [value for _, value in found]


def _is_shaded(at: float, timeline: Timeline) -> bool:
    return any(shade.since <= at <= shade.until for shade in timeline.shades)


def _ceiling(values: Iterable[float]) -> float:
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


# --- what is around the data


def _grid(frame: Frame, top: float, unit: str) -> Iterator[str]:
    for number in range(_TICKS + 1):
        value = top * number / _TICKS
        y = frame.y(value, top)
        yield f'<path class="grid" d="M{frame.left},{y:.1f}H{frame.width - _RIGHT}"/>'
        yield f'<text class="tick" x="{frame.left - 6}" y="{y + 4:.1f}">{_short(value)}</text>'
    yield f'<text class="unit" x="0" y="10">{escape(unit)}</text>'


def _times(frame: Frame, seconds: float) -> Iterator[str]:
    step = next(each for each in _STEPS if seconds / each <= frame.times_max or each == _STEPS[-1])
    for number in range(int(seconds // step) + 1):
        x = frame.x(number * step, seconds)
        yield f'<text class="time" x="{x:.1f}" y="{frame.height - 8}">{number * step} s</text>'


def _shades(frame: Frame, timeline: Timeline) -> Iterator[str]:
    for shade in timeline.shades:
        x = frame.x(shade.since, timeline.seconds)
        width = frame.x(shade.until, timeline.seconds) - x
        yield (
            f'<rect class="shade" x="{x:.1f}" y="{_TOP}" width="{width:.1f}" '
            f'height="{frame.height - _TOP - _BOTTOM}"><title>{escape(shade.text)}</title></rect>'
        )


def _beyond(
    frame: Frame, lines: Sequence[PlotLine], top: float, timeline: Timeline
) -> Iterator[str]:
    """How far the lines go beyond the scale in each shade (invariant 3)."""
    for shade in timeline.shades:
        values = [
            value
            for line in lines
            for at, value in line.points
            if value is not None and shade.since <= at <= shade.until
        ]
        if max(values, default=0.0) > top:
            x = (
                frame.x(shade.since, timeline.seconds) + frame.x(shade.until, timeline.seconds)
            ) / 2
            yield (
                f'<text class="beyond" x="{x:.1f}" y="{_TOP + 14}">'
                f"\N{UPWARDS ARROW} {_short(max(values))}</text>"
            )


def _marks(frame: Frame, timeline: Timeline) -> Iterator[str]:
    lines = [frame.x(mark.at, timeline.seconds) for mark in timeline.marks]
    placed = zip(timeline.marks, lines, _beside(lines, frame), strict=True)
    for number, (mark, x, text_x) in enumerate(placed, start=1):
        yield (
            f'<path class="mark" d="M{x:.1f},{_TOP}V{frame.height - _BOTTOM}" '
            f'style="stroke:var({mark.colour})"><title>{escape(mark.text)}</title></path>'
        )
        yield (
            f'<text class="said" style="fill:var({mark.colour})" x="{text_x:.1f}" '
            f'y="{_TOP - 6}">{number}</text>'
        )


def _beside(lines: Sequence[float], frame: Frame) -> list[float]:
    """Where the numbers of marks stand: over their lines, none upon another or over the edge."""
    # As many as there is room for keep the full distance; more than that move together.
    room = frame.width - frame.left - _NUMBER_WIDTH
    step = min(_NUMBER_WIDTH, room / max(1, len(lines)))
    places: list[float] = []
    for x in lines:
        places.append(max(x, places[-1] + step if places else 0.0))
    edge = float(frame.width - _NUMBER_WIDTH / 2)
    # Those that would run over the edge are pushed back, and those before them in turn.
    for number in reversed(range(len(places))):
        places[number] = min(places[number], edge)
        edge = places[number] - step
    return places


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}"
