"""A topic that splits, merges and forgets, and a query that plans its batches over it.

Owns: `World`, a model of a scalable topic, with transactions that are undecided for a while;
`Query`, which does with the rules of `magnetar.spark.source.plan` what the source does, restarts
included; `play`, a whole history, and `trouble`, what is wrong after it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from magnetar.model.ranges import ORIGIN, RangeLayout, RangePosition, RangeSegment, RangeState
from magnetar.spark.source import plan
from magnetar.spark.source.offsets import Offset, TopicOffset, base_of, format_offset, parse_offset
from magnetar.spark.source.plan import Frozen, TopicView

TOPIC: Final = "topic://public/default/x"
KEYS: Final = 8


class Sent(NamedTuple):
    """One message."""

    key: int
    number: int


@dataclass
class Segment:
    """Of the model: its messages, by entry."""

    number: int
    first_key: int
    end_key: int
    parents: tuple[int, ...] = ()
    messages: list[Sent] = field(default_factory=list)
    is_sealed: bool = False
    undecided: int = 0
    """So many of its last messages cannot be read yet."""

    @property
    def stable(self) -> RangePosition:
        return RangePosition(0, len(self.messages) - self.undecided)


class World:
    """One topic."""

    def __init__(self) -> None:
        self.segments = {0: Segment(0, 0, KEYS)}
        self.pruned: set[int] = set()
        self.epoch = 0
        self.sent: list[Sent] = []

    @property
    def active(self) -> list[Segment]:
        found = [each for each in self.segments.values() if not each.is_sealed]
        return sorted(found, key=lambda each: each.first_key)

    def publish(self, key: int, count: int) -> None:
        (owner,) = (each for each in self.active if each.first_key <= key < each.end_key)
        for _ in range(count):
            message = Sent(key, len(self.sent))
            self.sent.append(message)
            owner.messages.append(message)

    def leave_undecided(self, which: int, count: int) -> None:
        segment = self.active[which % len(self.active)]
        segment.undecided = max(segment.undecided, min(count, len(segment.messages)))

    def decide(self) -> None:
        for each in self.segments.values():
            each.undecided = 0

    def split(self, which: int) -> None:
        segment = self.active[which % len(self.active)]
        middle = (segment.first_key + segment.end_key) // 2
        if middle > segment.first_key:
            bounds = ((segment.first_key, middle), (middle, segment.end_key))
            self._replace([segment], bounds)

    def merge(self, which: int) -> None:
        if len(self.active) > 1:
            at = which % (len(self.active) - 1)
            left, right = self.active[at : at + 2]
            self._replace([left, right], ((left.first_key, right.end_key),))

    def _replace(self, old: Sequence[Segment], bounds: Sequence[tuple[int, int]]) -> None:
        self.epoch += 1
        for each in old:
            each.is_sealed = True
        number = max(self.segments.keys() | self.pruned)
        for low, high in bounds:
            number += 1
            parents = tuple(each.number for each in old)
            self.segments[number] = Segment(number, low, high, parents)

    def prune(self, drained: set[int]) -> None:
        """Forget sealed segments that the query has drained."""
        for number in sorted(drained & self.segments.keys()):
            if set(self.segments[number].parents) & self.segments.keys():
                continue  # brokers delete no segment before its parents
            del self.segments[number]
            self.pruned.add(number)
            self.epoch += 1

    def _living(self, parents: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(each for each in parents if each in self.segments)

    def view(self, place: TopicOffset | None) -> TopicView:
        segments = tuple(
            RangeSegment(each.number, "", self._living(each.parents), (), each.is_sealed)
            for each in self.segments.values()
        )
        layout = RangeLayout(TOPIC, "id", self.epoch, segments)
        states = {
            number: RangeState(
                ORIGIN,
                self.segments[number].stable,
                self.segments[number].is_sealed and not self.segments[number].undecided,
            )
            for number in plan.wanted(place, layout)
        }
        return TopicView(layout, states)

    def is_ancestor(self, old: int, young: int, parents: dict[int, tuple[int, ...]]) -> bool:
        return any(old == p or self.is_ancestor(old, p, parents) for p in parents.get(young, ()))


class Query:
    """Batches over a world, with a log of offsets as Spark keeps it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.offsets: list[str] = []
        self.batches: list[list[Sent]] = []
        self.mixed: list[tuple[int, int]] = []
        self.losses: list[str] = []
        self._parents: dict[int, tuple[int, ...]] = {}

    @property
    def place(self) -> TopicOffset | None:
        return parse_offset(json.loads(self.offsets[-1])).topics[TOPIC] if self.offsets else None

    def drained(self) -> set[int]:
        place = self.place
        segments = {} if place is None else place.segments
        return {number for number, position in segments.items() if position is None}

    def step(self, limit: int, frozen: Frozen | None = None) -> bool:
        """Plan a batch and read it; False: there was nothing."""
        self._parents |= {each.number: each.parents for each in self.world.segments.values()}
        known = self.place
        view = self.world.view(known)
        base = plan.earliest(view) if known is None else None
        place = known or base
        assert place is not None
        checked = plan.check(TOPIC, place, view)
        self.losses += checked.losses
        ends = {
            number: min(end, _further(checked.place.segments[number], limit))
            for number, end in plan.targets(checked.place, view, frozen).items()
        }
        end = plan.after(checked.place, view, ends, frozen)
        if known is not None and not plan.is_news(known, end):
            return False
        whole = Offset({TOPIC: end})
        text = json.dumps(format_offset(whole, None if base is None else Offset({TOPIC: base})))
        assert not self.offsets or text != self.offsets[-1]
        start = parse_offset(json.loads(self.offsets[-1])) if known else base_of(json.loads(text))
        self.offsets.append(text)
        self._read(start, parse_offset(json.loads(text)))
        return True

    def replay(self) -> None:
        """A crash after the last offset was written: the same batch is read again."""
        if not self.offsets:
            return
        read = self.batches.pop()
        end = json.loads(self.offsets[-1])
        before = base_of(end) if len(self.offsets) == 1 else None
        self._read(before or parse_offset(json.loads(self.offsets[-2])), parse_offset(end))
        assert self.batches[-1] == read

    def _read(self, start: Offset, end: Offset) -> None:
        found: list[Sent] = []
        numbers: list[int] = []
        for span in plan.spans(start, end):
            segment = self.world.segments.get(span.number)
            if segment is None:
                continue  # pruned after it was drained: only a replay comes here
            stop = len(segment.messages) if span.end is None else span.end.entry
            found += segment.messages[span.start.entry : stop]
            numbers.append(span.number)
        is_ancestor = self.world.is_ancestor
        self.mixed += [(a, b) for a in numbers for b in numbers if is_ancestor(a, b, self._parents)]
        self.batches.append(found)

    def run_available_now(self) -> None:
        """A run up to what there is now, while more is sent and the topic changes."""
        frozen = plan.freeze(self.world.view(None))
        sealed = {number for number, each in self.world.segments.items() if each.is_sealed}
        rounds = 10 + sum(len(each.messages) for each in self.world.segments.values())
        for number in range(rounds + len(self.world.segments)):
            if not self.step(3, frozen):
                break
            self.world.publish(number % KEYS, 1)
            if number < 3:
                self.world.split(number)
        else:
            raise AssertionError("a run on what is there now has no end")
        for number in sealed - self.world.pruned:
            has_all = number in self.drained() or self.world.segments[number].undecided
            assert has_all or not self._is_open(number), f"{number} was not read to its end"

    def _is_open(self, number: int) -> bool:
        return all(p in self.drained() for p in self._parents[number] if p in self.world.segments)


def _further(position: RangePosition | None, limit: int) -> RangePosition:
    assert position is not None
    return RangePosition(position.ledger, position.entry + limit)


Action = tuple[str, int, int]
ACTIONS: Final = (
    "publish",
    "publish",
    "publish",
    "split",
    "merge",
    "undecided",
    "decide",
    "step",
    "step",
    "replay",
    "prune",
    "available",
)


def play(actions: Sequence[Action]) -> tuple[World, Query]:
    """A history, and then batches until there is nothing more."""
    world = World()
    query = Query(world)
    for name, which, count in actions:
        if name == "publish":
            world.publish(which % KEYS, count)
        elif name == "split":
            world.split(which)
        elif name == "merge":
            world.merge(which)
        elif name == "undecided":
            world.leave_undecided(which, count)
        elif name == "decide":
            world.decide()
        elif name == "step":
            query.step(count)
        elif name == "replay":
            query.replay()
        elif name == "prune":
            world.prune(query.drained())
        else:
            query.run_available_now()
    world.decide()
    for _ in range(10 + len(world.sent) + 2 * len(world.segments)):
        if not query.step(1000):
            return world, query
    raise AssertionError("the query has no end")


def trouble(world: World, query: Query) -> list[str]:
    """What is wrong after a history: nothing, if the rules hold."""
    found: list[str] = []
    read = [message for batch in query.batches for message in batch]
    if sorted(read) != sorted(world.sent):
        found.append(f"{len(read)} messages read, {len(world.sent)} sent")
    by_key: dict[int, list[int]] = defaultdict(list)
    for message in read:
        by_key[message.key].append(message.number)
    found += [f"key {key} is out of order" for key, seen in by_key.items() if seen != sorted(seen)]
    found += [f"a batch has {a} and its descendant {b}" for a, b in query.mixed]
    return found + query.losses
