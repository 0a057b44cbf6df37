"""A handful of seeds of the simulation of clients, that a seed is one run, and what it finds."""

from __future__ import annotations

from collections import deque
from functools import cache

import pytest

from harness.simulation.client.actors import Told
from harness.simulation.client.run import simulate_client
from harness.simulation.seeds import Report
from magnetar.client.connection.connection import BrokerConnection
from magnetar.client.consume.segment.ack_state import CumulativeAcks
from magnetar.client.produce.outbox import Outbox
from magnetar.client.transaction.transaction_core import TransactionCore

pytestmark = pytest.mark.slow

SEEDS = range(3)


@cache
def _report(seed: int) -> Report:
    return simulate_client(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_broken(seed: int) -> None:
    report = _report(seed)
    assert not report.violations, f"replay: make sim SEED={seed}"
    assert report.operations > 50


def test_one_seed_is_one_run() -> None:
    assert simulate_client(1).digest == _report(1).digest
    assert _report(1).digest != _report(2).digest


def _first_violation(seeds: int = 8) -> str:
    for seed in range(seeds):
        report = simulate_client(seed)
        if report.violations:
            return f"seed {seed}: {report.violations}"
    return ""


def test_sends_that_are_forgotten_with_their_connection_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgetful(self: Outbox, *, in_doubt: bool) -> None:
        self._in_flight = deque()

    monkeypatch.setattr(Outbox, "requeue", forgetful)
    assert "no rest" in _first_violation()


def test_a_commit_that_does_not_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hasty(self: TransactionCore) -> None:
        """Commit whatever is there."""

    monkeypatch.setattr(TransactionCore, "_flush", hasty)
    assert _first_violation()


def test_what_is_handed_out_again_after_a_lost_connection_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CumulativeAcks, "handed", lambda self, mark: None)
    assert "was sent" in _first_violation()


def test_a_connection_that_is_not_closed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def left_open(self: BrokerConnection) -> None:
        """Do nothing."""

    monkeypatch.setattr(BrokerConnection, "close", left_open)
    assert "outlive the clients" in _first_violation(2)


def test_told() -> None:
    told = Told()
    told.handed["k"] = [b"1", b"2", b"3"]
    told.taken_back = {b"2"}
    told.got["stream"]["k"] = [b"1"]
    assert told.missing() == ["stream lacks 1", "2 results"]
    told.got["stream"]["k"] = [b"3", b"1", b"1", b"2"]
    told.results.update([b"1", b"1", b"3"])
    found = told.violations({"stream"})
    assert len(found) == 3
    assert not told.missing()
    told.got["stream"]["k"] = [b"1", b"3"]
    told.results.subtract([b"1"])
    assert not told.violations({"stream"})
