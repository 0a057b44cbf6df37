"""The simulation finds what managed ledgers do wrong: each test takes one of their rules away.

As in `test_mutations.py` a rule is patched away from here, and the same seeds find nothing with the
rule in place.
"""

from __future__ import annotations

import pytest

from harness.simulation.storage.run import simulate
from magnetar.managed_ledger.appender import Appender
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.cursor_state import CursorState
from magnetar.managed_ledger.cursor_store import CursorStore
from magnetar.managed_ledger.cursors import Cursors
from magnetar.managed_ledger.ledger_list import LedgerList, LedgerSpan
from tests.simulation.search import first_violation

SEEDS = 30


def _first_violation(first: int = 0) -> str:
    return first_violation(simulate, SEEDS, first)


@pytest.mark.slow  # a crash must come between the two writes
def test_chunks_written_after_the_record_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    put_all, collect_garbage = CursorStore._put_all, CursorStore._collect_garbage
    late: dict[CursorStore, dict[str, bytes]] = {}

    async def put_later(store: CursorStore, pieces: dict[str, bytes]) -> None:
        late[store] = pieces

    async def put_now(store: CursorStore) -> None:
        await put_all(store, late.pop(store, {}))
        await collect_garbage(store)

    monkeypatch.setattr(CursorStore, "_put_all", put_later)
    monkeypatch.setattr(CursorStore, "_collect_garbage", put_now)
    assert "which does not exist" in _first_violation(first=3)


def test_a_ledger_used_before_it_is_recorded_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(appender: Appender) -> None:
        writer = await appender._store.create()
        appender._switch(writer, LedgerSpan(writer.ledger_id, appender._clock.now_ms()))
        # The record hears of it when it is closed.

    monkeypatch.setattr(Appender, "begin", begin)
    assert "is lost" in _first_violation()


def test_a_former_ledger_that_is_not_recovered_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave(_: Appender) -> None:
        """Believe the record, which is behind."""

    monkeypatch.setattr(Appender, "recover", leave)
    assert _first_violation()


def test_a_mark_past_an_unacked_entry_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    move_mark = CursorState._move_mark

    def past_a_partial(state: CursorState, ledgers: LedgerList) -> None:
        move_mark(state, ledgers)
        following = ledgers.after(state.mark_delete)
        if following is not None and state.unacked_indexes(following) is not None:
            state.mark_delete = following
            state.acked.drop_through(following)

    monkeypatch.setattr(CursorState, "_move_mark", past_a_partial)
    assert "nobody acknowledged" in _first_violation()


def test_a_flush_that_does_not_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pretend(_: Cursor) -> None:
        """Leave it to chance."""

    monkeypatch.setattr(Cursor, "flush", pretend)
    assert "after a flush" in _first_violation()


def test_a_flush_that_joins_an_earlier_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    flush = Cursor.flush

    async def join(cursor: Cursor) -> None:
        if cursor._flight is None:
            await flush(cursor)
        else:  # what was acknowledged since it began is not in it
            await cursor._flight

    monkeypatch.setattr(Cursor, "flush", join)
    assert "after a flush" in _first_violation(first=2)


def test_a_trim_that_asks_no_cursor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cursors, "lowest_mark_delete", lambda _: None)
    assert "was trimmed" in _first_violation()


def test_a_seal_that_is_not_recorded_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Appender, "_with_end", Appender._with_ledgers)
    assert _first_violation(first=4)
