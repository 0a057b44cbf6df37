"""One transaction for all tasks, as a server without groups needs it; without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from magnetar.blocking import Producer
from magnetar.client.client import Client as AsyncClient
from magnetar.errors import (
    CheckpointMismatch,
    MagnetarError,
    ProducerFenced,
    ServiceNotReady,
    TransactionAborted,
    WriterConflict,
)
from magnetar.server.handlers import connecting
from magnetar.spark.sink import single_writes, writers
from magnetar.spark.sink.group_commit import WriteId
from magnetar.spark.sink.single_commit import Note
from magnetar.wire.messages import TxnId
from tests.integration.spark.reading import check_numbers
from tests.integration.spark.writing import Writing, tasks, write_id, writing_to

TOPIC = "persistent://public/default/output"


@pytest.fixture
def writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writing]:
    numbers = count()
    monkeypatch.setattr(writers, "_attempt", lambda: (0, next(numbers)))
    with writing_to(tmp_path) as writing:
        yield writing


def single(writing: Writing) -> writers.SinkWriter:
    """As the driver makes it for each batch."""
    return writing.sink(topic=TOPIC, commitMode="single")


def test_a_batch_is_there_when_it_is_committed(writing: Writing) -> None:
    for batch in range(3):
        made = single(writing)
        done = tasks(made, write_id(batch), range(batch * 10, batch * 10 + 5), [])
        done += tasks(made, write_id(batch), range(batch * 10 + 5, batch * 10 + 10))
        assert len(writing.found(batch * 10, TOPIC)) == batch * 10
        made.commit(batch, done)
    check_numbers(writing.found(30, TOPIC), range(30))


def test_a_server_without_groups_is_written_in_this_way(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so when a client connects; nothing is tried out on it."""
    real = connecting._features
    without = {"supports_transaction_groups": False}
    asked: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(connecting, "_features", lambda context: real(context) | without)
        patch.setattr(AsyncClient, "group_status", lambda _, name: asked.append(name))
        made = writing.sink(topic=TOPIC)
        assert made.mode == "single"
    assert asked == []
    made.commit(0, tasks(made, write_id(0), range(5)))
    check_numbers(writing.found(5, TOPIC), range(5))
    with pytest.raises(MagnetarError, match="persistent://"):
        writing.sink()


def test_a_server_with_groups_is_written_with_them(writing: Writing) -> None:
    assert writing.sink().mode == "group"
    assert writing.sink(topic=TOPIC).mode == "group"


def test_a_batch_that_comes_again_is_not_committed_again(writing: Writing) -> None:
    first = single(writing)
    first.commit(0, tasks(first, write_id(0), range(10)))
    again = single(writing)
    again.commit(0, tasks(again, write_id(0, "run-2"), range(4), range(4, 10)))
    further = single(writing)
    further.commit(1, tasks(further, write_id(1, "run-2"), range(10, 15)))
    further.abort(tasks(single(writing), write_id(2, "run-2"), range(15, 20)))
    check_numbers(writing.found(15, TOPIC), range(15))
    with pytest.raises(CheckpointMismatch):
        again.commit(0, tasks(single(writing), write_id(0, "run-3"), range(10)))


def test_an_attempt_that_spark_did_not_choose_ends_the_batch(writing: Writing) -> None:
    made = single(writing)
    _loser, winner = tasks(made, write_id(0), range(10), range(10))
    with pytest.raises(TransactionAborted, match="run more than once"):
        made.commit(0, [winner])
    made.abort([winner])
    again = single(writing)
    again.commit(0, tasks(again, write_id(0, "run-2"), range(10)))
    check_numbers(writing.found(10, TOPIC), range(10))


def test_without_claims_a_lost_attempt_is_committed(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_writes, "check_attempts", lambda *_: None)
    made = single(writing)
    _loser, winner = tasks(made, write_id(0), range(10), range(10))
    made.commit(0, [winner])
    assert len(writing.found(20, TOPIC)) == 20, "the rule that was switched off was needed"


def test_an_attempt_that_comes_late_cannot_claim(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has read the claims, and is about to end the transaction."""
    made = single(writing)
    done = tasks(made, write_id(0), range(10))
    real = single_writes._end

    def late(*how: Any) -> None:
        with pytest.raises(ServiceNotReady, match="another driver's"):
            tasks(made, write_id(0), range(10))
        real(*how)

    monkeypatch.setattr(single_writes, "_CLAIM_S", 0.2)
    monkeypatch.setattr(single_writes, "_end", late)
    made.commit(0, done)
    check_numbers(writing.found(10, TOPIC), range(10))


def test_a_task_is_not_tried_again(writing: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_attempt", lambda: (1, 7))
    with pytest.raises(TransactionAborted, match="cannot be tried again"):
        tasks(single(writing), write_id(0), range(10))


def test_a_driver_that_died_before_the_end_holds_up_nobody(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token is written, the transaction not ended: the next driver ends it first."""
    dead = single(writing)
    done = tasks(dead, write_id(0), range(10))

    def dies(
        mode: single_writes.Mode, producer: Producer[bytes], write: WriteId, txn: TxnId, rows: int
    ) -> None:
        pair, ids = (txn.most, txn.least), (write.generation, write.sequence)
        producer.send(Note("announcement", *ids, txn=pair).to_bytes())
        token = Note("token", *ids, txn=pair).to_bytes()
        producer.send(token, txn=mode.joined(txn, ends_here=True))

    with monkeypatch.context() as patch:
        patch.setattr(single_writes, "_end", dies)
        dead.commit(0, done)
    again = single(writing)
    again.commit(0, tasks(again, write_id(0, "run-2"), range(10)))
    check_numbers(writing.found(10, TOPIC), range(10))


def test_a_driver_that_was_replaced_cannot_send_its_token(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read that nothing is committed, and another driver commits the batch then."""
    old, new = single(writing), single(writing)
    done = tasks(old, write_id(0), range(10))
    real = single_writes._exclusive

    def overtaken(mode: single_writes.Mode, topic: str) -> Producer[bytes]:
        if topic.endswith("-claims"):
            monkeypatch.setattr(single_writes, "_exclusive", real)
            new.commit(0, tasks(new, write_id(0, "run-2"), range(10)))
        return real(mode, topic)

    monkeypatch.setattr(single_writes, "_exclusive", overtaken)
    with pytest.raises(ProducerFenced):
        old.commit(0, done)
    old.abort(done)
    check_numbers(writing.found(10, TOPIC), range(10))


def test_what_a_dead_driver_left_open_is_ended_with_the_next_commit(writing: Writing) -> None:
    tasks(single(writing), write_id(0), range(5))  # and its driver dies
    again = single(writing)
    again.commit(0, tasks(again, write_id(0, "run-2"), range(5)))
    check_numbers(writing.found(5, TOPIC), range(5))


def test_another_query_of_that_name_is_refused(writing: Writing) -> None:
    made = single(writing)
    made.commit(0, tasks(made, write_id(0, app="mine/a b"), range(10)))
    other = single(writing)
    with pytest.raises(WriterConflict):
        other.commit(0, tasks(other, write_id(0, query="query-2", app="mine/a b"), range(10)))


def test_a_batch_without_rows_is_noted(writing: Writing) -> None:
    made = single(writing)
    made.commit(0, tasks(made, write_id(0), []))
    again = single(writing)
    with pytest.raises(CheckpointMismatch, match="0 rows, and has 3 now"):
        again.commit(0, tasks(again, write_id(0, "run-2"), range(3)))
    assert writing.found(0, TOPIC) == []
