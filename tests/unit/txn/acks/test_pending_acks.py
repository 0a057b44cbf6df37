"""What transactions hold: conflicts, decisions, and a model of single messages beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.model.ids import Position
from magnetar.txn.acks.pending_acks import (
    WHOLE,
    AckConflict,
    Acked,
    AckVerdict,
    EndedAcks,
    PendingAcks,
    acked_of,
    combined,
)
from magnetar.wire.messages import TxnId
from tests.examples import examples

T1, T2, T3 = (TxnId(0, number) for number in (1, 2, 3))


def at(entry: int) -> Position:
    return Position(1, entry)


def some(entry: int, *messages: int, size: int = 3) -> Acked:
    """Messages of a batch."""
    return Acked(at(entry), sum(1 << each for each in messages), size)


@dataclass
class Cursor:
    """A cursor over one ledger, as far as it is asked."""

    mark_delete: Position = field(default_factory=lambda: at(-1))
    acked: set[Position] = field(default_factory=set)
    partial: dict[Position, int] = field(default_factory=dict)

    def is_acked(self, position: Position) -> bool:
        return position <= self.mark_delete or position in self.acked

    def unacked_indexes(self, position: Position) -> int | None:
        return self.partial.get(position)


def held(
    pending: PendingAcks, txn: TxnId, *acks: Acked, cumulative: bool = False
) -> AckVerdict | AckConflict:
    """Judge, and hold what is accepted."""
    verdict = pending.judge(txn, acks, cumulative, Cursor())
    if verdict is AckVerdict.ACCEPTED:
        pending.add(txn, acks, cumulative)
    return verdict


# --- forms


def test_the_two_forms_of_a_set_of_messages() -> None:
    assert acked_of(at(0), 0, 0) == Acked(at(0), WHOLE)
    assert acked_of(at(0), 0b101, 3) == some(0, 1)
    assert acked_of(at(0), 0b101, 3).unacked == 0b101
    assert acked_of(at(0), 0b1000, 3) == Acked(at(0)), "what is not there cannot be left out"
    assert combined([some(0, 0), some(1, 0), some(0, 1), some(0, 2)]) == [
        Acked(at(0), WHOLE, 3),
        some(1, 0),
    ]
    assert combined([acked_of(at(0), 0b111, 3)]) == []


# --- one by one


@pytest.mark.parametrize("second", [T1, T2])
def test_a_message_is_acknowledged_by_one_transaction_once(second: TxnId) -> None:
    pending = PendingAcks(repeats_allowed=True)
    assert held(pending, T1, Acked(at(0))) is AckVerdict.ACCEPTED
    verdict = held(pending, second, Acked(at(0)))
    assert isinstance(verdict, AckConflict)
    assert verdict.holders == (() if second == T1 else (T1,))
    assert held(pending, second, Acked(at(1))) is AckVerdict.ACCEPTED


def test_messages_of_a_batch_are_free_one_by_one() -> None:
    pending = PendingAcks(repeats_allowed=False)
    assert held(pending, T1, some(0, 2)) is AckVerdict.ACCEPTED
    assert isinstance(held(pending, T2, some(0, 2)), AckConflict), "the last one of the batch, too"
    assert held(pending, T2, some(0, 0)) is AckVerdict.ACCEPTED
    assert isinstance(held(pending, T3, Acked(at(0))), AckConflict)
    assert pending.open_messages(at(0), None) == 0b010
    assert held(pending, T3, some(0, 1)) is AckVerdict.ACCEPTED
    assert pending.open_messages(at(0), None) == 0


def test_what_the_cursor_has_is_a_conflict() -> None:
    pending = PendingAcks(repeats_allowed=True)
    cursor = Cursor(mark_delete=at(0), acked={at(2)}, partial={at(3): 0b110})
    for ack in (Acked(at(0)), Acked(at(2)), some(2, 0), some(3, 0)):
        assert isinstance(pending.judge(T1, [ack], False, cursor), AckConflict)
    for ack in (Acked(at(1)), some(3, 1), Acked(at(3))):
        assert pending.judge(T1, [ack], False, cursor) is AckVerdict.ACCEPTED


def test_all_messages_of_a_batch_named_one_by_one_are_not_the_batch() -> None:
    """Of a batch that is acknowledged in part, what is named again is a conflict."""
    cursor = Cursor(partial={at(0): 0b110})
    pending = PendingAcks(repeats_allowed=False)
    (every,) = combined([some(0, 0), some(0, 1), some(0, 2)])
    assert isinstance(pending.judge(T1, [every], False, cursor), AckConflict)
    assert pending.judge(T1, [some(0, 1), some(0, 2)], False, cursor) is AckVerdict.ACCEPTED
    assert pending.judge(T1, [Acked(at(0))], False, cursor) is AckVerdict.ACCEPTED


def test_one_conflict_refuses_the_whole_command() -> None:
    pending = PendingAcks(repeats_allowed=False)
    held(pending, T1, Acked(at(1)))
    assert isinstance(held(pending, T2, Acked(at(0)), Acked(at(1))), AckConflict)
    assert pending.held(at(0)) == 0


# --- everything up to a message


def test_one_transaction_holds_everything_up_to_a_message() -> None:
    pending = PendingAcks(repeats_allowed=False)
    assert held(pending, T1, Acked(at(3)), cumulative=True) is AckVerdict.ACCEPTED
    verdict = held(pending, T2, Acked(at(5)), cumulative=True)
    assert isinstance(verdict, AckConflict)
    assert verdict.holders == (T1,)
    assert held(pending, T1, some(5, 0), cumulative=True) is AckVerdict.ACCEPTED
    assert pending.held(at(4)) == WHOLE
    assert pending.open_messages(at(5), None) == 0b110
    assert held(pending, T1, Acked(at(5)), cumulative=True) is AckVerdict.ACCEPTED
    assert pending.end(T1) == EndedAcks((), Acked(at(5), WHOLE, 3))
    assert not pending


@pytest.mark.parametrize("repeats_allowed", [True, False])
def test_a_repeated_cumulative_ack(repeats_allowed: bool) -> None:
    pending = PendingAcks(repeats_allowed=repeats_allowed)
    held(pending, T1, some(3, 0, 1), cumulative=True)
    for ack in (Acked(at(2)), some(3, 0), some(3, 0, 1)):
        verdict = held(pending, T1, ack, cumulative=True)
        assert (
            verdict is AckVerdict.REPEATED if repeats_allowed else isinstance(verdict, AckConflict)
        )
    cursor = Cursor(mark_delete=at(3))
    verdict = pending.judge(T2, [Acked(at(3))], True, cursor)
    assert verdict is AckVerdict.REPEATED if repeats_allowed else isinstance(verdict, AckConflict)


@pytest.mark.parametrize(
    ("through", "single", "clash"),
    [
        (Acked(at(3)), Acked(at(3)), True),
        (Acked(at(3)), some(2, 0), True),
        (Acked(at(3)), Acked(at(4)), False),
        (some(3, 0, 1), some(3, 1), True),
        (some(3, 0, 1), some(3, 2), False),
    ],
)
def test_conflicts_of_the_two_kinds_are_symmetric(
    through: Acked, single: Acked, clash: bool
) -> None:
    for first, second in ((through, single), (single, through)):
        pending = PendingAcks(repeats_allowed=True)
        assert held(pending, T1, first, cumulative=first is through) is AckVerdict.ACCEPTED
        verdict = held(pending, T2, second, cumulative=second is through)
        assert isinstance(verdict, AckConflict) is clash
        pending = PendingAcks(repeats_allowed=True)
        held(pending, T1, first, cumulative=first is through)
        mine = held(pending, T1, second, cumulative=second is through)
        assert mine is AckVerdict.ACCEPTED, "one transaction may do both"


def test_a_commit_gives_out_what_it_held_whatever_another_one_holds() -> None:
    pending = PendingAcks(repeats_allowed=True)
    held(pending, T2, Acked(at(1)), cumulative=True)
    held(pending, T1, Acked(at(4)), some(2, 1))
    assert pending.end(T1) == EndedAcks((some(2, 1), Acked(at(4))), None)
    assert pending.held(at(0)) == WHOLE
    assert pending.end(T1) is None


# --- undone, and from the store


def test_what_never_became_durable_is_undone() -> None:
    pending = PendingAcks(repeats_allowed=False)
    held(pending, T1, some(0, 0), Acked(at(1)))
    held(pending, T1, some(0, 1))
    held(pending, T1, Acked(at(3)), cumulative=True)
    held(pending, T1, Acked(at(5)), cumulative=True)
    pending.drop(T1, [some(0, 0), Acked(at(1))], False)
    pending.drop(T1, [Acked(at(5))], True)
    assert pending.end(T1) == EndedAcks((some(0, 1),), Acked(at(3)))
    held(pending, T2, Acked(at(1)))
    pending.drop(T2, [Acked(at(1))], False)
    assert not pending
    assert not pending.txns


def test_the_last_of_two_holders_frees_a_message() -> None:
    pending = PendingAcks(repeats_allowed=True)
    for txn in (T1, T2):
        pending.add(txn, [Acked(at(0))], False)
        pending.add(txn, [Acked(at(txn.least))], True)
    pending.end(T2)
    assert pending.held(at(0)) == WHOLE
    assert pending.through() == at(1)
    pending.end(T1)
    assert pending.held(at(0)) == 0


def test_plain_acks_leave_out_what_is_held() -> None:
    pending = PendingAcks(repeats_allowed=True)
    held(pending, T1, some(0, 1), Acked(at(1)))
    assert pending.plain_part(at(0), 0) == 0b010
    assert pending.plain_part(at(0), 0b110) == 0b110
    assert pending.plain_part(at(1), 0) is None
    assert pending.plain_part(at(2), 0b1) == 0b1
    assert pending.clear() == [T1]
    assert pending.plain_part(at(0), 0) == 0


# --- against a model of single messages

ENTRIES, SIZE = 4, 3
FREE, DONE = "free", "done"


class Model:
    """Every message is free, held by a transaction, or done."""

    def __init__(self) -> None:
        self.owner: dict[tuple[int, int], object] = {
            (entry, each): FREE for entry in range(ENTRIES) for each in range(SIZE)
        }
        self.single: dict[TxnId, set[tuple[int, int]]] = {}
        self.through: dict[TxnId, set[tuple[int, int]]] = {}

    def wanted(self, ack: Acked, cumulative: bool) -> set[tuple[int, int]]:
        entry = ack.position.entry_id
        found = {(entry, each) for each in range(SIZE) if ack.messages >> each & 1}
        if cumulative:
            found |= {(before, each) for before in range(entry) for each in range(SIZE)}
        return found

    def cursor(self) -> Cursor:
        cursor = Cursor()
        for entry in range(ENTRIES):
            left = sum(1 << each for each in range(SIZE) if self.owner[entry, each] != DONE)
            if left == 0:
                cursor.acked.add(at(entry))
            elif left != (1 << SIZE) - 1:
                cursor.partial[at(entry)] = left
        while at(cursor.mark_delete.entry_id + 1) in cursor.acked:
            cursor.mark_delete = at(cursor.mark_delete.entry_id + 1)
        return cursor

    def accepts(self, txn: TxnId, ack: Acked, cumulative: bool) -> bool:
        wanted = self.wanted(ack, cumulative)
        owners = {self.owner[each] for each in wanted}
        others = owners - {FREE, DONE, txn}
        if cumulative:
            behind = all(self.owner[each] == DONE for each in wanted) and bool(
                ack.position <= self.cursor().mark_delete
            )
            mine = self.through.get(txn, set())
            taken = any(each != txn for each in self.through)
            return not (others or taken or behind or wanted <= mine)
        if self.cursor().is_acked(ack.position) or others:
            return False
        if ack.messages != WHOLE and DONE in owners:
            return False
        return not wanted & self.single.get(txn, set())

    def hold(self, txn: TxnId, ack: Acked, cumulative: bool) -> None:
        wanted = self.wanted(ack, cumulative)
        (self.through if cumulative else self.single).setdefault(txn, set()).update(wanted)
        for each in wanted:
            if self.owner[each] != DONE:
                self.owner[each] = txn

    def end(self, txn: TxnId, outcome: str) -> set[tuple[int, int]]:
        mine = {each for each, owner in self.owner.items() if owner == txn}
        for each in mine:
            self.owner[each] = outcome
        self.single.pop(txn, None)
        self.through.pop(txn, None)
        return mine


ACKS = st.tuples(
    st.integers(0, ENTRIES - 1), st.one_of(st.just(WHOLE), st.integers(1, (1 << SIZE) - 2))
).map(lambda drawn: Acked(at(drawn[0]), drawn[1], 0 if drawn[1] == WHOLE else SIZE))
TXNS = st.sampled_from([T1, T2, T3])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ack"), TXNS, ACKS, st.booleans()),
        st.tuples(st.just("plain"), TXNS, ACKS, st.just(False)),
        st.tuples(st.just("commit"), TXNS, ACKS, st.just(False)),
        st.tuples(st.just("abort"), TXNS, ACKS, st.just(False)),
    ),
    max_size=30,
)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(STEPS)
def test_every_message_goes_the_way_of_the_model(
    steps: list[tuple[str, TxnId, Acked, bool]],
) -> None:
    pending, model = PendingAcks(repeats_allowed=False), Model()
    for kind, txn, ack, cumulative in steps:
        if kind == "ack":
            verdict = pending.judge(txn, [ack], cumulative, model.cursor())
            assert (verdict is AckVerdict.ACCEPTED) is model.accepts(txn, ack, cumulative)
            if verdict is AckVerdict.ACCEPTED:
                pending.add(txn, [ack], cumulative)
                model.hold(txn, ack, cumulative)
        elif kind == "plain":
            left_out = pending.plain_part(ack.position, ack.unacked)
            for each in model.wanted(ack, False):
                is_left_out = left_out is None or bool(left_out >> each[1] & 1)
                if model.owner[each] == FREE:
                    assert not is_left_out
                    model.owner[each] = DONE
                elif model.owner[each] != DONE:
                    assert is_left_out
        else:
            before = {each for each, owner in model.owner.items() if owner == txn}
            ended = pending.end(txn)
            covered: set[tuple[int, int]] = set()
            if ended is not None:
                for entry_ack in ended.entries:
                    covered |= model.wanted(entry_ack, False)
                if ended.through is not None:
                    covered |= model.wanted(ended.through, True)
            assert before <= covered, "nothing that was held is forgotten"
            assert all(model.owner[each] in (txn, DONE) for each in covered), "nothing of others"
            model.end(txn, DONE if kind == "commit" else FREE)
        for entry in range(ENTRIES):
            cursor = model.cursor()
            if cursor.is_acked(at(entry)):
                continue
            opened = pending.open_messages(at(entry), cursor.unacked_indexes(at(entry)))
            whole = (1 << SIZE) - 1
            free = sum(1 << each for each in range(SIZE) if model.owner[entry, each] == FREE)
            assert (whole if opened is None else opened) == free
