"""A server killed under transactions: a sample passes, and a server that breaks a rule is caught.

The comparison itself is tested on histories made by hand: a check that sees nothing says nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from harness.crash.txn.check import Reading, compare_outputs
from harness.crash.txn.history import OUTPUTS, Attempt, Output, TxnFault, TxnHistory
from harness.crash.txn.run import TxnKills, TxnOutcome
from magnetar.model.ids import Position
from magnetar.txn.ids import is_metadata
from magnetar.wire.messages import TxnId

SEED = 21
RUNS_MAX = 4
BROKEN_SERVER = Path(__file__).with_name("broken_txn_server.py")

# --- the whole, with real processes


@pytest.mark.slow
def test_samples_of_one_seed_run_side_by_side(tmp_path: Path) -> None:
    async def both() -> tuple[TxnOutcome, TxnOutcome]:
        new = TxnKills(tmp_path / "new", 3, SEED)
        mixed = TxnKills(tmp_path / "mixed", 3, SEED, legacy_share=0.7)
        return await asyncio.gather(new.run(), mixed.run())

    for folder in ("new", "mixed"):
        (tmp_path / folder).mkdir()
    outcomes = asyncio.run(both())
    for outcome in outcomes:
        history = outcome.history
        assert history.texts == []
        assert outcome.kills == 3
        assert history.inputs >= 600
        assert min(history.events[each] for each in ("committed", "aborted", "left alone")) > 10
        assert history.events["continued and committed"] > 0
    kinds = [is_metadata(each.txn) for each in outcomes[1].history.attempts.values()]
    assert min(kinds.count(True), kinds.count(False)) > 50


@pytest.mark.slow
def test_outputs_of_open_transactions_that_are_seen_are_caught(tmp_path: Path) -> None:
    _catch(tmp_path, "pins_are_not_recovered", TxnFault.EXPOSED)


@pytest.mark.slow
def test_acks_that_are_forgotten_are_caught(tmp_path: Path) -> None:
    _catch(tmp_path, "acks_are_not_recovered", TxnFault.DOUBLED)


@pytest.mark.slow
def test_sends_that_are_stored_again_are_caught(tmp_path: Path) -> None:
    _catch(tmp_path, "sends_are_not_recovered", TxnFault.DOUBLED)


def _catch(folder: Path, rule: str, fault: TxnFault) -> None:
    """Run until the fault is seen: some show in the end only, and not every run meets them."""
    serve = (sys.executable, str(BROKEN_SERVER), rule, "serve")
    missed = []
    for number in range(RUNS_MAX):
        store = folder / str(number)
        store.mkdir()
        kills = TxnKills(store, 3, SEED + number, serve=serve, looks_for=fault)
        outcome = asyncio.run(kills.run())
        if outcome.history.faults[fault]:
            return
        missed.append((outcome.kills, outcome.history.events, outcome.history.texts))
    pytest.fail(f"{fault} was not seen: {missed}")


# --- outcomes


def _attempt(history: TxnHistory, number: int, *numbers: int, seconds: float = 60.0) -> Attempt:
    attempt = Attempt(TxnId(0, number), numbers, time.time() + seconds)
    history.began(attempt)
    return attempt


def _committed(history: TxnHistory, number: int, *numbers: int) -> Attempt:
    attempt = _attempt(history, number, *numbers)
    attempt.asked = "COMMITTED"
    history.ended(attempt, "COMMITTED")
    return attempt


def _faults(history: TxnHistory) -> list[TxnFault]:
    return list(history.faults.elements())


def test_an_outcome_is_what_was_asked_for_and_stays() -> None:
    history = TxnHistory()
    attempt = _committed(history, 1, 0)
    history.ended(attempt, "COMMITTED")
    assert _faults(history) == []
    history.ended(_attempt(history, 2, 1), "COMMITTED")
    assert _faults(history) == [TxnFault.REVERSED]


@pytest.mark.parametrize(("seconds", "faults"), [(60.0, [TxnFault.REVERSED]), (0.0, [])])
def test_a_commit_may_be_refused_from_its_deadline_on(
    seconds: float, faults: list[TxnFault]
) -> None:
    history = TxnHistory()
    attempt = _attempt(history, 1, 0, seconds=seconds)
    attempt.asked = "COMMITTED"
    history.ended(attempt, "ABORTED")
    assert _faults(history) == faults


def test_an_input_is_acknowledged_by_one_transaction() -> None:
    history = TxnHistory()
    for number in (1, 2):
        _committed(history, number, 7)
    assert _faults(history) == [TxnFault.DOUBLED]


def test_an_output_has_one_place() -> None:
    history = TxnHistory()
    attempt = _committed(history, 1, 0)
    output = Output(attempt.name, 0)
    for entry_id in (5, 5, 6):
        history.saw(OUTPUTS[0], Position(1, entry_id), output)
    assert _faults(history) == [TxnFault.DOUBLED]


def test_only_what_was_asked_to_commit_may_be_seen() -> None:
    history = TxnHistory()
    attempt = _attempt(history, 1, 0)
    output, position = Output(attempt.name, 0), Position(1, 0)
    attempt.asked = "COMMITTED"
    history.saw(OUTPUTS[0], position, output)
    history.saw(OUTPUTS[0], position, output)
    assert _faults(history) == []
    attempt.asked = "ABORTED"
    history.saw(OUTPUTS[0], position, output)
    history.saw(OUTPUTS[0], Position(1, 1), Output("00-00", 0))
    assert _faults(history) == [TxnFault.EXPOSED] * 2


# --- outputs


def _read_back() -> tuple[TxnHistory, Reading]:
    """Two transactions with two inputs each, and all of it is there."""
    history = TxnHistory(inputs=4)
    reading: Reading = {topic: [] for topic in OUTPUTS}
    for number, numbers in enumerate([(0, 1), (2, 3)]):
        attempt = _committed(history, number, *numbers)
        for each in numbers:
            output = Output(attempt.name, each)
            reading[output.topic].append((Position(1, each), output))
    return history, reading


def test_outputs_that_agree_pass() -> None:
    history, reading = _read_back()
    for topic, outputs in reading.items():
        for position, output in outputs:
            assert Output.of(output.payload()) == output
            history.saw(topic, position, output)
    compare_outputs(history, reading)
    assert history.texts == []


def test_outputs_that_are_missing_doubled_or_moved_are_found() -> None:
    history, reading = _read_back()
    position, output = reading[OUTPUTS[0]].pop()
    compare_outputs(history, reading)
    assert _faults(history) == [TxnFault.LOST]

    history, reading = _read_back()
    reading[OUTPUTS[0]].append((Position(2, 0), output))
    compare_outputs(history, reading)
    assert _faults(history) == [TxnFault.DOUBLED]

    history, reading = _read_back()
    history.saw(OUTPUTS[0], Position(9, 9), output)
    assert position != Position(9, 9)
    compare_outputs(history, reading)
    assert _faults(history) == [TxnFault.LOST]


def test_outputs_of_what_was_not_committed_are_found() -> None:
    history, reading = _read_back()
    attempt = _attempt(history, 9, 4)
    history.inputs = 5
    history.transformed[4] = attempt.name
    reading[OUTPUTS[0]].append((Position(3, 0), Output(attempt.name, 4)))
    compare_outputs(history, reading)
    assert _faults(history) == [TxnFault.EXPOSED]
