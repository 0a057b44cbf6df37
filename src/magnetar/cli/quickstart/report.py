"""Pure: what a run of `magnetar quickstart` comes to, in figures, lines and plots.

Owns: the way from single events to values per second, and their words; the text of the page, one
file that needs nothing else. Its style (`report_page.css`) follows the reader's choice of a light
or dark screen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from magnetar.cli.quickstart.plots import (
    DrawnSegment,
    PlotLine,
    PlotShade,
    Timeline,
    legend,
    plot,
    segments,
)
from magnetar.cli.quickstart.shop import Comparison, Settled

_OUTAGE: Final = (
    "the driver is dead, starts again and catches up; scales leave this time out, and "
    "\N{UPWARDS ARROW} says how far a line goes beyond"
)


class Moments:
    """The moments of a run, in seconds since the start of the traffic."""

    def __init__(
        self,
        *,
        seconds: float,
        sent: Sequence[float],
        received: Sequence[tuple[float, Settled | None]],
        expected: Mapping[Settled, int],
    ) -> None:
        self.seconds = seconds
        self._sent = sent
        self._received = received
        self._expected = expected

    def sent_per_second(self) -> list[tuple[float, float | None]]:
        return _per_second(self._sent, self.seconds)

    def received_per_second(self) -> list[tuple[float, float | None]]:
        return _per_second([at for at, _ in self._received], self.seconds)

    def lag(self) -> list[tuple[float, float | None]]:
        """Results that were due and had not come, at the end of each second."""
        due = Counter(int(at_ms / 1000) for at_ms in self._expected.values())
        came = Counter(int(at) for at, _ in self._received)
        behind = 0
        points: list[tuple[float, float | None]] = []
        for second in range(int(self.seconds) + 1):
            behind += due[second] - came[second]
            # Below zero only if more came than was due: repeated or
            # unexpected results, which the verdict counts.
            points.append((second + 1.0, float(max(0, behind))))
        return points

    def outages(self, dead: Sequence[tuple[float, float]]) -> list[PlotShade]:
        """The times without a driver, each until no more is late than before the first of them."""
        usual = max((value or 0.0 for at, value in self.lag() if at <= dead[0][0]), default=0.0)
        found: list[PlotShade] = []
        for since, until in dead:
            later = (at for at, value in self.lag() if at > until and (value or 0.0) <= usual)
            # The results of that second are late still: they are its last ones.
            shade = PlotShade(since, next(later, self.seconds) + 1.0, _OUTAGE)
            # Killed again before it had caught up: one outage, for whoever waits for results.
            if found and since <= found[-1].until:
                shade = shade._replace(since=found.pop().since)
            found.append(shade)
        return found

    def latencies(self) -> list[tuple[float, float]]:
        """When a result came, and how many milliseconds after its payment was sent."""
        # By the time at which the payment was due, so that a late send counts as latency, too.
        return [
            (at, at * 1000 - self._expected[row])
            for at, row in self._received
            if row is not None and row in self._expected
        ]

    def quiet_latencies(self, outages: Sequence[PlotShade]) -> list[float]:
        """The latencies, in milliseconds, of results that came while no driver was missed."""
        return [
            value
            for at, value in self.latencies()
            if not any(each.since <= at <= each.until for each in outages)
        ]

    def latency(self, share: float) -> list[tuple[float, float | None]]:
        """The given quantile of the latencies of each second; a gap where nothing came."""
        by_second: dict[int, list[float]] = {}
        for at, value in self.latencies():
            by_second.setdefault(int(at), []).append(value)
        points: list[tuple[float, float | None]] = []
        for second in range(int(self.seconds) + 1):
            values = by_second.get(second)
            points.append((second + 0.5, quantile(values, share) if values else None))
        return points


def spans_of(record: Mapping[str, Any], zero_ms: float) -> dict[int, DrawnSegment]:
    """The segments in the record of a topic, in seconds since the start of the traffic."""
    found = {}
    for each in record["segments"].values():
        number, sealed_ms = int(each["segmentId"]), each["sealedAtMs"]
        found[number] = DrawnSegment(
            number,
            each["hashRange"]["start"],
            each["hashRange"]["end"],
            (each["createdAtMs"] - zero_ms) / 1000,
            None if each["state"] == "ACTIVE" else (sealed_ms - zero_ms) / 1000,
        )
    return found


def plots(
    moments: Moments, layouts: Mapping[str, Sequence[DrawnSegment]], timeline: Timeline
) -> list[str]:
    # The segments first: they are what the rest goes through. One timeline for all: a moment stands
    # at one place of the page.
    return [
        legend(timeline),
        *(
            segments(f"Segments of {name}, by time and part of the ring of keys", spans, timeline)
            for name, spans in layouts.items()
        ),
        plot(
            "Throughput",
            "per second",
            [
                PlotLine("events sent", "--in", moments.sent_per_second()),
                PlotLine("settled orders", "--out", moments.received_per_second()),
            ],
            timeline,
        ),
        plot(
            "Lag: results that were due and had not come",
            "results",
            [PlotLine("lag", "--third", moments.lag())],
            timeline,
        ),
        plot(
            "Latency: from the payment to its settled order, committed and read",
            "ms",
            [
                PlotLine("p50", "--in", moments.latency(0.50)),
                PlotLine("p99", "--out", moments.latency(0.99)),
            ],
            timeline,
        ),
    ]


def verdict_in_words(verdict: Comparison) -> str:
    if verdict.is_exact:
        return (
            f"exactly once: {verdict.found:,} results, each of the {verdict.expected:,} that a "
            "batch computation expects, none missing, none twice, none else"
        )
    return (
        f"NOT exactly once: {verdict.found:,} results of {verdict.expected:,} expected; "
        f"{verdict.missing:,} missing, {verdict.doubled:,} twice, {verdict.unexpected:,} unexpected"
    )


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    # The nearest value that was measured, none in between.
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _per_second(moments: Sequence[float], seconds: float) -> list[tuple[float, float | None]]:
    counts = Counter(int(at) for at in moments)
    return [(second + 0.5, float(counts[second])) for second in range(int(seconds) + 1)]


def page(
    *,
    title: str,
    made: str,
    verdict: str,
    is_good: bool,
    figures: Sequence[tuple[str, str]],
    facts: Sequence[tuple[str, str, str]],
    plots: Sequence[str],
    pipeline: str,
    next_steps: Sequence[str],
    style: str,
) -> str:
    """The whole page; `figures` are name and value, `facts` rows of name, value and remark."""
    # Escaped here, once: facts and the pipeline are text, plots are SVG of our own and stay as they
    # are. The page has no script, so that it can be mailed and opened anywhere.
    rows = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in fact)}</tr>" for fact in facts
    )
    large = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures
    )
    steps = "\n".join(f"<li><code>{escape(step)}</code></li>" for step in next_steps)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{style}</style>
<h1>{escape(title)}</h1>
<p class="made">{escape(made)}</p>
<dl class="figures {"good" if is_good else "bad"}">
{large}
</dl>
<p class="{"good" if is_good else "bad"}"><strong>{escape(verdict)}</strong></p>
<h2>Over time</h2>
{"".join(plots)}
<h2>In numbers</h2>
<table>
{rows}
</table>
<h2>The pipeline</h2>
<pre>{escape(pipeline)}</pre>
<h2>Next</h2>
<ul>
{steps}
</ul>
</html>
"""
