"""Every order of crashes, replays, zombies, retries and timeouts, with the rules and without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec import structs

from magnetar.errors import (
    CheckpointMismatch,
    GroupFenced,
    InvalidTxnStatus,
    InvariantBroken,
    MagnetarError,
    TransactionAborted,
    WriterConflict,
)
from magnetar.spark.sink import group_commit
from magnetar.spark.sink.group_commit import Known, TaskPlan, TaskReport, Ticket, WriteId
from magnetar.txn import transitions
from magnetar.txn.ids import metadata_id
from magnetar.txn.records import Group
from magnetar.wire.messages import TxnId
from tests.unit.spark.group_model import Attempt, Harm, Model, World, explore, rolled

WRITE = WriteId("app", "query", "run", 5)
TICKET = Ticket("app", 3, 0)
TIMEOUT_S = 600.0

SPECULATION = Model(runs=("g", "g"), spare=1)
TIMEOUTS = Model(runs=("g", "g"), expiries=1)
BATCHES = Model(runs=("g", "g"), batches=2, layouts=((("a", "b"),),))
QUERIES = Model(runs=("g", "h", "g"), layouts=((("a", "b"),),))
RESTARTS = Model(runs=("g", "g", "g"), layouts=((("a",), ("b",)), (("a", "b"),)), zombies=False)

MODELS = {
    "timeouts": TIMEOUTS,
    "batches": BATCHES,
    "queries": QUERIES,
    "restarts": RESTARTS,
}
LARGE = {
    "speculation": SPECULATION,
    "speculation-and-timeouts": replace(SPECULATION, expiries=1),
    "two-spare-attempts": replace(SPECULATION, spare=2),
    "three-runs-and-timeouts": replace(TIMEOUTS, runs=("g", "g", "g")),
    "three-runs-two-batches": replace(BATCHES, runs=("g", "g", "g")),
    "queries-and-timeouts": replace(QUERIES, expiries=1, spare=1),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_order_of_events_loses_or_repeats_a_row(name: str) -> None:
    assert explore(MODELS[name]) > 200


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_no_longer_order_does_either(name: str) -> None:
    assert explore(LARGE[name]) > 10_000


def test_every_batch_can_be_done_in_the_model() -> None:
    """Safe because nothing happens would be no proof."""

    @dataclass(frozen=True)
    class Finishing(Model):
        def check(self, world: World) -> None:
            if world.started == len(self.runs) and len(world.done) == self.batches:
                raise Harm("done")

    for model in (SPECULATION, TIMEOUTS, BATCHES, RESTARTS):
        with pytest.raises(Harm, match="done"):
            explore(_broken(Finishing, model))


# --- rules that are switched off


@dataclass(frozen=True)
class LosersCount(Model):
    """One transaction for all attempts: what a losing attempt wrote is committed with the rest."""

    def commit_group(self, world: World, epoch: int, batch: int, txns: tuple[TxnId, ...]) -> World:
        members = [each.id for each in world.headers if each.group is not None
                   and (each.group.epoch, each.group.sequence) == (epoch, batch)]  # fmt: skip
        return super().commit_group(world, epoch, batch, tuple(members))


@dataclass(frozen=True)
class OneByOne(Model):
    """The transactions of a batch are committed one after the other; what is over is left out."""

    def commit_group(self, world: World, epoch: int, batch: int, txns: tuple[TxnId, ...]) -> World:
        is_open = [each.id for each in world.headers if world.state_of(each) == "OPEN"]
        left = tuple(each for each in txns if each in is_open)
        return super().commit_group(world, epoch, batch, left)


@dataclass(frozen=True)
class OverIsDone(Model):
    """A transaction that is over is taken for one that was committed, as some sinks do it."""

    def commit_group(self, world: World, epoch: int, batch: int, txns: tuple[TxnId, ...]) -> World:
        try:
            return super().commit_group(world, epoch, batch, txns)
        except InvalidTxnStatus:
            return world


@dataclass(frozen=True)
class NoMemory(Model):
    """The server does not remember which batch it has committed."""

    def _opens(self, world: World, attempt: Attempt) -> tuple[World, Attempt | None]:
        return super()._opens(_forgetting(world), attempt)

    def commit_group(self, world: World, epoch: int, batch: int, txns: tuple[TxnId, ...]) -> World:
        return super().commit_group(_forgetting(world), epoch, batch, txns)


def _forgetting(world: World) -> World:
    if world.group is None or world.group.sequence < 0:
        return world
    return replace(rolled(world), group=structs.replace(world.group, sequence=-1))


@pytest.mark.parametrize(
    ("broken", "like"),
    [
        (LosersCount, SPECULATION),
        (OneByOne, TIMEOUTS),
        (OverIsDone, TIMEOUTS),
        (NoMemory, RESTARTS),
    ],
)
def test_without_a_rule_rows_are_lost_or_repeated(broken: type[Model], like: Model) -> None:
    with pytest.raises(Harm):
        explore(_broken(broken, like))


def test_a_server_that_mixes_up_generations_loses_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that begins anew would be told that its batches were committed."""

    def opened(group: Group | None, *names: str, **how: int) -> Group:
        after = real(group, *names, **how)  # type: ignore[arg-type]
        return after if group is None else structs.replace(after, sequence=group.sequence)

    real = transitions.opened
    monkeypatch.setattr(transitions, "opened", opened)
    monkeypatch.setattr(group_commit, "check_writer", lambda write, known: None)
    with pytest.raises(Harm):
        explore(QUERIES)


def _broken(kind: type[Model], like: Model) -> Model:
    return kind(**{name: getattr(like, name) for name in like.__dataclass_fields__})


# --- one by one


def part(number: int = 1, **fields: Any) -> TaskReport:
    return replace(TaskReport(WRITE, TICKET, metadata_id(0, number), rows=2), **fields)


def test_a_batch_is_written_once_and_skipped_when_it_comes_again() -> None:
    assert group_commit.plan(WRITE, -1) is TaskPlan.WRITE
    assert group_commit.plan(WRITE, 4) is TaskPlan.WRITE
    assert group_commit.plan(WRITE, 5) is TaskPlan.SKIP


def test_an_old_checkpoint_is_refused_and_not_skipped() -> None:
    with pytest.raises(CheckpointMismatch, match="restore the newest one"):
        group_commit.plan(WRITE, 6)


def test_another_query_is_refused_once_something_is_committed() -> None:
    group_commit.check_writer(WRITE, None)
    group_commit.check_writer(WRITE, Known("query", 4))
    group_commit.check_writer(WRITE, Known("another", -1))
    with pytest.raises(WriterConflict, match="choose another transactionalId"):
        group_commit.check_writer(WRITE, Known("another", 0))


def test_the_driver_names_what_the_tasks_that_won_have_written() -> None:
    empty = TaskReport(WRITE)
    wanted = group_commit.decision(5, [part(1), empty, part(2)])
    assert wanted == (TICKET, (metadata_id(0, 1), metadata_id(0, 2)), False)
    assert group_commit.decision(5, [empty]) == (None, (), False)
    assert group_commit.decision(
        5, [part(1), TaskReport(WRITE, TICKET, is_skipped=True)]
    ).is_repeated


def test_parts_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(GroupFenced):
        group_commit.decision(5, [part(1), part(2, ticket=Ticket("app", 4, 0))])
    with pytest.raises(InvariantBroken, match="missing"):
        group_commit.decision(5, [part(1), None])
    with pytest.raises(InvariantBroken):
        group_commit.decision(6, [part(1)])
    with pytest.raises(InvariantBroken):
        group_commit.decision(5, [part(1), part(2, write=WRITE._replace(run="another"))])


def test_what_was_left_out_must_turn_out_to_be_committed() -> None:
    group_commit.confirm(WRITE, Known("query", 5))
    with pytest.raises(InvariantBroken):
        group_commit.confirm(WRITE, Known("query", 4))
    for known in (None, Known("another", 5)):
        with pytest.raises(GroupFenced):
            group_commit.confirm(WRITE, known)


def test_a_refused_commit_says_what_to_do() -> None:
    told = group_commit.refused(WRITE, InvalidTxnStatus("transaction 0_1 is ABORTED"), TIMEOUT_S)
    assert isinstance(told, TransactionAborted)
    assert "transactionTimeout" in str(told)
    assert "600 s" in str(told)
    fenced = group_commit.refused(WRITE, GroupFenced("epoch 4"), TIMEOUT_S)
    assert "another run" in str(fenced)
    other = MagnetarError("no")
    assert group_commit.refused(WRITE, other, TIMEOUT_S) is other
