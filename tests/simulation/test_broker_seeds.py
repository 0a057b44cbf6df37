"""A handful of seeds of the broker's simulation as ordinary tests, and that a seed is one run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.simulation.broker.run import simulate_broker


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_broken(seed: int) -> None:
    report = simulate_broker(seed)
    assert not report.violations, f"replay: make sim SEED={seed}"
    assert report.operations > 100
    assert report.lives >= 4


def test_one_seed_is_one_run() -> None:
    assert simulate_broker(7).digest == simulate_broker(7).digest
    assert simulate_broker(7).digest != simulate_broker(8).digest


def test_one_seed_is_one_run_in_every_process() -> None:
    """Also when the order of sets differs, as it does from process to process."""
    command = [
        sys.executable,
        "-m",
        "harness.simulation",
        "--only",
        "broker",
        "--seed",
        "7",
    ]
    texts = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        texts.add(done.stdout)
    (text,) = texts
    assert "digest" in text
    assert "0 violations" in text
