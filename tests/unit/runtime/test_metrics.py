"""Metrics: defined once, named well, rendered as text."""

from __future__ import annotations

import pytest

from magnetar.runtime import metrics


def test_names_are_unique_and_explained() -> None:
    defined = metrics.all_metrics()
    assert len({each.name for each in defined}) == len(defined) > 0
    for each in defined:
        assert each.doc.endswith(".")
        assert each.kind in ("counter", "gauge", "histogram")
        assert each.name.endswith("_total") == (each.kind == "counter")


def test_a_name_is_defined_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        metrics.gauge("magnetar_journal_files", "Again.")
    with pytest.raises(ValueError, match="twice"):
        metrics.histogram("magnetar_journal_files", "Again.", buckets=[1.0])


def test_naming_rules() -> None:
    with pytest.raises(ValueError, match="magnetar_"):
        metrics.gauge("journal_files", "Without the prefix.")
    with pytest.raises(ValueError, match="_total"):
        metrics.counter("magnetar_things", "Without the suffix.")


def test_the_text_holds_the_values() -> None:
    metrics.LEDGER_READS.labels("cache").inc(3)
    metrics.JOURNAL_SYNC_SECONDS.observe(0.003)
    lines = metrics.render().decode().splitlines()
    assert any(line.startswith('magnetar_ledger_reads_total{source="cache"} ') for line in lines)
    assert any(
        line.startswith('magnetar_journal_sync_seconds_bucket{le="5e-05"}') for line in lines
    )
    for each in metrics.all_metrics():
        assert f"# TYPE {each.name} {each.kind}" in lines
    assert not any("_created" in line for line in lines)
