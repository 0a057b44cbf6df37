"""Dedup: verdicts, holes after failed appends, the stored form, exactly-once in random lives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.publish import dedup as dedup_module
from magnetar.broker.publish.dedup import HOLES_MAX, Dedup, SendVerdict
from magnetar.broker.publish.lineage import SequenceSpan
from magnetar.errors import CorruptMetadata, FormatTooNew, InvariantBroken
from magnetar.model.ids import Position
from magnetar.txn.buffer.txn_dedup import TxnRuns

STORE, DUPLICATE, UNKNOWN = SendVerdict.STORE, SendVerdict.DUPLICATE, SendVerdict.UNKNOWN
START = Position(3, 7)


def stored(*sequences: int) -> Dedup:
    dedup = Dedup(names_max=100)
    for sequence in sequences:
        assert dedup.decide("p", sequence) is STORE
        dedup.persisted("p", sequence)
    return dedup


def test_a_send_is_stored_once() -> None:
    dedup = Dedup(names_max=100)
    assert dedup.last_sequence_id("p") == -1
    assert dedup.decide("p", 0) is STORE
    assert dedup.decide("p", 0) is UNKNOWN
    assert dedup.last_sequence_id("p") == 0
    dedup.persisted("p", 0)
    assert dedup.decide("p", 0) is DUPLICATE
    assert dedup.decide("other", 0) is STORE


def test_a_batch_counts_up_to_its_highest_sequence() -> None:
    dedup = stored()
    assert dedup.decide("p", 5, 9) is STORE
    assert dedup.decide("p", 7) is UNKNOWN
    dedup.persisted("p", 5)
    assert dedup.decide("p", 9) is DUPLICATE
    assert dedup.decide("p", 10) is STORE


def test_chunks_are_judged_by_the_last_one() -> None:
    dedup = stored(1)
    for sequence in (1, 2, 2):
        assert dedup.decide("p", sequence, is_last_chunk=False) is STORE
        dedup.persisted("p", sequence, is_last_chunk=False)
    dedup.decide("p", 2, is_last_chunk=False)
    dedup.failed("p", 2, is_last_chunk=False)
    assert dedup.decide("p", 1) is DUPLICATE
    assert dedup.decide("p", 2) is STORE
    dedup.persisted("p", 2)
    dedup.replay("p", 9, now=0, is_last_chunk=False)
    assert dedup.last_sequence_id("p") == 2


def test_a_failed_append_may_be_sent_again() -> None:
    dedup = stored(1)
    assert [dedup.decide("p", sequence) for sequence in (2, 3)] == [STORE, STORE]
    dedup.failed("p", 2)
    dedup.failed("p", 3)
    dedup.check_invariants()
    assert not dedup.has_holes
    assert dedup.last_sequence_id("p") == 1
    assert [dedup.decide("p", sequence) for sequence in (1, 2, 3)] == [DUPLICATE, STORE, STORE]


def test_a_hole_below_a_stored_send_can_be_filled_once() -> None:
    dedup = stored(1)
    assert [dedup.decide("p", 2, 4), dedup.decide("p", 5)] == [STORE, STORE]
    dedup.failed("p", 2)
    dedup.persisted("p", 5)
    dedup.check_invariants()
    assert dedup.has_holes
    assert dedup.last_sequence_id("p") == 1
    restored, _ = Dedup.restore(dedup.snapshot(START), 100, now=0)
    for each in (dedup, restored):
        assert [each.decide("p", at) for at in (1, 5)] == [DUPLICATE, DUPLICATE]
        assert [each.decide("p", 3, 3), each.decide("p", 3)] == [STORE, UNKNOWN]
        each.persisted("p", 3)
        assert [each.decide("p", at) for at in (2, 3, 4)] == [STORE, DUPLICATE, STORE]
        each.check_invariants()
        assert not each.has_holes
        assert each.last_sequence_id("p") == 5


def test_what_fills_a_hole_is_missing_from_a_snapshot_until_it_is_durable() -> None:
    dedup = stored()
    assert [dedup.decide("p", 2), dedup.decide("p", 3)] == [STORE, STORE]
    dedup.failed("p", 2)
    dedup.persisted("p", 3)
    assert dedup.decide("p", 2) is STORE
    restored, _ = Dedup.restore(dedup.snapshot(START), 100, now=0)
    assert restored.decide("p", 2) is STORE
    dedup.failed("p", 2)
    assert dedup.decide("p", 2) is STORE


def test_settling_what_is_not_next_is_a_bug() -> None:
    dedup = stored(1)
    with pytest.raises(InvariantBroken):
        dedup.persisted("p", 1)
    dedup.decide("p", 2)
    with pytest.raises(InvariantBroken):
        dedup.failed("p", 3)


def test_only_absent_names_are_forgotten_the_longest_absent_first() -> None:
    dedup = Dedup(names_max=2)
    for name in "abcd":
        dedup.decide(name, 1)
        dedup.persisted(name, 1)
    dedup.producer_left("b", 10)
    dedup.producer_left("a", 20)
    dedup.producer_left("c", 30)
    dedup.producer_joined("c")
    dedup.producer_left("unheard-of", 30)
    assert dedup.forget_idle(100, idle=1000) == ["b", "a"]
    dedup.producer_left("c", 100)
    assert dedup.forget_idle(199, idle=100) == []
    assert dedup.forget_idle(200, idle=100) == ["c"]
    assert len(dedup) == 1
    dedup.decide("d", 2)
    dedup.producer_left("d", 200)
    assert dedup.forget_idle(900, idle=100) == [], "its append is in flight"


@given(
    st.dictionaries(st.text(max_size=5), st.lists(st.integers(0, 50), min_size=1), max_size=5),
    st.integers(-1, 9),
)
def test_a_snapshot_holds_what_is_persisted(sent: dict[str, list[int]], entry: int) -> None:
    dedup = Dedup(names_max=100)
    for name, sequences in sent.items():
        for sequence in sequences:
            dedup.replay(name, sequence, sequence + 1, now=5)
    restored, position = Dedup.restore(dedup.snapshot(Position(2, entry)), 100, now=0)
    assert position == (2, entry)
    for name, sequences in sent.items():
        assert restored.last_sequence_id(name) == max(sequences) + 1
    assert sorted(restored.forget_idle(10, 10)) == sorted(sent)


@given(st.data())
def test_a_damaged_snapshot_is_refused(data: st.DataObject) -> None:
    whole = stored(1, 2).snapshot(START)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CorruptMetadata):
        Dedup.restore(whole[:cut], 100, now=0)
    with pytest.raises(CorruptMetadata):
        Dedup.restore(whole + b"x", 100, now=0)
    with pytest.raises(FormatTooNew):
        Dedup.restore(b"\x03" + whole[1:], 100, now=0)


def test_the_stored_form_stays() -> None:
    assert stored(1, 2).snapshot(START).hex() == (
        "01" "0000000000000003" "0000000000000007" "00000001"
        "00000001" "70" "0000000000000002" "00000000"
    )  # fmt: skip


class World:
    """One producer, a log whose appends may fail, connections and brokers that end."""

    def __init__(self) -> None:
        self.dedup = Dedup(names_max=10)
        self.snapshot = self.dedup.snapshot(Position(0, -1))
        self.snapshot_end = 0
        self.log: list[tuple[int, int]] = []
        self.in_flight: list[tuple[int, int]] = []
        self.owed: list[tuple[int, int]] = []
        self.connected = True
        self.next_sequence = 0

    def send(self, size: int) -> None:
        """The client sends the next batch, connected or not."""
        span = (self.next_sequence, self.next_sequence + size - 1)
        self.next_sequence += size
        self.owed.append(span)
        if self.connected:
            assert self.dedup.decide("p", *span) is STORE
            self.in_flight.append(span)

    def settle(self, succeeds: bool) -> None:
        if not self.in_flight:
            return
        span = self.in_flight.pop(0)
        if succeeds:
            self.log.append(span)
            self.dedup.persisted("p", span[0])
            if self.connected:
                assert self.owed.pop(0) == span
        else:
            self.dedup.failed("p", span[0])
            self.connected = False
        if not self.in_flight and self.dedup.has_holes:
            self.store_snapshot()

    def store_snapshot(self) -> None:
        self.snapshot = self.dedup.snapshot(Position(0, len(self.log) - 1))
        self.snapshot_end = len(self.log)

    def reconnect(self) -> None:
        """The client comes again and sends again whatever it has no receipt for."""
        if not self.connected and self.dedup.has_holes and self.in_flight:
            return  # fenced until what is in flight is settled
        self.connected = True
        for span in list(self.owed):
            verdict = self.dedup.decide("p", *span)
            if verdict is STORE:
                self.in_flight.append(span)
            elif verdict is DUPLICATE:
                assert span in self.log, "a receipt for what is not stored"
                if self.owed[0] == span:
                    self.owed.pop(0)
                else:
                    self.connected = False  # its receipt would stand in line; the client drops it
                    return
            else:
                assert span in self.in_flight
                self.connected = False
                return

    def restart(self) -> None:
        if self.dedup.has_holes and self.in_flight:
            return
        self.in_flight.clear()
        self.connected = False
        self.dedup, behind = Dedup.restore(self.snapshot, 10, now=0)
        for span in self.log[behind.entry_id + 1 :]:
            self.dedup.replay("p", *span, now=0)


@given(
    st.lists(
        st.sampled_from(["send", "batch", "settle", "settle", "fail", "cut", "again", "restart"])
    )
)
def test_everything_is_stored_exactly_once(steps: list[str]) -> None:
    world = World()
    for step in [*steps, *["settle"] * 20, *["again", *["settle"] * 20] * (len(steps) + 2)]:
        if step in ("send", "batch"):
            world.send(1 if step == "send" else 3)
        elif step in ("settle", "fail"):
            world.settle(step == "settle")
        elif step == "cut":
            world.connected = False
        elif step == "restart":
            world.restart()
        elif not world.connected:
            world.reconnect()
        world.dedup.check_invariants()
    assert not world.owed
    assert sorted(world.log) == sorted(set(world.log))
    assert sum(last - first + 1 for first, last in world.log) == world.next_sequence


class _Asked:
    """One life of a producer, every send judged; or (`noting`) plain ones noted in its lane."""

    def __init__(self, *, noting: bool) -> None:
        self.dedup = stored(0)
        self._noting = noting
        self._in_flight: list[tuple[int, bool]] = []

    def send(self, sequence: int) -> SendVerdict:
        fast_path = self.dedup.fast_path("p") if self._noting else None
        if fast_path is not None and sequence > fast_path.pushed and sequence > fast_path.floor:
            fast_path.pushed = sequence
            fast_path.plain += 1
            self._in_flight.append((sequence, True))
            return STORE
        verdict = self.dedup.decide("p", sequence)
        if verdict is STORE:
            self._in_flight.append((sequence, False))
        return verdict

    def settle(self, *, ok: bool) -> None:
        if not self._in_flight:
            return
        sequence, plain = self._in_flight.pop(0)
        if plain:
            fast_path = self.dedup.fast_path("p")
            assert fast_path is not None
            (fast_path.plain_persisted if ok else fast_path.plain_failed)(sequence)
        else:
            (self.dedup.persisted if ok else self.dedup.failed)("p", sequence)


@given(st.lists(st.one_of(st.integers(1, 12), st.booleans()), max_size=40))
def test_a_lane_decides_as_a_judgement_of_every_send_would(steps: list[int | bool]) -> None:
    asked, noted = _Asked(noting=False), _Asked(noting=True)
    for step in steps:
        if isinstance(step, bool):
            asked.settle(ok=step)
            noted.settle(ok=step)
        else:
            assert asked.send(step) is noted.send(step)
        assert asked.dedup.last_sequence_id("p") == noted.dedup.last_sequence_id("p")
        assert asked.dedup.snapshot(START) == noted.dedup.snapshot(START)
        noted.dedup.check_invariants()
        assert noted.dedup.forget_idle(0.0, 0.0) == []


# --- many transactions


def runs_of(*sequences: int) -> TxnRuns:
    runs = TxnRuns()
    for each in sequences:
        runs.add(each, each)
    return runs


def verdicts(dedup: Dedup, count: int) -> list[SendVerdict]:
    """What sends of these sequences would get, each for itself."""
    data = dedup.snapshot(Position(0, 0))
    return [Dedup.restore(data, 10, 0.0)[0].decide("p", number) for number in range(count)]


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.booleans())
def test_a_transaction_with_gaps_ends_as_if_each_part_ended_alone(
    first: set[int], second: set[int], committed: bool
) -> None:
    together, apart = Dedup(10), Dedup(10)
    for dedup in (together, apart):
        dedup.decide("p", 31)
        dedup.persisted("p", 31)
        for number in sorted(first):
            dedup.txn_aborted("p", SequenceSpan(number, number))
    runs = runs_of(*sorted(second))
    together.began_in_txn("p", runs)
    together.ended_in_txn("p", runs, committed=committed)
    for low, high in runs:
        ended = apart.txn_committed if committed else apart.txn_aborted
        ended("p", SequenceSpan(low, high))
    together.check_invariants()
    assert verdicts(together, 33) == verdicts(apart, 33)
    free = first - second if committed else first | second
    wanted = [
        SendVerdict.STORE if n in free or n > 31 else SendVerdict.DUPLICATE for n in range(33)
    ]
    assert verdicts(together, 33) == wanted


def test_the_end_of_a_transaction_with_many_gaps_is_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = 0
    without = dedup_module._without

    def counted(spans: Sequence[SequenceSpan], gone: Sequence[SequenceSpan]) -> list[SequenceSpan]:
        nonlocal passes
        passes += 1
        return without(spans, gone)

    monkeypatch.setattr(dedup_module, "_without", counted)
    dedup = Dedup(10)
    dedup.decide("p", 5000)
    dedup.persisted("p", 5000)
    for start, committed in ((0, False), (1, False), (0, True)):
        runs = runs_of(*range(start, 5000, 4))
        dedup.began_in_txn("p", runs)
        dedup.ended_in_txn("p", runs, committed=committed)
        assert passes <= 2, "for all gaps together"
        passes = 0


def test_holes_are_given_up_when_there_are_too_many() -> None:
    dedup = Dedup(10)
    last = 20 * HOLES_MAX
    for number in range(0, last, 2):
        dedup.decide("p", number)
        dedup.persisted("p", number)
        dedup.txn_aborted("p", SequenceSpan(number + 1, number + 1))
        assert len(dedup.fast_path("p").holes) <= HOLES_MAX  # type: ignore[union-attr]
    dedup.check_invariants()
    data = dedup.snapshot(Position(0, 0))
    assert len(data) < 20 * HOLES_MAX
    for each in (dedup, Dedup.restore(data, 10, 0.0)[0]):
        assert each.decide("p", last - 1) is SendVerdict.STORE, "a hole"
        assert each.decide("p", last - 2) is SendVerdict.DUPLICATE
        for old in (0, 1, last // 2):
            assert each.decide("p", old) is SendVerdict.UNKNOWN, "nobody knows any more"
        assert each.decide("p", last) is SendVerdict.STORE


def test_neighbours_are_one_hole() -> None:
    dedup = Dedup(10)
    dedup.decide("p", 4 * HOLES_MAX)
    dedup.persisted("p", 4 * HOLES_MAX)
    for number in range(2 * HOLES_MAX):
        dedup.txn_aborted("p", SequenceSpan(number, number))
    fast_path = dedup.fast_path("p")
    assert fast_path is not None
    assert fast_path.holes == [SequenceSpan(0, 2 * HOLES_MAX - 1, needed=False)]
    assert dedup.decide("p", 0) is SendVerdict.STORE
