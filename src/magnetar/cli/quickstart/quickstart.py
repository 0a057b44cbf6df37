"""`magnetar quickstart`: the main job of the project, from nothing to a proof, in two minutes.

Owns: the verb: what it says before, on the way and at the end, the page that it writes, and its
exit code, which is 0 only if the output is exactly once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from magnetar.cli.demo.demo import data_folder
from magnetar.cli.next_step import to_type
from magnetar.cli.output import print_table
from magnetar.cli.quickstart import plots
from magnetar.cli.quickstart.report import Moments, quantile, verdict_in_words
from magnetar.cli.quickstart.report import page as made_page
from magnetar.cli.quickstart.report import plots as drawn
from magnetar.cli.quickstart.shop import Traffic, moments_of, traffic
from magnetar.cli.verbs.pipeline import need

if TYPE_CHECKING:
    from magnetar.cli.quickstart.run import Seen, Tell

_NEXT: Final = (
    "pipeline init my-pipeline.yaml",
    "serve --data ./data",
    "pipeline run my-pipeline.yaml",
)
_NEXT_PAGE: Final = "docs/spark/tutorial.md"
_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_MEDIAN: Final = "latency p50"
_LINES_EVERY: Final = 0.05
"""Without a terminal, a line for each twentieth of the way."""


@click.command()
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="A new or empty folder to work in and keep; else a temporary one.",
)
@click.option(
    "--page",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("magnetar-quickstart.html"),
    show_default=True,
    help="Where the page with the plots goes.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(10, 3600),
    default=60.0,
    show_default=True,
    help="How long orders come in.",
)
@click.option(
    "--rate",
    type=click.IntRange(10, 20_000),
    default=400,
    show_default=True,
    help="Orders per second.",
)
@click.option(
    "--kills", type=click.IntRange(0, 20), default=1, show_default=True, help="Of the driver."
)
@click.option("--seed", type=int, default=8, show_default=True, help="Of the shop.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def quickstart(
    context: click.Context,
    data: Path | None,
    page: Path,
    seconds: float,
    rate: int,
    kills: int,
    seed: int,
    as_json: bool,
) -> None:
    """Run an exactly-once pipeline through splits, merges and a kill, and verify it."""
    # First: a missing package or Java is said before minutes are spent.
    _check()
    from magnetar.cli.quickstart.run import run

    # All that is sent, and all that must come of it, is known before anything runs.
    shop = traffic(seed=seed, seconds=seconds, orders_per_second=rate)
    with data_folder(data) as folder, _told() as tell:
        seen = asyncio.run(run(folder.absolute(), shop, moments_of(kills, seed=seed), tell))
    # Outside of the block: broker, driver and a temporary folder are gone when the report is made.
    moments = Moments(
        seconds=seen.seconds, sent=seen.sent, received=seen.received, expected=shop.expected
    )
    outages = _outages(seen, moments)
    latencies = {
        "all": _quantiles([value for _, value in moments.latencies()]),
        "nothing_killed": _quantiles(moments.quiet_latencies(outages)),
    }
    facts = _facts(shop, seen, latencies, seed)
    made = (
        f"{datetime.now(UTC):%d %B %Y, %H:%M} UTC. Magnetar {version('magnetar')}, seed {seed}, "
        f"{rate:,} orders per second for {seconds:g} s."
    )
    _write_page(page, seen, moments, outages, facts, made)
    # stdout has the report alone; progress went to stderr.
    if as_json:
        found: dict[str, object] = {"seed": seed, "page": str(page), "batches": seen.batches}
        found |= {"killed_batches": seen.killed_batches, "segments": seen.segments}
        found |= {"latency_ms": latencies}
        click.echo(json.dumps(found | asdict(seen.verdict), indent=2))
    else:
        print_table(("what", "value", ""), facts, none="")
        click.echo(f"verified: {verdict_in_words(seen.verdict)}")
        click.echo(f"plots: {page.absolute().as_uri()}")
        click.echo("next: " + "; ".join(_next_steps()))
    # The page is written all the same: whoever has to find out why needs its plots.
    if not seen.verdict.is_exact:
        context.exit(1)


def _next_steps() -> list[str]:
    return [*map(to_type, _NEXT), _NEXT_PAGE]


def _check() -> None:
    """What is missing is said before anything starts."""
    need("pyspark", "pyarrow", "yaml")
    from magnetar.spark.pipeline.java import java_home

    java_home()


@contextmanager
def _told() -> Iterator[Tell]:
    """A bar on a terminal, a few lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        last = -1.0

        def line(what: str, done: float) -> None:
            nonlocal last
            # A log gets a line now and then, not one for each tick of the traffic.
            if done - last >= _LINES_EVERY or done == 0:
                last = done
                console.print(f"{done:4.0%} {what}", highlight=False, soft_wrap=True)

        yield line
        return
    columns = (BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda what, done: progress.update(task, description=what, completed=done)


def _outages(seen: Seen, moments: Moments) -> list[plots.PlotShade]:
    # Kills are marked twice, when it dies and when it works again.
    ends = [mark.at for mark in seen.marks if mark.is_kill]
    dead = list(zip(ends[::2], ends[1::2], strict=True))
    return moments.outages(dead) if dead else []


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {
        name: round(quantile(values, share), 1) if values else 0.0
        for name, share in _SHARES.items()
    }


def _facts(
    shop: Traffic, seen: Seen, latencies: Mapping[str, Mapping[str, float]], seed: int
) -> list[tuple[str, str, str]]:
    killed = ", ".join(f"batch {number}" for number in seen.killed_batches)
    changes = sum(not mark.is_kill for mark in seen.marks)
    # Over all results, with no second left out, and beside it without the dead driver's time.
    every, quiet = latencies["all"], latencies["nothing_killed"]
    return [
        ("events sent", f"{len(shop.events):,}", f"orders and payments of seed {seed}"),
        ("settled orders", f"{seen.verdict.found:,}", "read back after the end, without Spark"),
        ("expected", f"{seen.verdict.expected:,}", "by a batch computation over what was sent"),
        ("missing", f"{seen.verdict.missing:,}", ""),
        ("twice", f"{seen.verdict.doubled:,}", ""),
        ("unexpected", f"{seen.verdict.unexpected:,}", ""),
        ("batches", f"{seen.batches:,}", f"killed on their way: {killed or 'none'}"),
        ("splits and merges", f"{changes:,}", "of the topics, while in use"),
        (_MEDIAN, f"{quiet['p50']:,.0f} ms", "payment to result, while nothing is killed"),
        ("latency p99", f"{quiet['p99']:,.0f} ms", "of the same results"),
        ("latency of all", f"{every['p50']:,.0f} ms", "p50 with the time of kills and catching up"),
        ("", f"{every['p99']:,.0f} ms", "p99 of them"),
    ]


def _write_page(
    path: Path,
    seen: Seen,
    moments: Moments,
    outages: Sequence[plots.PlotShade],
    facts: list[tuple[str, str, str]],
    made: str,
) -> None:
    # The page shows the file that was run, to the letter.
    from magnetar.cli.quickstart.driver import pipeline_text

    marks = [
        plots.PlotMark(mark.at, mark.what, "--bad" if mark.is_kill else "--mark")
        for mark in seen.marks
    ]
    layouts = {name: list(spans.values()) for name, spans in seen.layouts.items()}
    median = next(value for name, value, _ in facts if name == _MEDIAN)
    text = made_page(
        title="Magnetar: an exactly-once pipeline through splits, merges and a kill",
        made=made,
        figures=(
            ("settled orders", f"{seen.verdict.found:,}"),
            ("missing", f"{seen.verdict.missing:,}"),
            ("twice", f"{seen.verdict.doubled:,}"),
            ("median latency", median),
        ),
        verdict=verdict_in_words(seen.verdict),
        is_good=seen.verdict.is_exact,
        facts=facts,
        plots=drawn(moments, layouts, plots.Timeline(seen.seconds, marks, outages)),
        pipeline=pipeline_text(),
        next_steps=_next_steps(),
        style=(files("magnetar.cli.quickstart") / "report_page.css").read_text("utf-8"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
