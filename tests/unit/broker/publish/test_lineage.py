"""What segments inherit: pieces and their form, verdicts, exactly-once over splits and merges."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.publish.dedup import Dedup, SendVerdict
from magnetar.broker.publish.lineage import (
    NO_LINEAGE,
    Lineage,
    Piece,
    SequenceSpan,
    dedup_name,
    producer_names,
    stored,
)
from magnetar.errors import CorruptMetadata, FormatTooNew, InvariantBroken
from magnetar.model.hashing import FULL_RING, HASH_MAX, HashRange
from magnetar.model.ids import Position
from magnetar.model.names import TopicName

STORE, DUPLICATE, UNKNOWN = SendVerdict.STORE, SendVerdict.DUPLICATE, SendVerdict.UNKNOWN
LOWER, UPPER = FULL_RING.split(FULL_RING.midpoint)
IN_LOWER, IN_UPPER = 1, HASH_MAX
START = Position(3, 7)


def heir(lineage: Lineage, own_range: HashRange = FULL_RING, now: float = 0) -> Dedup:
    dedup = Dedup(names_max=100)
    dedup.inherit(lineage, own_range, now)
    dedup.check_invariants()
    return dedup


def store(dedup: Dedup, *sequences: int, key_hash: int | None = None, name: str = "p") -> None:
    for sequence in sequences:
        assert dedup.decide(name, sequence, key_hash=key_hash) is STORE
        dedup.persisted(name, sequence)


def verdicts(dedup: Dedup, *sequences: int, key_hash: int | None = None) -> list[SendVerdict]:
    return [dedup.decide("p", sequence, key_hash=key_hash) for sequence in sequences]


# --- names


def test_names_of_one_producer_on_a_segment() -> None:
    segment = TopicName.parse("segment://public/default/x/0000-7fff-3")
    assert dedup_name(segment, "p-seg-3") == "p"
    assert dedup_name(segment, "p") == "p"
    assert dedup_name(segment, "p-seg-33") == "p-seg-33"
    assert dedup_name(segment, "-seg-3") == "-seg-3"
    assert dedup_name(TopicName.parse("x"), "p-seg-3") == "p-seg-3"
    assert producer_names(segment, "p") == ("p", "p-seg-3")
    assert producer_names(TopicName.parse("x"), "p") == ("p",)


# --- values


def test_pieces_are_clipped_merged_and_filled_up() -> None:
    one = Lineage({"p": [Piece(LOWER, 5)], "q": [Piece(LOWER, 1)]})
    other = Lineage({"p": [Piece(UPPER, 5)], "r": [Piece(UPPER, 2, (SequenceSpan(1, 1),))]})
    both = one.merged(other)
    assert both["p"] == (Piece(FULL_RING, 5),), "neighbours that say the same are one"
    assert both.clipped(LOWER) == {"p": (Piece(LOWER, 5),), "q": (Piece(LOWER, 1),)}
    filled = both.covering(FULL_RING)
    assert filled["q"] == (Piece(LOWER, 1), Piece(UPPER, -1))
    assert filled["r"] == (Piece(LOWER, -1), Piece(UPPER, 2, (SequenceSpan(1, 1),)))
    assert filled["p"] == both["p"]
    assert NO_LINEAGE.merged(one) == one
    assert "Lineage" in repr(one)


def test_all_pieces_that_a_message_may_concern_have_to_agree() -> None:
    pieces = (Piece(LOWER, 9, (SequenceSpan(4, 4),)), Piece(UPPER, 5, (SequenceSpan(4, 4),)))
    assert [stored(pieces, 7, at) for at in (IN_LOWER, IN_UPPER, None)] == [True, False, None]
    assert [stored(pieces, at, None) for at in (3, 4, 6, 10)] == [True, False, None, False]
    assert stored((Piece(LOWER, 9),), 7, IN_UPPER) is True, "it came from anywhere"


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3)


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    start = draw(st.integers(0, HASH_MAX))
    holes: list[SequenceSpan] = []
    free = 0
    for gap, size in draw(spans):
        holes.append(SequenceSpan(free + gap, free + gap + size))
        free = holes[-1].last + 1
    persisted = free - 1 + draw(st.integers(0, 2**40))
    return Piece(HashRange(start, draw(st.integers(start, HASH_MAX))), persisted, tuple(holes))


lineages = st.dictionaries(st.text(max_size=5), st.lists(pieces(), max_size=4), max_size=4).map(
    Lineage
)


@given(lineages, st.data())
def test_the_stored_form_is_checked(lineage: Lineage, data: st.DataObject) -> None:
    whole = lineage.to_bytes()
    assert Lineage.from_bytes(whole) == lineage
    for wrong in (whole[: data.draw(st.integers(0, len(whole) - 1))], whole + b"x"):
        with pytest.raises(CorruptMetadata):
            Lineage.from_bytes(wrong)
    with pytest.raises(FormatTooNew):
        Lineage.from_bytes(b"\x02" + whole[1:])
    with pytest.raises(CorruptMetadata):
        Lineage.from_bytes(b"\x00" + whole[1:])


def test_the_stored_form_stays() -> None:
    form = (
        "01" "00000001" "00000001" "70" "00000001"
        "0000" "7fff" "0000000000000005" "00000001" "0000000000000002" "0000000000000003"
    )  # fmt: skip
    lineage = Lineage({"p": [Piece(LOWER, 5, (SequenceSpan(2, 3),))]})
    assert lineage.to_bytes().hex() == form
    assert Dedup.restore(heir(lineage, LOWER).snapshot(START), 9, 0)[1] == START
    assert heir(lineage, LOWER).snapshot(START).hex() == (
        "02" "0000000000000003" "0000000000000007" "00000000" + form
    )  # fmt: skip


@pytest.mark.parametrize(
    "piece",
    [
        Piece(LOWER, 5, (SequenceSpan(4, 6),)),
        Piece(LOWER, 5, (SequenceSpan(3, 2),)),
        Piece(LOWER, 5, (SequenceSpan(2, 3), SequenceSpan(3, 4))),
        Piece(LOWER, -2),
    ],
)
def test_pieces_that_cannot_be_are_refused(piece: Piece) -> None:
    with pytest.raises(InvariantBroken):
        piece.check_invariants()
    with pytest.raises(CorruptMetadata):
        Lineage.from_bytes(Lineage({"p": [piece]}).to_bytes())


# --- verdicts


def test_a_child_knows_what_its_parent_stored() -> None:
    parent = Dedup(names_max=100)
    store(parent, 1, 2, 3)
    child = heir(parent.lineage(FULL_RING, LOWER), LOWER)
    assert child.last_sequence_id("p") == 3
    assert child.last_sequence_id("other") == -1
    for key_hash in (IN_LOWER, None):
        assert verdicts(child, 1, 3, key_hash=key_hash) == [DUPLICATE, DUPLICATE]
    assert child.needs_key("p", 3)
    assert not child.needs_key("p", 4)
    assert not child.needs_key("other", 0)
    store(child, 4)
    assert verdicts(child, 3, 4) == [DUPLICATE, DUPLICATE]
    assert child.decide("other", 1) is STORE


def test_of_two_parents_the_one_of_the_key_decides() -> None:
    child = heir(Lineage({"p": [Piece(LOWER, 9), Piece(UPPER, 5)]}))
    assert child.last_sequence_id("p") == 9
    store(child, 7, key_hash=IN_UPPER)
    assert verdicts(child, 8, 9, key_hash=IN_LOWER) == [DUPLICATE, DUPLICATE]
    assert child.decide("p", 7, key_hash=IN_UPPER) is DUPLICATE
    assert child.last_sequence_id("p") == 9
    grandchild = heir(child.lineage(FULL_RING, UPPER), UPPER)
    assert verdicts(grandchild, 7, 8, key_hash=IN_UPPER) == [DUPLICATE, STORE]


def test_without_a_key_nothing_is_guessed_nor_overtaken() -> None:
    child = heir(Lineage({"p": [Piece(LOWER, 9), Piece(UPPER, 5)]}))
    assert verdicts(child, 5, 7, 10, 8, 7) == [DUPLICATE, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN]
    assert child.decide("p", 9, key_hash=IN_LOWER) is DUPLICATE
    child.producer_joined("p")  # and does not send them again
    store(child, 10)
    assert heir(child.lineage(FULL_RING, FULL_RING)).last_sequence_id("p") == 10


def test_a_name_that_one_parent_never_saw() -> None:
    child = heir(Lineage({"p": [Piece(LOWER, 9)]}))
    assert child.decide("p", 4, key_hash=IN_LOWER) is DUPLICATE
    assert child.decide("p", 4) is UNKNOWN, "it may have been on its way to the other parent"
    child.producer_joined("p")
    assert child.decide("p", 4, key_hash=IN_UPPER) is STORE


def test_holes_are_inherited_and_filled_once() -> None:
    parent = Dedup(names_max=100)
    assert verdicts(parent, 1, 2, 3) == [STORE] * 3
    parent.persisted("p", 1)
    parent.failed("p", 2)
    parent.persisted("p", 3)
    child = heir(parent.lineage(FULL_RING, FULL_RING))
    assert child.last_sequence_id("p") == 1
    restored, _ = Dedup.restore(child.snapshot(START), 100, now=0)
    for each in (child, restored):
        assert verdicts(each, 1, 2, 2, 3) == [DUPLICATE, STORE, UNKNOWN, DUPLICATE]
        unfilled = each.lineage(FULL_RING, FULL_RING)
        assert unfilled["p"] == (Piece(FULL_RING, 3, (SequenceSpan(2, 2),)),)
        each.persisted("p", 2)
        assert each.last_sequence_id("p") == 3
        assert verdicts(each, 2, 3, 4) == [DUPLICATE, DUPLICATE, STORE]
        each.failed("p", 4)
        assert each.lineage(FULL_RING, FULL_RING)["p"] == (Piece(FULL_RING, 3),)


def test_an_inherited_name_that_nobody_uses_is_forgotten() -> None:
    lineage = Lineage({name: [Piece(FULL_RING, 1)] for name in "abp"})
    dedup = heir(lineage, now=10)
    dedup.producer_joined("a")
    store(dedup, 2)
    dedup.producer_joined("p")
    assert len(dedup) == 3
    assert dedup.forget_idle(19, idle=10) == []
    assert dedup.forget_idle(20, idle=10) == ["b"]
    dedup.producer_left("a", 20)
    dedup.inherit(lineage.clipped(FULL_RING), FULL_RING, 25)
    assert dedup.forget_idle(30, idle=10) == ["a"]
    assert dedup.decide("a", 1) is STORE


@given(lineages, st.integers(0, 60))
def test_a_snapshot_keeps_what_was_inherited(lineage: Lineage, sequence_id: int) -> None:
    dedup = heir(lineage)
    dedup.replay("own", sequence_id, now=0)
    restored, position = Dedup.restore(dedup.snapshot(START), 100, now=0)
    assert position == START
    assert restored.lineage(FULL_RING, LOWER) == dedup.lineage(FULL_RING, LOWER)
    assert sorted(restored.forget_idle(10, 10)) == sorted({*lineage, "own"})


@given(st.data())
def test_a_damaged_snapshot_is_refused(data: st.DataObject) -> None:
    whole = heir(Lineage({"p": [Piece(LOWER, 5, (SequenceSpan(2, 3),))]})).snapshot(START)
    with pytest.raises(CorruptMetadata):
        Dedup.restore(whole[: data.draw(st.integers(0, len(whole) - 1))], 100, now=0)
    with pytest.raises(CorruptMetadata):
        Dedup.restore(whole + b"x", 100, now=0)
    with pytest.raises(FormatTooNew):
        Dedup.restore(b"\x03" + whole[1:], 100, now=0)


# --- exactly once over splits and merges


class Message:
    def __init__(self, first: int, last: int, place: int, keyed: bool) -> None:
        self.span = (first, last)
        self.place = place
        """Where on the ring it belongs; only of a keyed one does the broker know."""
        self.key_hash = place if keyed else None


class Segment:
    def __init__(self, hash_range: HashRange, lineage: Lineage) -> None:
        self.hash_range = hash_range
        self.dedup = heir(Lineage.from_bytes(lineage.to_bytes()), hash_range)
        self.log: list[Message] = []
        self.in_flight: list[Message] = []
        self.connected = False
        self.snapshot = self.dedup.snapshot(Position(0, -1))

    def store_snapshot(self) -> None:
        self.snapshot = self.dedup.snapshot(Position(0, len(self.log) - 1))


class Topic:
    """One producer that sends each message again, in order, until it gets a receipt."""

    def __init__(self) -> None:
        self.segments = [Segment(FULL_RING, NO_LINEAGE)]
        self.stored: set[int] = set()
        self.owed: list[Message] = []
        self.refused: set[int] = set()
        self.next_sequence = 0

    def segment(self, place: int) -> Segment:
        return next(each for each in self.segments if place in each.hash_range)

    def send(self, place: int, size: int, keyed: bool) -> None:
        first, self.next_sequence = self.next_sequence, self.next_sequence + size
        message = Message(first, first + size - 1, place, keyed and size == 1)
        self.owed.append(message)
        segment = self.segment(place)
        if segment.connected:
            self.judge(segment, message)

    def judge(self, segment: Segment, message: Message) -> SendVerdict:
        first, last = message.span
        verdict = segment.dedup.decide("p", first, last, key_hash=message.key_hash)
        if verdict is STORE:
            segment.in_flight.append(message)
        elif verdict is DUPLICATE:
            assert first in self.stored, "a receipt for what is not stored"
            self.owed.remove(message)
        elif message not in segment.in_flight:
            self.refused.add(first)
        return verdict

    def settle(self, segment: Segment, succeeds: bool) -> None:
        if not segment.in_flight:
            return
        message = segment.in_flight.pop(0)
        first = message.span[0]
        if succeeds:
            assert first not in self.stored, "stored twice"
            self.stored.add(first)
            segment.log.append(message)
            segment.dedup.persisted("p", first)
            if segment.connected and message in self.owed:
                self.owed.remove(message)
        else:
            segment.dedup.failed("p", first)
            segment.connected = False
        segment.dedup.check_invariants()
        if not segment.in_flight and segment.dedup.has_holes:
            segment.store_snapshot()

    def connect(self, segment: Segment) -> None:
        if segment.connected or (segment.dedup.has_holes and segment.in_flight):
            return
        segment.connected = True
        segment.dedup.producer_joined("p")
        mine = [each for each in self.owed if each.place in segment.hash_range]
        # All of them are on their way before the first answer comes back.
        answers = [self.judge(segment, message) for message in mine]
        segment.connected = UNKNOWN not in answers

    def give_up(self, segment: Segment) -> None:
        """The producer tells its user that the outcome of its first message is not known."""
        mine = [each for each in self.owed if each.place in segment.hash_range]
        if mine and not segment.connected and mine[0].span[0] in self.refused:
            self.owed.remove(mine[0])

    def restart(self, segment: Segment) -> None:
        if segment.dedup.has_holes and segment.in_flight:
            return
        segment.in_flight.clear()
        segment.connected = False
        segment.dedup, behind = Dedup.restore(segment.snapshot, 10, now=0)
        for message in segment.log[behind.entry_id + 1 :]:
            segment.dedup.replay("p", *message.span, now=0)

    def seal(self, parents: list[Segment], ranges: list[HashRange], kept: int) -> None:
        for parent in parents:
            for _ in range(kept):
                self.settle(parent, True)
            while parent.in_flight:
                self.settle(parent, False)
        children = []
        for hash_range in ranges:
            lineage = NO_LINEAGE
            for parent in parents:
                own = parent.dedup.lineage(parent.hash_range, hash_range)
                lineage = lineage.merged(own)
            children.append(Segment(hash_range, lineage))
        at = self.segments.index(parents[0])
        self.segments[at : at + len(parents)] = children

    def split(self, segment: Segment, kept: int) -> None:
        if segment.hash_range.size > 1:
            lower, upper = segment.hash_range.split(segment.hash_range.midpoint)
            self.seal([segment], [lower, upper], kept)

    def merge(self, segment: Segment, kept: int) -> None:
        at = self.segments.index(segment)
        if at + 1 < len(self.segments):
            other = self.segments[at + 1]
            union = HashRange(segment.hash_range.start, other.hash_range.end)
            self.seal([segment, other], [union], kept)

    def step(self, what: str, place: int, number: int) -> None:
        segment = self.segment(place)
        if what in ("key", "plain", "batch"):
            self.send(place, 1 + (what == "batch") * number, what == "key")
        elif what in ("settle", "fail"):
            self.settle(segment, what == "settle")
        elif what == "cut":
            segment.connected = False
        elif what == "snapshot":
            segment.store_snapshot()
        elif what in ("split", "merge"):
            (self.split if what == "split" else self.merge)(segment, number)
        else:
            {"connect": self.connect, "give up": self.give_up, "restart": self.restart}[what](
                segment
            )

    def finish(self) -> None:
        for _ in range(3):
            for segment in self.segments:
                while segment.in_flight:
                    self.settle(segment, True)
                segment.connected = False
                self.connect(segment)


WEIGHTS = {
    "connect": 14,
    "settle": 14,
    "cut": 5,
    "fail": 4,
    "give up": 2,
    "merge": 4,
    "restart": 2,
    "snapshot": 3,
    "split": 4,
}
PLACES = (0, 0x3FFF, 0x4000, 0x7FFF, 0x8000, 0xFFFF)
SEEDS = range(300)


def live(seed: int, *sends: str) -> Topic:
    """One random life of a topic; a failure names its seed."""
    random, topic = Random(seed), Topic()
    weights = {**WEIGHTS, **{send: 24 // len(sends) for send in sends}}
    history = random.choices(list(weights), list(weights.values()), k=120)
    try:
        for what in history:
            topic.step(what, random.choice(PLACES), random.randrange(4))
        topic.finish()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return topic


@pytest.mark.slow
def test_keyed_messages_are_stored_exactly_once() -> None:
    for seed in SEEDS:
        topic = live(seed, "key")
        assert not topic.owed, seed
        assert topic.stored == set(range(topic.next_sequence)), seed


@pytest.mark.slow
def test_no_message_is_stored_twice_or_answered_without_being_stored() -> None:
    for seed in SEEDS:
        topic = live(seed, "key", "plain", "batch")
        for segment in topic.segments:
            mine = [each.span[0] for each in topic.owed if each.place in segment.hash_range]
            assert set(mine[:1]) <= topic.refused, f"seed {seed}: {mine[0]} was never answered"


def test_names_that_fall_together_are_merged() -> None:
    lineage = Lineage({"p-seg-0": [Piece(FULL_RING, 4)], "q": [Piece(FULL_RING, 1)]})
    renamed = lineage.renamed(lambda name: name.removesuffix("-seg-0"))
    assert dict(renamed) == {"p": (Piece(FULL_RING, 4),), "q": (Piece(FULL_RING, 1),)}
