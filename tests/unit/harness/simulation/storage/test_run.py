"""The checkers tell right from wrong, the worker keeps its order, and the command reports."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from harness.simulation import __main__ as command
from harness.simulation.seeds import Report
from harness.simulation.storage.history import (
    Findings,
    LedgerHistory,
    MetadataHistory,
    check_prefix,
)
from magnetar.ledger.api import Entry, LedgerInfo, LedgerState
from magnetar.metadata.api import ABSENT, Record, Stat
from magnetar.model.ids import Position
from magnetar.testing.virtual import virtual_time
from magnetar.testing.virtual.worker import VirtualWorker


def _entries(*payloads: bytes) -> list[Entry]:
    return [Entry(Position(1, number), payload) for number, payload in enumerate(payloads)]


def _ledger(*payloads: bytes) -> tuple[Findings, LedgerHistory]:
    findings = Findings()
    history = LedgerHistory(findings)
    history.create_asked()
    history.created(1)
    for payload in payloads:
        history.submitted(1, payload)
    return findings, history


def _info(last: int, size: int, state: LedgerState = LedgerState.OPEN) -> LedgerInfo:
    return LedgerInfo(1, state, last, size)


def test_a_ledger_as_it_should_be() -> None:
    findings, history = _ledger(b"a", b"b", b"c")
    history.acknowledged(1, 0, 0)
    history.found(_info(1, 2), _entries(b"a", b"b"))
    history.crashed()
    history.ended(_info(1, 2, LedgerState.FENCED), LedgerState.FENCED)
    history.found(_info(1, 2, LedgerState.FENCED), _entries(b"a", b"b"))
    history.listed([1])
    assert not findings.violations


@pytest.mark.parametrize(
    ("info", "entries", "text"),
    [
        (_info(-1, 0), [], "lost entries"),
        (_info(0, 1), _entries(b"x"), "other bytes"),
        (_info(2, 3), _entries(b"a", b"b", b"c"), "more than was submitted"),
        (_info(1, 2), _entries(b"a"), "1 entries read"),
        (_info(0, 5), _entries(b"a"), "5 said"),
    ],
)
def test_a_ledger_that_is_wrong(info: LedgerInfo, entries: list[Entry], text: str) -> None:
    findings, history = _ledger(b"a", b"b")
    history.acknowledged(1, 0, 0)
    history.found(info, entries)
    assert any(text in violation for violation in findings.violations)


def test_refused_deleted_and_reused_are_found() -> None:
    findings, history = _ledger(b"a")
    history.refused(1, 0)
    history.read(1, 0, _entries(b"a"))
    history.created(1)
    history.missing(1)
    history.listed([1])
    texts = ("refused", "not above", "nobody created", "nobody deleted", "is listed")
    found = "; ".join(findings.violations)
    assert [text for text in texts if text not in found] == []


def _record(key: str, value: bytes, version: int) -> Record:
    return Record(_stat(key, version), value)


def _stat(key: str, version: int) -> Stat:
    return Stat(key, version, 0, 0, 0, ephemeral=False, mine=False)


def test_metadata_as_it_should_be() -> None:
    findings = Findings()
    history = MetadataHistory(findings)
    first = history.submitted("/k", b"1", sure=True)
    history.acknowledged("/k", first, _stat("/k", 1))
    before = history.stamp
    second = history.submitted("/k", b"2", sure=False)
    history.won("/k", second, 1)
    history.acknowledged("/k", second, _stat("/k", 2))
    history.read("/k", _record("/k", b"1", 1), before)  # a snapshot of before
    history.submitted("/k", None, sure=False)
    history.read("/k", None, history.stamp)
    history.scanned("", [], history.stamp)
    assert not findings.violations


def test_metadata_that_is_wrong() -> None:
    findings = Findings()
    history = MetadataHistory(findings)
    for number, value in enumerate((b"1", b"2"), 1):
        change = history.submitted("/k", value, sure=True)
        history.acknowledged("/k", change, _stat("/k", number))
    history.read("/k", None, history.stamp)
    history.read("/k", _record("/k", b"1", 1), history.stamp)
    history.read("/k", _record("/k", b"2", 9), history.stamp)
    history.read("/k", _record("/k", b"never", 3), history.stamp)
    refused = history.submitted("/k", b"3", sure=True)
    history.failed("/k", refused)
    history.read("/k", _record("/k", b"3", 4), history.stamp)
    other = history.submitted("/l", b"4", sure=False)
    history.acknowledged("/l", other, _stat("/l", 1))
    late = history.submitted("/l", b"5", sure=False)
    history.won("/l", late, ABSENT)
    history.index_scanned([], [_record("/k", b"2", 2)], "i")
    history.watched({}, [_record("/k", b"2", 2)], "/")
    texts = (
        "nothing deleted it",
        "holds change 0, 1 was done",
        "version 2 became 9",
        "never put there",
        "refused or lost",
        "version 1 is that of /k and of /l",
        "a CAS on -1 won",
        "index i has",
        "wrong view",
    )
    found = "; ".join(findings.violations)
    assert [text for text in texts if text not in found] == []


def test_what_survives_is_a_prefix() -> None:
    findings, ledgers = _ledger(b"a")
    metadata = MetadataHistory(findings)
    metadata.submitted("/lost", b"1", sure=True)
    metadata.submitted("/kept", b"2", sure=True)
    check_prefix(findings, ledgers, metadata, 0)
    assert not findings.violations
    metadata.read("/kept", _record("/kept", b"2", 3), metadata.stamp)
    check_prefix(findings, ledgers, metadata, 0)
    assert [text.split(",")[0] for text in findings.violations] == [
        "1:0 is lost",
        "a put of /lost is lost",
    ]


def test_the_worker_keeps_the_order_and_takes_virtual_time() -> None:
    async def main() -> tuple[list[int], float]:
        worker = VirtualWorker(Random(3))
        done: list[int] = []
        told = [worker.run(done.append, number) for number in range(200)]
        order: list[int] = []
        for future in told:
            future.add_done_callback(lambda each: order.append(told.index(each)))
        failing = worker.run(int, "x")
        with pytest.raises(ValueError, match="invalid literal"):
            await failing
        await worker.close()
        assert order == done
        return done, asyncio.get_running_loop().time()

    done, seconds = virtual_time.run(main())
    assert done == list(range(200))
    assert seconds > 0.1


def test_the_command_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(seed: int, *, lines: list[str] | None = None) -> Report:
        broken = ("it broke",) if seed == 3 else ()
        return Report(seed, 10, 4, 2, 1, splits=5, digest="digest", violations=broken)

    for name in ("simulate", *(f"simulate_{part}" for part in command.PARTS[1:])):
        monkeypatch.setattr(command, name, fake)
    assert command.main(["--seeds", "3"]) == 0
    text = capsys.readouterr().out
    for part in command.PARTS:
        assert f"{part}: 3 seeds, 30 operations, 12 starts, 6 crashes" in text
    assert text.count("15 splits") == 3
    assert command.main(["--seeds", "1", "--only", "broker"]) == 0
    assert "storage" not in capsys.readouterr().out
    assert command.main(["--seeds", "3", "--first", "2"]) == 1
    text = capsys.readouterr().out
    assert "violation: it broke" in text
    assert "replay: python -m harness.simulation --only storage --seed 3 --verbose" in text
