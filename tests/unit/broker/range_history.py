"""Random lives of a topic that is read by ranges, and a list of messages that says what is right.

Owns: `RangeHistory`. It sends batches, plainly and in transactions of both kinds, ends those, moves
the topic to another broker, trims, collects headers; and after each step compares what ranges
answer with what the list says. Ranges that were planned once are read again later: they have the
same messages, or are lost because some of them were trimmed.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import NamedTuple

from magnetar.broker.entries import EntryView
from magnetar.broker.publish.producer import Producer
from magnetar.broker.ranges import sizes
from magnetar.broker.ranges.read import read_page
from magnetar.broker.ranges.view import RangeView
from magnetar.broker.topic.topic import Topic
from magnetar.errors import RangeLost
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.model.ids import Position
from magnetar.model.isolation import ReadIsolation
from magnetar.model.ranges import ORIGIN, RangePosition
from magnetar.runtime.limits import Limits
from magnetar.txn.ids import is_metadata, metadata_id
from magnetar.wire.messages import Send, TxnId, TxnSend, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.broker.legacy_world import legacy_of
from tests.unit.broker.txn_world import Broker, TxnWorld, joined, quiet, text_of
from tests.unit.broker.world import EPOCH_MS, receipts

LIMITS = Limits(
    managed_ledger_ledger_entries=5,
    range_page_bytes=300,
    range_page_entries=4,
    range_scan_entries=6,
)
TXNS = 4
ACTIONS = (*("plain",) * 6, *("send",) * 8, *("commit", "abort") * 3, "move", "kill", "trim")

Message = tuple[str, int]
"""The text of its entry, and its index there."""


@dataclass
class Written:
    """An entry of the log."""

    position: Position
    text: str
    messages: int
    txn: TxnId | None
    is_marker: bool = False
    is_trimmed: bool = False

    @property
    def before(self) -> RangePosition:
        return RangePosition.before(self.position)

    @property
    def behind(self) -> RangePosition:
        return RangePosition.behind(self.position)


class Plan(NamedTuple):
    start: RangePosition
    end: RangePosition
    messages: list[Message]


@dataclass
class RangeHistory:
    world: TxnWorld
    rng: random.Random
    written: list[Written] = field(default_factory=list)
    opened: dict[TxnId, int] = field(default_factory=dict)
    """Undecided transactions, and how many entries there were before each one's first."""
    aborted: set[TxnId] = field(default_factory=set)
    plans: list[Plan] = field(default_factory=list)
    sequence: int = 0
    txns: int = 0

    async def live(self, count: int) -> None:
        """Do so many things, and look at everything after each."""
        self.broker: Broker = self.world.broker()
        await self._load()
        for _ in range(count):
            await self._step(self.rng.choice(ACTIONS))
            await quiet()
            await self._compare()
        await self.topic.close()

    # --- what happens

    async def _load(self) -> None:
        self.topic: Topic = await self.broker.topic()
        self.topic.policies = self.topic.policies.__class__(retention=Retention(0, 0))
        self.producer: Producer = await joined(self.topic)
        await quiet()

    async def _step(self, action: str) -> None:
        if action == "plain":
            await self._send(None)
        elif action == "send":
            await self._send(await self._txn())
        elif action in ("commit", "abort"):
            if self.opened:
                await self._end(self.rng.choice(list(self.opened)), commit=action == "commit")
        elif action == "trim":
            for ledger_id in await self.topic.trim():
                for each in self.written:
                    each.is_trimmed |= each.position.ledger_id == ledger_id
        else:
            if action == "move":
                await self.topic.close()
            else:
                self.broker.kill()
            self.broker = self.world.broker()
            await self._load()

    async def _txn(self) -> TxnId:
        if len(self.opened) < TXNS and (not self.opened or self.rng.random() < 0.5):
            self.txns += 1
            if self.rng.random() < 0.5:
                return TxnId(0, self.txns)  # a legacy one
            return await self.broker.begin(metadata_id(0, self.txns))
        return self.rng.choice(list(self.opened))

    async def _send(self, txn: TxnId | None) -> None:
        self.sequence += 1
        messages, text = self.rng.choice((1, 1, 2, 5)), f"m{self.sequence}"
        metadata = pb.MessageMetadata(
            producer_name="p", sequence_id=self.sequence, publish_time=EPOCH_MS + self.sequence
        )
        if messages > 1:
            metadata.num_messages_in_batch = messages
        if txn is None:
            self.producer.send(Send(1, self.sequence, messages, _entry(metadata, text)))
        else:
            metadata.txnid_most_bits, metadata.txnid_least_bits = txn
            self.opened.setdefault(txn, len(self.written))
            self.producer.send(TxnSend(1, self.sequence, messages, _entry(metadata, text), txn))
        (receipt,) = await receipts(self.producer, 1)
        assert receipt.error is None, receipt
        self.written.append(Written(receipt.position, text, messages, txn))

    async def _end(self, txn: TxnId, *, commit: bool) -> None:
        del self.opened[txn]
        if not commit:
            self.aborted.add(txn)
        if is_metadata(txn):
            await (self.broker.commit if commit else self.broker.abort)(txn)
            return
        await legacy_of(self.topic).end(txn, commit=commit, low_watermark=-1)
        marker = Written(self.topic.ledger.last_position(), "", 1, txn, is_marker=True)
        self.written.append(marker)

    # --- what is right

    def _stable(self) -> RangePosition:
        decided = self.written[: min(self.opened.values(), default=len(self.written))]
        return decided[-1].behind if decided else ORIGIN

    def _first(self) -> RangePosition:
        return max((each.behind for each in self.written if each.is_trimmed), default=ORIGIN)

    def _messages(
        self, start: RangePosition, end: RangePosition, *, committed: bool = True
    ) -> list[Message]:
        return [
            (each.text, index)
            for each in self.written
            if not each.is_marker and not (committed and each.txn in self.aborted)
            for index in range(each.messages)
            if start <= RangePosition(*each.position, index) < end
        ]

    def _any_position(self) -> RangePosition:
        if not self.written or self.rng.random() < 0.2:
            return ORIGIN
        each = self.rng.choice(self.written)
        inside = RangePosition(*each.position, self.rng.randrange(each.messages))
        return self.rng.choice((each.before, each.behind, inside))

    # --- comparing

    async def _compare(self) -> None:
        view = RangeView(self.topic, ReadIsolation.COMMITTED)
        first, stable = self._first(), self._stable()
        state = view.state()
        assert (state.first, state.stable) == (first, stable)
        assert await self._read(view, first, stable) == self._messages(first, stable)
        everything = RangeView(self.topic, ReadIsolation.UNCOMMITTED)
        tail = self.written[-1].behind if self.written else ORIGIN
        assert everything.stable() == tail
        assert await self._read(everything, first, tail) == self._messages(
            first, tail, committed=False
        )
        start, end = sorted((self._any_position(), self._any_position()))
        if end <= stable:
            self.plans.append(Plan(start, end, self._messages(start, end)))
        for plan in self.rng.sample(self.plans, min(3, len(self.plans))):
            await self._read_again(view, plan)

    async def _read_again(self, view: RangeView, plan: Plan) -> None:
        start, end, messages = plan
        if start < self._first():
            for work in (self._read, sizes.count):
                try:
                    await work(view, start, end)
                except RangeLost:
                    continue
                raise AssertionError(f"{start} is before {self._first()}, and nobody said so")
            return
        assert await self._read(view, start, end) == messages
        found = await sizes.count(view, start, end)
        assert (found.messages, found.is_exact) == (len(messages), True)
        assert view.has_more(end) == any(end < each.behind <= self._stable() for each in self._kept)
        await self._cut(view, plan)
        await self._pieces(view, plan)

    @property
    def _kept(self) -> list[Written]:
        return [each for each in self.written if not each.is_trimmed]

    async def _cut(self, view: RangeView, plan: Plan) -> None:
        start, end, messages = plan
        wanted, size = self.rng.randrange(0, 12), self.rng.choice((None, 1, 200))
        at, taken, used = start, 0, 0
        while True:
            limit = None if size is None else size - used
            found = await sizes.cut(
                view, at, end, LIMITS, messages_max=wanted - taken, bytes_max=limit
            )
            at, taken, used = found.position, taken + found.messages, used + found.bytes
            if not found.is_partial or (size is not None and used >= size):
                break
        assert start <= at <= end
        before = self._messages(start, at)
        assert len(before) == taken <= wanted
        assert before == messages[:taken]
        rest = self._messages(at, end)
        if size is None and rest:
            assert taken == wanted, "it could have gone further"
        elif wanted and messages:
            assert before, "one entry is always taken"
        if not rest and size is None:
            assert at == end, "what is behind is for nobody"

    async def _pieces(self, view: RangeView, plan: Plan) -> None:
        start, end, messages = plan
        count = self.rng.randrange(1, 5)
        cuts = sizes.pieces(view, start, end, count)
        assert len(cuts) < count or count == 1
        bounds = [start, *cuts, end]
        assert bounds == sorted(bounds)
        assert len({*cuts, start, end}) == len(cuts) + len({start, end})
        assert all(each.batch_index == 0 for each in cuts)
        read: list[Message] = []
        for piece in itertools.pairwise(bounds):
            read += await self._read(view, *piece)
        assert read == messages

    async def _read(
        self, view: RangeView, start: RangePosition, end: RangePosition
    ) -> list[Message]:
        found: list[Message] = []
        at = start
        while True:
            page = await read_page(view, at, end, LIMITS)
            assert len(page.entries) <= LIMITS.range_page_entries
            assert page.is_exhausted == (page.next == end)
            for entry in page.entries:
                found += _in_range(entry, start, end)
            assert page.is_exhausted or page.next > at, "a page is progress"
            at = page.next
            if page.is_exhausted:
                return found


def _entry(metadata: pb.MessageMetadata, text: str) -> bytes:
    return encode_entry(metadata, text.encode())


def _in_range(entry: Entry, start: RangePosition, end: RangePosition) -> list[Message]:
    text = text_of(entry.payload)
    return [
        (text, index)
        for index in range(EntryView.of(entry).num_messages)
        if start <= RangePosition(*entry.position, index) < end
    ]
