"""Commits by tokens in a topic of notes: every order of events, with the rules and without."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from magnetar.errors import TransactionAborted, UnreadableMessage
from magnetar.spark.sink import single_commit
from magnetar.spark.sink.group_commit import Known, TaskReport, WriteId
from magnetar.spark.sink.single_commit import Note, Notes
from magnetar.wire.messages import TxnId
from tests.unit.spark.group_model import Harm, explore
from tests.unit.spark.single_model import Driver, SingleModel, World, tidied

WRITE = WriteId("app", "query", "run", 5)

MODELS = {
    "two-drivers": SingleModel(runs=2),
    "retries": SingleModel(runs=1, spare=1, tasks=(("a",), ("b",))),
    "timeouts": SingleModel(runs=2, expiries=1),
}
LARGE = {
    "three-drivers": SingleModel(runs=3),
    "many-retries": SingleModel(runs=1, spare=2, tasks=(("a",), ("b",))),
    "retries-and-restarts": SingleModel(runs=2, spare=1),
    "two-batches": SingleModel(runs=2, batches=2),
    "two-tasks": SingleModel(runs=2, tasks=(("a",), ("b",))),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_order_of_events_loses_or_repeats_a_row(name: str) -> None:
    assert explore(MODELS[name]) > 200


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_no_longer_order_does_either(name: str) -> None:
    assert explore(LARGE[name], 3_000_000) > 5_000


@pytest.mark.slow
def test_worlds_that_are_taken_for_one_have_the_same_futures() -> None:
    for model in MODELS.values():
        seen, waiting = {model.first()}, [model.first()]
        while waiting:
            world = waiting.pop()
            futures = set(model.steps(world))
            one = tidied(world)  # in which a step that nobody can see is no step
            assert {one, *map(tidied, futures)} == {one, *model.successors(one)}
            waiting += futures - seen
            seen |= futures


def test_every_batch_can_be_done_in_the_model() -> None:
    @dataclass(frozen=True)
    class Finishing(SingleModel):
        def check(self, world: World) -> None:
            if world.started == self.runs and len(world.done) == self.batches:
                raise Harm("done")

    for model in MODELS.values():
        with pytest.raises(Harm, match="done"):
            explore(_broken(Finishing, model))


@dataclass(frozen=True)
class NotExclusive(SingleModel):
    """A driver that was replaced can still send its token."""

    def check_owner(self, world: World, driver: Driver) -> None:
        return


@dataclass(frozen=True)
class ReadsAhead(SingleModel):
    """What is undecided is taken for something that never happened."""

    def meets_undecided(
        self, world: World, driver: Driver, found: Notes
    ) -> tuple[World, Driver] | None:
        return self._decide(world, driver, found)


@pytest.mark.parametrize("broken", [NotExclusive, ReadsAhead])
def test_without_a_rule_rows_are_repeated(
    broken: type[SingleModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken is ReadsAhead:  # who reads of a transaction does not end it, either
        monkeypatch.setattr(Notes, "take", _takes_tokens_only)
    with pytest.raises(Harm):
        explore(_broken(broken, MODELS["two-drivers"]))


def _takes_tokens_only(self: Notes, note: Note) -> None:
    if note.kind == "token":
        self.known = Known(note.generation, note.sequence)


@dataclass(frozen=True)
class OpenClaims(SingleModel):
    """An attempt that comes late may claim when the claims were read."""

    def may_claim(self, world: World) -> bool:
        return True


def test_an_attempt_that_comes_late_must_not_claim() -> None:
    with pytest.raises(Harm):
        explore(_broken(OpenClaims, MODELS["retries"]))


def test_without_claims_lost_attempts_are_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_commit, "check_attempts", lambda *_: None)
    with pytest.raises(Harm):
        explore(MODELS["retries"])


def _broken(kind: type[SingleModel], like: SingleModel) -> SingleModel:
    return kind(**{name: getattr(like, name) for name in like.__dataclass_fields__})


# --- one by one


def test_notes_are_read_back_as_they_were() -> None:
    note = Note("token", "query", 5, txn=(1, 2**63), rows=7)
    assert Note.from_bytes(note.to_bytes()) == note
    with pytest.raises(UnreadableMessage, match="commitTopic"):
        Note.from_bytes(b"something else")


def test_the_last_token_counts_and_announced_transactions_are_ended() -> None:
    notes = Notes()
    assert notes.committed_in("query") == -1
    assert notes.take(Note("announcement", "query", 4, txn=(1, 2))) == TxnId(1, 2)
    assert notes.take(Note("token", "query", 4, txn=(1, 2), rows=9)) is None
    assert notes.take(Note("fence", "query", 5, nonce="n")) is None
    assert notes.known == ("query", 4, 9)
    assert notes.committed_in("query") == 4
    assert notes.committed_in("another") == -1


def test_attempts_that_spark_did_not_choose_are_found() -> None:
    txn = TxnId(0, 1)
    parts = [
        TaskReport(WRITE, txn=txn, attempt=3),
        TaskReport(WRITE, txn=txn, attempt=4),
        TaskReport(WRITE),
    ]
    claims = [Note("claim", "query", 5, txn=(0, 1), attempt=n) for n in (3, 4)]
    other = Note("claim", "query", 4, txn=(0, 0), attempt=9)
    single_commit.check_attempts(WRITE, single_commit.claims_of([*claims, other], txn), parts)
    assert single_commit.orphans_in([other, *claims], txn) == [TxnId(0, 0)]
    assert single_commit.orphans_in([*claims, other], txn) == [], "it may be a later driver's"
    lost = replace(parts[0], attempt=8)
    with pytest.raises(TransactionAborted, match="run more than once"):
        single_commit.check_attempts(WRITE, [3, 4], [lost, parts[1]])
    with pytest.raises(TransactionAborted, match="cannot be tried again"):
        single_commit.refuse_retry(WRITE, 1)
