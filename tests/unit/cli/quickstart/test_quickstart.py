"""The parts of `magnetar quickstart` that judge and draw: they must see a loss."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from importlib.resources import files
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.cli.quickstart.driver import pipeline_text
from magnetar.cli.quickstart.plots import (
    FRAMES,
    DrawnSegment,
    PlotLine,
    PlotMark,
    PlotShade,
    Timeline,
    legend,
    plot,
    segments,
)
from magnetar.cli.quickstart.report import Moments, page, plots, spans_of, verdict_in_words
from magnetar.cli.quickstart.shop import Settled, judged, moments_of, settled, traffic
from magnetar.spark.pipeline.file import parsed
from tests.meta.tree import ROOT

SHOP = traffic(seed=4, seconds=3, orders_per_second=200)


def test_a_seed_gives_the_same_shop_everywhere() -> None:
    assert traffic(seed=4, seconds=3, orders_per_second=200) == SHOP
    assert traffic(seed=5, seconds=3, orders_per_second=200).events != SHOP.events
    first = SHOP.events[0]
    assert (first.topic, json.loads(first.value)["id"]) == ("orders", "o-0000000")
    assert len(SHOP.events) == 1242, "these numbers are the same on every machine"
    assert len(SHOP.expected) == 629


def test_one_kill_is_in_the_middle_and_several_are_spread_over_the_traffic() -> None:
    moments = moments_of(5, seed=3)
    assert moments == moments_of(5, seed=3) == sorted(moments)
    assert all(0.05 <= each <= 0.90 for each in moments)
    assert moments[0] < 0.22, "among the splits"
    assert all(0.30 <= moments_of(1, seed=seed)[0] <= 0.65 for seed in range(20))
    assert moments_of(0, seed=3) == []


def test_the_shop_has_what_makes_a_join_hard() -> None:
    orders = {json.loads(each.value)["id"] for each in SHOP.events if each.topic == "orders"}
    paid = [json.loads(each.value)["order"] for each in SHOP.events if each.topic == "payments"]
    assert set(paid) - orders, "payments without an order"
    assert orders - set(paid), "orders without a payment"
    assert len(paid) > len(set(paid)), "orders with two payments"
    assert [each.at_ms for each in SHOP.events] == sorted(each.at_ms for each in SHOP.events)


@given(st.lists(st.integers(0, len(SHOP.expected) - 1)), st.integers(0, 3))
def test_the_verdict_counts_every_fault(repeated: list[int], strange: int) -> None:
    rows = list(SHOP.expected)
    again = [rows[number] for number in repeated]
    exact = judged(SHOP.expected, rows)
    assert exact.is_exact
    found = judged(SHOP.expected, [*rows[len(repeated) :], *again, *[None] * strange])
    missing = len(set(rows[: len(repeated)]) - set(again))
    assert found.missing == missing
    assert found.unexpected == strange
    assert found.doubled == missing, "as many rows as expected, but for the strange ones"
    assert found.is_exact == (missing == 0 and strange == 0)


def test_what_is_not_a_result_is_unexpected() -> None:
    assert settled(b"no JSON") is None
    assert settled(b'{"payment": "p"}') is None
    row = next(iter(SHOP.expected))
    assert settled(json.dumps(row._asdict()).encode()) == row
    changed = row._replace(amount=row.amount + 1)
    assert judged(SHOP.expected, [*SHOP.expected, changed]).unexpected == 1
    assert "1 unexpected" in verdict_in_words(judged(SHOP.expected, [changed]))
    assert verdict_in_words(judged(SHOP.expected, list(SHOP.expected))).startswith("exactly once")


def test_seconds_are_counted() -> None:
    rows = [Settled(f"p{number}", "o", "c", "DE", 1, "card") for number in range(3)]
    expected = {rows[0]: 100, rows[1]: 900, rows[2]: 1500}
    moments = Moments(
        seconds=3.5,
        sent=[0.1, 0.9, 1.5],
        received=[(0.3, rows[0]), (3.0, rows[1]), (3.1, None), (3.2, rows[2])],
        expected=expected,
    )
    assert [value for _, value in moments.sent_per_second()] == [2, 1, 0, 0]
    assert [value for _, value in moments.received_per_second()] == [1, 0, 0, 3]
    assert [value for _, value in moments.lag()] == [1, 2, 2, 0]
    latencies = [value for _, value in moments.latency(0.5)]
    assert latencies == [pytest.approx(200), None, None, pytest.approx(2100)]


def test_the_time_without_a_driver_lasts_until_nothing_is_late() -> None:
    rows = [Settled(f"p{number}", "o", "c", "DE", 1, "card") for number in range(6)]
    expected = {row: 1000 * number + 100 for number, row in enumerate(rows)}
    # Two seconds without a driver; what was due in them comes in the fifth.
    came = [(0.2, rows[0]), (1.2, rows[1]), (4.5, rows[2]), (4.5, rows[3]), (4.6, rows[4])]
    moments = Moments(seconds=9.0, sent=[], received=[*came, (5.2, rows[5])], expected=expected)
    (shade,) = moments.outages([(1.9, 4.2)])
    assert (shade.since, shade.until) == (1.9, 6.0)
    # Killed again before it had caught up: one outage.
    (shade,) = moments.outages([(1.9, 4.2), (4.3, 4.4)])
    assert (shade.since, shade.until) == (1.9, 6.0)
    assert len(moments.outages([(1.9, 4.2), (7.0, 7.5)])) == 2


def _drawings(figure: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(figure).findall("svg")


def _texts(drawing: ElementTree.Element, kind: str) -> list[str | None]:
    return [each.text for each in drawing.findall("text") if each.get("class") == kind]


def test_results_of_an_outage_are_left_out_of_the_quiet_ones() -> None:
    rows = [Settled(f"p{n}", f"o{n}", "c", "DE", n, "card") for n in range(3)]
    moments = Moments(
        seconds=10,
        sent=[],
        received=[(1.5, rows[0]), (6.0, rows[1]), (9.1, rows[2]), (9.2, None)],
        expected={rows[0]: 1000, rows[1]: 2000, rows[2]: 9000},
    )
    assert moments.quiet_latencies([]) == [500.0, 4000.0, pytest.approx(100.0)]
    quiet = moments.quiet_latencies([PlotShade(2.0, 7.0, "dead")])
    assert quiet == [500.0, pytest.approx(100.0)]


def test_a_plot_is_well_formed_and_has_its_marks() -> None:
    points: list[tuple[float, float | None]] = [(0, 1), (1, None), (2, 470), (3, 20)]
    timeline = Timeline(3.0, [PlotMark(1.5, "kill -9")])
    figure = plot("A < B", "ms", [PlotLine("p50", "--in", points)], timeline)
    assert len(_drawings(figure)) == 2, "for wide and for narrow screens"
    for drawing in _drawings(figure):
        assert len(drawing.findall("polyline")) == 2, "a gap cuts the line"
        assert _texts(drawing, "said") == ["1"]
        assert "500" in _texts(drawing, "tick"), "the end of the axis"
    assert "kill -9" in legend(timeline)


def test_an_outage_is_shaded_and_does_not_flatten_the_scale() -> None:
    points: list[tuple[float, float | None]] = [(0, 8), (10, 9_000), (20, 9)]
    outage = PlotShade(5.0, 15.0, "the driver is dead")
    timeline = Timeline(20.0, [], [outage])
    for drawing in _drawings(plot("t", "ms", [PlotLine("p50", "--in", points)], timeline)):
        assert _texts(drawing, "tick")[-1] == "10"
        assert _texts(drawing, "beyond") == ["\N{UPWARDS ARROW} 9000"]
        assert [each.get("class") for each in drawing.findall("rect")] == ["shade"]
        # Beyond the scale the line stays at the top: nothing is drawn outside.
        polyline = drawing.find("polyline")
        assert polyline is not None
        heights = [float(each.split(",")[1]) for each in (polyline.get("points") or "").split()]
        assert min(heights) == heights[1] == 24.0
    assert "the driver is dead" in legend(timeline)


def test_segments_stand_at_their_time_and_part_of_the_ring() -> None:
    def segment(number: int, first: int, last: int, *times: int | None) -> dict[str, object]:
        created, sealed = times
        return {
            "segmentId": number,
            "hashRange": {"start": first, "end": last},
            "state": "ACTIVE" if sealed is None else "SEALED",
            "createdAtMs": created,
            "sealedAtMs": -1 if sealed is None else sealed,
        }

    halves = ((0, 0x7FFF), (0x8000, 0xFFFF))
    found = [segment(0, 0, 0xFFFF, 500, 6000)]
    found += [segment(number, *half, 6000, None) for number, half in enumerate(halves, start=1)]
    spans = spans_of({"segments": {str(each["segmentId"]): each for each in found}}, 1000.0)
    assert spans[0] == DrawnSegment(0, 0, 0xFFFF, -0.5, 5.0)
    assert spans[2] == DrawnSegment(2, 0x8000, 0xFFFF, 5.0, None)
    for drawing in _drawings(segments("t", list(spans.values()), Timeline(10.0))):
        whole, lower, upper = drawing.findall("rect")

        def of(rectangle: ElementTree.Element, *names: str) -> list[float]:
            return [float(rectangle.get(name) or "") for name in names]

        x, width, height = of(whole, "x", "width", "height")
        assert of(lower, "x") == of(upper, "x") == pytest.approx([x + width], abs=0.2)
        assert of(lower, "height") == of(upper, "height") == pytest.approx([height / 2], abs=0.2)
        assert of(lower, "y")[0] > of(upper, "y")[0], "the ring begins at the bottom"
        assert _texts(drawing, "number") == ["0", "1", "2"]


@given(st.lists(st.floats(0, 60), min_size=1, max_size=17))
def test_numbers_of_marks_do_not_stand_upon_each_other(moments: list[float]) -> None:
    marks = [PlotMark(at, f"mark {number}") for number, at in enumerate(sorted(moments))]
    for frame, drawing in zip(
        FRAMES, _drawings(plot("t", "ms", [], Timeline(60.0, marks))), strict=True
    ):
        said = [each for each in drawing.findall("text") if each.get("class") == "said"]
        places = [float(each.get("x") or "") for each in said]
        assert len(places) == len(marks)
        assert all(later - before > 15.8 for before, later in pairwise(places))
        assert places[0] >= 0
        assert places[-1] <= frame.width - 7


def test_an_empty_plot_is_a_plot() -> None:
    assert len(_drawings(plot("nothing", "ms", [], Timeline(0.0)))) == 2


def test_the_page_begins_with_four_numbers_and_says_when_and_of_what_it_was_made() -> None:
    moments = Moments(seconds=2, sent=[0.5], received=[], expected={})
    layouts = {"orders": [DrawnSegment(0, 0, 0xFFFF, 0.0, None)]}
    text = page(
        title="T",
        made="18 November 2026, Magnetar 0.1, seed 8",
        verdict="<verdict>",
        is_good=True,
        figures=[(name, "1") for name in ("settled", "missing", "twice", "latency")],
        facts=[("a", "1", "b")],
        plots=plots(moments, layouts, Timeline(2.0, [PlotMark(1, "split")])),
        pipeline="name: x",
        next_steps=["do"],
        style=(files("magnetar.cli.quickstart") / "report_page.css").read_text("utf-8"),
    )
    assert "prefers-color-scheme: dark" in text
    assert "&lt;verdict&gt;" in text
    # For phones: a page as wide as the screen, and drawings of their own.
    assert 'name="viewport" content="width=device-width' in text
    assert text.count('<svg class="wide"') == text.count('<svg class="narrow"') == 4
    order = [text.index(each) for each in ("seed 8", "<dd>", "Segments of orders", "<table>")]
    assert order == sorted(order)
    assert text.count("<dd>") == 4
    assert not [word for word in ("http:", "https:", "<script", "<link", "<img") if word in text]


def test_the_pipeline_of_the_quickstart_is_one() -> None:
    pipeline = parsed(
        pipeline_text(), path=ROOT / "q.yaml", environment={"MAGNETAR_SERVICE_URL": "pulsar://a"}
    )
    assert pipeline.service_url == "pulsar://a"
    assert list(pipeline.sinks) == ["settled"]
