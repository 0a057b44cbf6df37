"""Decisions: one outcome per transaction, alone and in groups."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import (
    GroupFenced,
    InvalidTxnStatus,
    NotAllowed,
    RequestError,
    TooManyRequests,
    TransactionNotFound,
)
from magnetar.txn import transitions
from magnetar.txn.ids import METADATA_BIT, from_text, is_metadata, metadata_id, to_text
from magnetar.txn.records import Group, GroupMembership, Header, State
from magnetar.wire.messages import TxnId

LIMIT = 100


def header(number: int, *, epoch: int | None = None, sequence: int = 0) -> Header:
    member = None if epoch is None else GroupMembership("app", epoch, sequence)
    return transitions.begun(metadata_id(3, number), now_ms=10, timeout_ms=60, group=member)


def opened(group: Group | None = None, generation: str = "g", run: str = "r") -> Group:
    return transitions.opened(group, "app", generation, run, now_ms=1, retired_max=LIMIT)


def commit(
    group: Group, sequence: int, *members: Header, epoch: int | None = None
) -> transitions.Committed:
    return transitions.committed(
        group,
        "app",
        group.epoch if epoch is None else epoch,
        sequence,
        {each.txn: each for each in members},
        now_ms=5,
        ids_max=LIMIT,
    )


def test_ids_of_the_two_kinds_never_meet() -> None:
    txn = metadata_id(3, 17)
    assert is_metadata(txn)
    assert not is_metadata(TxnId(3, 17))
    assert txn.least == METADATA_BIT | 17
    assert from_text(to_text(txn)) == txn
    assert from_text("(3,17)") == TxnId(3, 17)
    for bad in ("", "3", "3_-1", "x_1", f"{2**64}_0"):
        with pytest.raises(RequestError):
            from_text(bad)
    with pytest.raises(RequestError):
        metadata_id(0, METADATA_BIT)


def test_an_outcome_never_changes() -> None:
    done = transitions.ended(header(1), "COMMITTED", 20)
    assert (done.state, done.finalized_ms) == ("COMMITTED", 20)
    assert transitions.ended(done, "COMMITTED", 30) is done
    with pytest.raises(InvalidTxnStatus):
        transitions.ended(done, "ABORTED", 30)


def test_a_later_run_fences_an_earlier_one_for_good() -> None:
    first = opened()
    assert opened(first) is first
    second = opened(first, run="r2")
    assert second.epoch == first.epoch + 1
    with pytest.raises(GroupFenced):
        opened(second)
    third = opened(second, generation="g2")
    for generation, run in (("g", "r"), ("g", "r2"), ("g", "never seen")):
        with pytest.raises(GroupFenced):
            opened(third, generation, run)
    with pytest.raises(GroupFenced):
        commit(third, 1, header(1, epoch=first.epoch, sequence=1), epoch=first.epoch)
    with pytest.raises(NotAllowed):
        opened(third, "g3", "*")


def test_a_new_generation_counts_from_its_own_beginning() -> None:
    """A writer that lost its checkpoint begins at 0: that must not pass for a repetition."""
    winner, later = header(1, epoch=1, sequence=7), header(2, epoch=1, sequence=8)
    forgotten_one = header(3, epoch=1, sequence=6)
    group = commit(opened(), 7, winner).group
    assert opened(group, run="r2").sequence == 7
    anew = opened(group, generation="g2")
    assert (anew.sequence, anew.past) == (-1, 7)
    assert transitions.state_of(winner, anew) == "COMMITTED"
    assert transitions.state_of(later, anew) == "ABORTED"
    told = [
        transitions.is_surely_told(each.group, anew)
        for each in (forgotten_one, winner, later)
        if each.group is not None
    ]
    assert told == [False, False, True], "6 was committed, which only its header says"
    first = header(4, epoch=2, sequence=0)
    assert not commit(anew, 0, first).replayed
    assert opened(commit(anew, 0, first).group, generation="g3").past == 7


def test_a_commit_names_the_winners_and_aborts_the_rest() -> None:
    group = opened()
    winner, loser = header(1, epoch=1, sequence=4), header(2, epoch=1, sequence=4)
    early, late = header(3, epoch=1, sequence=3), header(4, epoch=1, sequence=5)
    after, replayed = commit(group, 4, winner)
    assert not replayed
    states = [transitions.state_of(each, after) for each in (winner, loser, early, late)]
    assert states == ["COMMITTED", "ABORTED", "ABORTED", "OPEN"]
    again = commit(after, 4, loser)
    assert again == (after, True)


def test_a_commit_of_what_is_not_open_or_not_of_the_sequence_decides_nothing() -> None:
    group = opened()
    with pytest.raises(InvalidTxnStatus):
        commit(group, 4, header(1, epoch=1, sequence=5))
    with pytest.raises(TransactionNotFound):
        commit(group, 4, header(1))
    with pytest.raises(InvalidTxnStatus):
        commit(group, 4, transitions.ended(header(1, epoch=1, sequence=4), "ABORTED", 1))
    with pytest.raises(TransactionNotFound):
        transitions.committed(None, "app", 1, 4, {}, now_ms=1, ids_max=LIMIT)
    with pytest.raises(TooManyRequests):
        transitions.committed(group, "app", 1, 4, {"1_2": None, "1_3": None}, now_ms=1, ids_max=1)


def test_an_aborted_member_stays_aborted_and_a_decided_one_committed() -> None:
    group = opened()
    member = header(1, epoch=1, sequence=4)
    after = transitions.member_aborted(group, member, now_ms=3, aborted_max=LIMIT)
    assert after is not None
    assert transitions.member_aborted(after, member, now_ms=3, aborted_max=LIMIT) is None
    with pytest.raises(InvalidTxnStatus):
        commit(after, 4, member)
    decided = commit(group, 4, member).group
    with pytest.raises(InvalidTxnStatus):
        transitions.member_aborted(decided, member, now_ms=3, aborted_max=LIMIT)
    later = opened(decided, run="r2")
    assert transitions.state_of(member, later) == "COMMITTED"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3)), max_size=30))
def test_a_decision_is_never_taken_back(steps: list[tuple[int, int, int]]) -> None:
    """Random openings, members, commits and aborts: what was final once stays what it was."""
    group, members = opened(), dict[str, Header]()
    final: dict[str, State] = {}
    runs = 1
    for kind, sequence, pick in steps:
        with suppress(RequestError):  # refused: nothing changed
            group, runs = _step(group, members, runs, kind, sequence, pick, final)
        for each in members.values():
            state = transitions.state_of(each, group)
            assert final.get(each.txn, state) == state
            if state != "OPEN":
                final[each.txn] = state


def _step(
    group: Group,
    members: dict[str, Header],
    runs: int,
    kind: int,
    sequence: int,
    pick: int,
    final: dict[str, State],
) -> tuple[Group, int]:
    if kind == 0:
        return opened(group, run=f"r{runs}"), runs + 1
    if kind == 1:
        member = GroupMembership("app", group.epoch, sequence)
        transitions.check_new_member(group, member)
        new = header(len(members), epoch=group.epoch, sequence=sequence)
        members[new.txn] = new
        return group, runs
    if kind == 2:
        named = [
            each for each in members.values() if each.group and each.group.sequence == sequence
        ]
        # As the coordinator does: the ids that the record is about to forget are rolled forward.
        for txn in group.decided:
            members[txn] = transitions.ended(members[txn], "COMMITTED", 1)
        return commit(group, sequence, *named[:pick]).group, runs
    open_ones = [each for each in members.values() if each.txn not in final]
    if not open_ones:
        return group, runs
    chosen = open_ones[pick % len(open_ones)]
    after = transitions.member_aborted(group, chosen, now_ms=1, aborted_max=LIMIT)
    return after or group, runs
