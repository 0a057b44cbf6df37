"""A handful of seeds of the simulation of transactions, and that a seed is one run."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

from harness.simulation.seeds import Report
from harness.simulation.txn.run import simulate_txn

pytestmark = pytest.mark.slow

SEEDS = range(8)


@cache
def _report(seed: int) -> Report:
    return simulate_txn(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_broken(seed: int) -> None:
    assert not _report(seed).violations, f"replay: make sim SEED={seed}"


def test_everything_happens() -> None:
    reports = [_report(seed) for seed in SEEDS]
    assert sum(report.transactions for report in reports) >= 200
    assert sum(report.operations for report in reports) >= 2000
    assert sum(report.splits for report in reports) >= 1
    assert sum(report.merges for report in reports) >= 1
    assert sum(report.crashes for report in reports) >= 1
    assert sum(report.failovers for report in reports) >= 1
    assert sum(report.faults for report in reports) >= 1


def test_one_seed_is_one_run() -> None:
    assert simulate_txn(3).digest == _report(3).digest
    assert _report(3).digest != _report(4).digest


def test_one_seed_is_one_run_in_every_process() -> None:
    """Also when the order of sets differs, as it does from process to process."""
    command = [sys.executable, "-m", "harness.simulation"]
    command += ["--only", "txn", "--seed", "4"]
    texts = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        texts.add(done.stdout)
    (text,) = texts
    assert "digest" in text
    assert "0 violations" in text
