"""Entries and states of legacy transactions: any log gives the state that made it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import CorruptData, FormatTooNew
from magnetar.txn.legacy.coordinator_entries import (
    CODEC,
    Acknowledging,
    Began,
    Decided,
    Ended,
    Entry,
    PartitionsAdded,
    SubscriptionsAdded,
)
from magnetar.txn.legacy.coordinator_state import (
    OUTCOMES,
    LegacyTransaction,
    after,
    decision,
    ending,
)

MS = st.integers(0, 2**50)
NUMBERS = st.integers(1, 3)
NAMES = st.sampled_from(["persistent://a/b/c", "persistent://a/b/d", "é\n" * 50])
TOPICS = st.lists(NAMES, max_size=3).map(tuple)
PAIRS = st.lists(st.builds(Acknowledging, NAMES, NAMES), max_size=3).map(tuple)

ENTRIES: st.SearchStrategy[Entry] = st.one_of(
    st.builds(Began, NUMBERS, MS, MS, st.text(max_size=5)),
    st.builds(PartitionsAdded, NUMBERS, TOPICS, st.booleans()),
    st.builds(SubscriptionsAdded, NUMBERS, PAIRS, st.booleans()),
    st.builds(Decided, NUMBERS, st.sampled_from(["COMMITTING", "ABORTING"]), MS),
    st.builds(
        Ended,
        NUMBERS,
        st.sampled_from(["COMMITTED", "ABORTED"]),
        MS,
        MS,
        st.text(max_size=5),
        MS,
        MS,
    ),
)


def replayed(entries: Sequence[Entry]) -> dict[int, LegacyTransaction]:
    found: dict[int, LegacyTransaction] = {}
    for entry in entries:
        now = after(found.get(entry.number), entry)
        if now is not None:
            found[entry.number] = now
    return found


@given(ENTRIES)
def test_an_entry_is_read_as_it_was_written(entry: Entry) -> None:
    assert CODEC.decode(CODEC.encode(entry)) == entry
    assert CODEC.decode(memoryview(CODEC.encode(entry))) == entry


def test_the_form_of_entries_stays() -> None:
    assert CODEC.encode(Began(7, 1, 2, "me", "a")).hex() == "019600070102a26d65a161"
    ended = Ended(7, "ABORTED", 1, 2, "me", 3, 4, "a", "b")
    expected = "019a0407a741424f52544544" + "0102a26d650304a161a162"
    assert CODEC.encode(ended).hex() == expected


def test_entries_from_before_clients_and_deciders_were_kept_are_read() -> None:
    began, ended = Began(7, 1, 2, "me"), Ended(7, "ABORTED", 1, 2, "me", 3, 4)
    assert CODEC.decode(bytes.fromhex("019500070102a26d65")) == began
    before = bytes.fromhex("01980407a741424f52544544" + "0102a26d650304")
    assert CODEC.decode(before) == ended
    assert CODEC.decode(bytes.fromhex("01940307a8") + b"ABORTING" + b"\x05") == Decided(
        7, "ABORTING", 5
    )


def test_a_later_version_may_add_to_an_entry() -> None:
    """So an older release reads what this one writes: it passes over what it does not know."""
    more = bytes.fromhex("019700070102a26d65a161a162")
    assert CODEC.decode(more) == Began(7, 1, 2, "me", "a")


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x01\x90", b"\x01\x92\x09\x01"])
def test_damaged_entries_are_refused(payload: bytes) -> None:
    with pytest.raises(CorruptData):
        CODEC.decode(payload)


def test_entries_of_a_later_version_are_refused() -> None:
    with pytest.raises(FormatTooNew):
        CODEC.decode(b"\x02" + CODEC.encode(Began(1, 1, 1))[1:])


@given(st.lists(ENTRIES, max_size=30))
def test_the_first_decision_stays_and_a_finished_one_never_changes(entries: list[Entry]) -> None:
    first: dict[int, str] = {}
    done: dict[int, LegacyTransaction] = {}
    for length in range(len(entries) + 1):
        for number, known in replayed(entries[:length]).items():
            if not known.is_open:
                assert first.setdefault(number, OUTCOMES[known.state]) == OUTCOMES[known.state]
            if known.is_finished:
                assert done.setdefault(number, known) == known


class Coordinator:
    """Does what clients ask, as the real one does: an entry first, then the state."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.known: dict[int, LegacyTransaction] = {}

    def write(self, entry: Entry) -> None:
        self.log.append(entry)
        now = after(self.known.get(entry.number), entry)
        assert now is not None
        self.known[entry.number] = now

    def step(self, number: int, what: str, topics: tuple[str, ...]) -> None:
        known = self.known.get(number)
        if known is None:
            self.write(Began(number, len(self.log), 10))
        elif what == "add" and known.is_open:
            self.write(PartitionsAdded(number, topics))
            pairs = tuple(Acknowledging(topic, "s") for topic in topics)
            self.write(SubscriptionsAdded(number, pairs))
        elif what in ("commit", "abort"):
            entry = decision(known, commit=what == "commit", now_ms=len(self.log))
            if entry is not None:
                self.write(entry)
        elif what == "finish" and known.is_ending:
            self.write(ending(known, len(self.log)))


STEPS = st.tuples(NUMBERS, st.sampled_from(["add", "commit", "abort", "finish"]), TOPICS)


@given(st.lists(STEPS, max_size=30))
def test_the_log_gives_the_state_that_made_it(
    steps: list[tuple[int, str, tuple[str, ...]]],
) -> None:
    live = Coordinator()
    for step in steps:
        live.step(*step)
        # What was finished needs its last entry alone.
        kept = [
            entry
            for entry in live.log
            if isinstance(entry, Ended) or not live.known[entry.number].is_finished
        ]
        assert replayed(live.log) == replayed(kept) == live.known


@given(st.lists(ENTRIES, max_size=10))
def test_what_comes_without_a_beginning_is_nothing(entries: list[Entry]) -> None:
    leftovers = [entry for entry in entries if not isinstance(entry, Began | Ended)]
    assert replayed(leftovers) == {}
