"""What `make bench-peers` found: medians, spreads and ratios, as a table, rows and a page. *Pure*.

Owns: `Report`, the whole of a run as it is kept in `build/bench/peers/report.json`, and every
figure that is derived from it.

Invariants:
1. A ratio is of one turn: both systems were measured within minutes. What is shown is the median of
   the turns' ratios, and the least and the greatest.
2. Above 1 we are better, whether more or less of a measure is wanted.
3. A measure that a system does not have, or that failed in a turn, is absent there and not 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from bench.report import Row, figure

OURS: Final = "Magnetar"
PULSAR: Final = "Pulsar"
KAFKA: Final = "Kafka"
SYSTEMS: Final = (OURS, PULSAR, KAFKA)
ABSENT: Final = "-"
TURNS_MIN: Final = 3
QUIET_LOAD: Final = 0.5
A_TRY: Final = (
    "**A try, not a measurement:** fewer than three turns, or a machine that was busy with other"
    " work. Do not quote these figures."
)


class Measure(NamedTuple):
    """A row: its key in the file, what it says, and whether less of it is better."""

    key: str
    text: str
    unit: str
    less: bool = False


MEASURES: Final = (
    Measure("pipelined", "publish, 8 connections, pipelined", "/s"),
    Measure("pipelined_cpu", "publish, pipelined: the server's processor time of each", "us", True),
    Measure("batches", "publish in batches of 15, 8 connections", "/s"),
    Measure("crowd", "publish, 100 publishers, one in flight each", "/s"),
    Measure(
        "crowd_cpu", "publish, 100 publishers: the server's processor time of each", "us", True
    ),
    Measure("single_p50", "publish, one publisher, one in flight, p50", "ms", less=True),
    Measure("single_p99", "publish, one publisher, one in flight, p99", "ms", less=True),
    Measure("dispatch", "dispatch of a backlog to one reader", "/s"),
    Measure("txn_crowd", "transactions (1 message, 1 acknowledgement), 64 clients", "/s"),
    Measure("txn_single_p50", "whole transaction, one client, p50", "ms", less=True),
    Measure("txn_commit_p50", "commit, one client, p50", "ms", less=True),
    Measure("legacy_crowd", "transactions of the v4 kind, 64 clients", "/s"),
    Measure("legacy_single_p50", "whole transaction of the v4 kind, one client, p50", "ms", True),
    Measure("memory", "resident memory at the end of a turn", "MiB", less=True),
)

SHORT: Final = ("pipelined", "crowd", "single_p50", "dispatch", "txn_crowd", "txn_single_p50")
"""Measures that the README shows."""

NOT_THE_SAME: Final = (
    "Magnetar and Pulsar get the same bytes from the same generator. Kafka's requests are made"
    " beforehand and counted by the same code, but speak its own protocol.",
    "Kafka answers the requests of one connection one after the other, and syncs each of them: its"
    " own clients publish in batches, as in the row of batches.",
    "A connection has a topic of its own in the rows of 8 connections, and 100 publishers share one"
    " topic; Kafka's topics have 8 partitions there and 16 for transactions.",
    "The backlog that Kafka's reader gets was written without syncs (only reading is measured), one"
    " record a batch; it is sent from the page cache in parts of 1 MiB.",
    "A transaction acknowledges a message that was received; Kafka's commits an offset of a group"
    " without members, and fetches nothing. It has no request that begins a transaction.",
    "Kafka's broker may try to add a partition to a transaction again after 1 ms (by default 20),"
    " the generator after 1 to 10 ms: with longer pauses a transaction waits for the one before.",
    "Pulsar and Kafka run on a JVM with 1 GiB of heap. Each system is warmed up by the same load"
    " before each measure.",
)


class Machine(msgspec.Struct, frozen=True):
    """Where it ran, and how busy that machine was with other work before and after."""

    processor: str
    cores: int
    memory_gib: float
    system: str
    sync_p50_ms: float
    """A bare write of 1 KiB and fdatasync."""

    load_before: float
    load_after: float


class Report(msgspec.Struct, frozen=True):
    """A run; `samples` by the key of a measure and the name of a system: a value, or none, a turn.

    A load average includes what the run itself does, but for that before it.
    """

    date: str
    machine: Machine
    versions: dict[str, str]
    turns: int
    seconds: float
    samples: dict[str, dict[str, list[float | None]]]
    failures: list[str]


class Spread(NamedTuple):
    """Of some turns: the median, the least and the greatest."""

    median: float
    least: float
    most: float
    turns: int


def spread(values: Sequence[float | None]) -> Spread | None:
    """What the turns that have a value say together."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.median(known), min(known), max(known), len(known))


def ratios(
    measure: Measure, samples: Mapping[str, Sequence[float | None]], peer: str
) -> list[float]:
    """How many times better than the peer we were, in each turn that has both."""
    pairs = zip(samples.get(OURS, ()), samples.get(peer, ()), strict=False)
    return [
        theirs / ours if measure.less else ours / theirs
        for ours, theirs in pairs
        if ours and theirs
    ]


def measured(report: Report) -> list[tuple[Measure, Mapping[str, Sequence[float | None]]]]:
    """The measures of which anything is known, in their order."""
    return [
        (measure, report.samples[measure.key])
        for measure in MEASURES
        if any(spread(values) for values in report.samples.get(measure.key, {}).values())
    ]


def cells(report: Report) -> list[list[str]]:
    """A line of text for each measure: ratios first, then the figures of each system."""
    lines = []
    for measure, samples in measured(report):
        of_peers = [spread(ratios(measure, samples, peer)) for peer in peers_of(report)]
        figures = [spread(samples.get(name, ())) for name in systems_of(report)]
        lines.append(
            [
                measure.text,
                *(ABSENT if each is None else _ratio(each) for each in of_peers),
                *(ABSENT if each is None else _figure(each, measure.unit) for each in figures),
            ]
        )
    return lines


def headings(report: Report) -> list[str]:
    return ["measure", *(f"x {name}" for name in peers_of(report)), *systems_of(report)]


def systems_of(report: Report) -> list[str]:
    return [name for name in SYSTEMS if name in report.versions]


def peers_of(report: Report) -> list[str]:
    return [name for name in systems_of(report) if name != OURS]


def rows(report: Report) -> list[Row]:
    """The same for `make bench-diff`: our medians, beside each peer's."""
    found = []
    for measure, samples in measured(report):
        ours = spread(samples.get(OURS, ()))
        if ours is None:
            continue
        row = Row(measure=measure.text, value=ours.median, unit=measure.unit, samples=ours.turns)
        beside = {peer: spread(ratios(measure, samples, peer)) for peer in peers_of(report)}
        anchored = [
            msgspec.structs.replace(
                row, measure=f"{row.measure}, beside {peer}", anchor=peer, ratio=each.median
            )
            for peer, each in beside.items()
            if each is not None
        ]
        found += anchored or [row]
    return found


def circumstances(report: Report) -> list[str]:
    """Machine, versions and noise, in lines."""
    at = report.machine
    quiet = report.turns >= TURNS_MIN and at.load_before < QUIET_LOAD
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return [
        f"{versions}.",
        f"{at.processor}, {at.cores} cores for servers and clients together,"
        f" {at.memory_gib:.0f} GiB; {at.system}; a bare 1 KiB fdatasync {at.sync_p50_ms:.2f} ms.",
        f"{report.date}: {report.turns} turns, {report.seconds:g} s of each load; other work on the"
        f" machine before it: load average {at.load_before:.1f}, after it {at.load_after:.1f}.",
        *(() if quiet else (A_TRY,)),
    ]


def page(report: Report) -> str:
    """The section of docs/benchmarks.md."""
    notes = [f"- {note}" for note in NOT_THE_SAME]
    failed = [f"- failed: {each}" for each in report.failures]
    meaning = (
        "Ratios say how many times better Magnetar is: medians of the turns, in which the systems"
        " run one after the other, with the least and the greatest turn. 1 KiB messages; what is"
        " acknowledged was synced, at all of them."
    )
    parts = [meaning, " ".join(circumstances(report)), _table(headings(report), cells(report))]
    parts += ["What is not the same:", "\n".join([*notes, *failed])]
    return "\n\n".join(parts) + "\n"


def short_page(report: Report) -> str:
    """The section of the README: medians alone."""
    lead = (
        "Beside its peers, in turns on one machine, with the same load and a sync behind every"
        " acknowledgement\n([what is not the"
        " same](docs/benchmarks.md#beside-apache-pulsar-and-kafka)):\n\n"
    )
    lines = []
    for measure, samples in measured(report):
        if measure.key in SHORT:
            of = [spread(samples.get(name, ())) for name in systems_of(report)]
            shown = [ABSENT if each is None else _median(each, measure.unit) for each in of]
            lines.append([measure.text, *shown])
    names = [
        f"{name} {report.versions[name]}" if name != OURS else name for name in systems_of(report)
    ]
    return f"{lead}{_table(['', *names], lines)}\n"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    under = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, under, *lines))


def _ratio(ratio: Spread) -> str:
    return f"{_short(ratio.median)} ({_short(ratio.least)}-{_short(ratio.most)})"


def _figure(of: Spread, unit: str) -> str:
    return f"{_median(of, unit)} ({figure(of.least)}-{figure(of.most)})"


def _median(of: Spread, unit: str) -> str:
    return f"{figure(of.median)}{unit}" if unit.startswith("/") else f"{figure(of.median)} {unit}"


def _short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}" if ratio < 1 else f"{ratio:.1f}"
