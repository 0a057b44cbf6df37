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
from magnetar.cli.quickstart.plots import WIDTH, PlotLine, PlotMark, plot
from magnetar.cli.quickstart.report import Moments, page, plots, verdict_in_words
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


def test_a_plot_is_well_formed_and_has_its_marks() -> None:
    points: list[tuple[float, float | None]] = [(0, 1), (1, None), (2, 470), (3, 20)]
    drawing = plot(
        "A < B", "ms", [PlotLine("p50", "--in", points)], [PlotMark(1.5, "kill -9")], 3.0
    )
    root = ElementTree.fromstring(drawing)
    lines = root.findall("polyline")
    assert len(lines) == 2, "a gap cuts the line"
    assert "kill -9" in [each.text for each in root.findall("text")]
    assert "500" in [each.text for each in root.findall("text")], "the end of the axis"


@given(st.lists(st.floats(0, 60), min_size=1, max_size=20))
def test_texts_of_marks_do_not_stand_upon_each_other(moments: list[float]) -> None:
    marks = [PlotMark(at, f"mark {number}") for number, at in enumerate(sorted(moments))]
    root = ElementTree.fromstring(plot("t", "ms", [], marks, 60.0))
    said = [each for each in root.findall("text") if each.get("class") == "said"]
    places = [float((each.get("transform") or "")[10:].split(",")[0]) for each in said]
    assert len(places) == len(marks)
    assert all(later - before > 12.8 for before, later in pairwise(places))
    assert places[-1] <= WIDTH - 12


def test_an_empty_plot_is_a_plot() -> None:
    assert ElementTree.fromstring(plot("nothing", "ms", [], [], 0.0)).tag == "svg"


def test_the_page_has_both_schemes_and_no_other_file() -> None:
    moments = Moments(seconds=2, sent=[0.5], received=[], expected={})
    text = page(
        title="T",
        verdict="<verdict>",
        is_good=True,
        facts=[("a", "1", "b")],
        plots=plots(moments, [PlotMark(1, "split")]),
        pipeline="name: x",
        next_steps=["do"],
        style=(files("magnetar.cli.quickstart") / "report_page.css").read_text("utf-8"),
    )
    assert "prefers-color-scheme: dark" in text
    assert "&lt;verdict&gt;" in text
    assert text.count("<svg") == 3
    assert not [word for word in ("http:", "https:", "<script", "<link", "<img") if word in text]


def test_the_pipeline_of_the_quickstart_is_one() -> None:
    pipeline = parsed(
        pipeline_text(), path=ROOT / "q.yaml", environment={"MAGNETAR_SERVICE_URL": "pulsar://a"}
    )
    assert pipeline.service_url == "pulsar://a"
    assert list(pipeline.sinks) == ["settled"]
