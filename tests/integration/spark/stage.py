"""A server, topics that change, and a query that is run as Spark runs one, without a JVM.

Owns: `Talk`, a client of a server, and `Stage`, which has the server too and changes its topics;
`Query`, which calls the readers in the order in which Spark's micro-batch engine does, keeps its
log of offsets as text, and hands pickled readers to "tasks"; `check`, the exact set and the order
of each key.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import StructType

from magnetar.blocking import Client
from magnetar.client.blocking.loop_thread import LoopThread
from magnetar.model.hashing import key_hash, segment_hash
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.server.app import Server
from magnetar.spark import links
from magnetar.spark.data_source import MagnetarSource
from magnetar.spark.source.readers import BatchReader, StreamReader
from tests.unit.server.serving import LIMITS, serving

TOPIC: Final = "topic://public/default/orders"
REGULAR: Final = "persistent://public/default/orders"
KEYS: Final = 8
_SETTLE_MAX: Final = 30

R = TypeVar("R")

LoopThread().stop()  # the first loop of a process opens a pipe for signals that stays


class Row(NamedTuple):
    """What tests look at of a row."""

    key: str | None
    value: Any
    segment: int
    message_id: str
    published: datetime | None = None


class Talk:
    """A client of a server, what it sent, and queries that read it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = Client(url)
        self.sent: dict[str, list[bytes]] = defaultdict(list)
        """By key, in order."""
        self._count = 0

    def send(
        self, count: int, topic: str = TOPIC, *, keys: int = KEYS, one_by_one: bool = False
    ) -> None:
        """So many messages, their payloads are numbers, over the keys in turn."""
        with self.client.producer(topic) as producer:
            for number in range(self._count, self._count + count):
                key, value = f"k{number % keys}", b"%d" % number
                receipt = producer.submit(value, key=key)
                if one_by_one:
                    receipt.result(_SETTLE_MAX)
                self.sent[key].append(value)
            producer.flush()
        self._count += count

    def send_to(self, count: int, *, half: int, topic: str = TOPIC) -> None:
        """So many messages of one key, which is in that half of the ring."""
        keys = (f"h{number}" for number in itertools.count())
        key = next(each for each in keys if segment_hash(key_hash(each)) >> 15 == half)
        with self.client.producer(topic) as producer:
            for number in range(self._count, self._count + count):
                producer.submit(b"%d" % number, key=key)
                self.sent[key].append(b"%d" % number)
            producer.flush()
        self._count += count

    def send_in_transaction(self, count: int, *, commit: bool, topic: str = TOPIC) -> None:
        """Messages of one transaction, which is decided at once."""
        with self.open_transaction(count, topic=topic, is_kept=commit) as transaction:
            if commit:
                transaction.commit()
            else:
                transaction.abort()
        self.settle(topic)

    def settle(self, topic: str = TOPIC) -> None:
        """Until every segment knows how its transactions ended."""
        ranges = self.client.ranges(topic)
        layout = ranges.layout()
        numbers = [each.number for each in layout.segments]
        for _ in range(_SETTLE_MAX):
            decided = ranges.states(numbers)
            tails = ranges.states(numbers, isolation="uncommitted")
            behind = {
                n: state.stable for n, state in decided.items() if state.stable < tails[n].stable
            }
            if not behind:
                return
            ranges.news(behind, layout.epoch, 1000)
        raise AssertionError(f"transactions of {topic} are not decided")

    @contextmanager
    def open_transaction(self, count: int, *, topic: str = TOPIC, is_kept: bool) -> Iterator[Any]:
        """Messages of a transaction that is not decided; `is_kept`: it will be committed."""
        with self.client.producer(topic) as producer:
            transaction = self.client.transaction()
            for number in range(self._count, self._count + count):
                key, value = f"k{number % KEYS}", b"%d" % number
                producer.send(value, key=key, txn=transaction)
                if is_kept:
                    self.sent[key].append(value)
            self._count += count
            yield transaction

    def query(self, **options: str) -> Query:
        return Query(self, options)

    def from_earliest(self, **options: str) -> Query:
        """One that begins with the first message, and does not wait for more."""
        return self.query(**{"startingOffsets": "earliest", "pollWaitMs": "0"} | options)

    def batch(self, **options: str) -> list[Row]:
        """The rows of a batch read."""
        source = MagnetarSource(self._options(options))
        schema = source.schema()
        reader = source.reader(schema)
        assert isinstance(reader, BatchReader)
        partitions = pickle.loads(pickle.dumps(reader.partitions()))
        return [row for each in partitions for row in rows_of(_pickled(reader), each, schema)]

    def options(self, given: dict[str, str]) -> dict[str, str]:
        base = {"serviceUrl": self.url}
        if not {"topic", "topics", "topicsPattern"} & given.keys():
            base["topic"] = TOPIC
        return base | given

    def _options(self, given: dict[str, str]) -> Any:
        return self.options(given)

    def check(self, rows: list[Row]) -> None:
        """Exactly what was sent, each key in order."""
        check(rows, self.sent)


class Stage(Talk):
    """One server in a thread of this process."""

    def __init__(self, thread: LoopThread, server: Server) -> None:
        super().__init__(server.service_url)
        self._thread = thread
        self._server = server

    def do(self, work: Callable[[Server], Awaitable[R]]) -> R:
        """Something in the server's own loop."""
        return self._thread.wait(lambda: work(self._server))

    def split(self, segment: int, topic: str = TOPIC) -> None:
        name = TopicName.parse(topic)
        self.do(lambda server: server.context.scalable.split(name, segment))

    def merge(self, *segments: int, topic: str = TOPIC) -> None:
        name = TopicName.parse(topic)
        self.do(lambda server: server.context.scalable.merge(name, segments))

    def delete(self, topic: str = TOPIC) -> None:
        name = TopicName.parse(topic)
        if topic.startswith("topic://"):
            self.do(lambda server: server.context.scalable.delete(name, force=True))
        else:
            self.do(lambda server: server.context.topics.delete(name, force=True))

    def trim(self, topic: str) -> list[int]:
        """Drop what retention lets go; the ids of the ledgers."""
        name = TopicName.parse(topic)

        async def trimmed(server: Server) -> list[int]:
            found = await server.context.topics.get(name, create=False)
            return await found.trim()

        return self.do(trimmed)

    def send_until_trimmed(self, topic: str) -> int:
        """Send until the first messages are gone; how many were sent in all."""
        for _ in range(_SETTLE_MAX):
            self.send(6, topic, one_by_one=True)
            if self.trim(topic):
                return self._count
        raise AssertionError(f"nothing of {topic} is trimmed")

    def pin(self, topic: str = TOPIC) -> None:
        """A subscription without a reader: no segment is forgotten."""
        name = TopicName.parse(topic)
        self.do(lambda server: server.context.scalable.create_subscription(name, "pin", "QUEUE"))

    def unpin(self, topic: str = TOPIC) -> None:
        name = TopicName.parse(topic)
        self.do(lambda server: server.context.scalable.delete_subscription(name, "pin"))

    def until_pruned(self, segment: int, topic: str = TOPIC) -> None:
        """Until the server has forgotten a segment."""
        ranges = self.client.ranges(topic)
        for _ in range(_SETTLE_MAX):
            layout = ranges.layout()
            if segment not in {each.number for each in layout.segments}:
                return
            ranges.news({}, layout.epoch, 1000)
        raise AssertionError(f"segment {segment} of {topic} is still there")

    def backlog(self, subscription: str, topic: str = TOPIC) -> int:
        """Messages that a subscription has left, over all segments."""
        ranges = self.client.ranges(topic)
        found = 0
        for each in ranges.layout().segments:
            name = TopicName.parse(each.name)

            async def ask(server: Server, name: TopicName = name) -> int:
                loaded = await server.context.topics.get(name, create=False)
                return int(loaded.subscriptions[subscription].backlog())

            found += self.do(ask)
        return found

    def partitioned(self, topic: str, count: int) -> None:
        name = TopicName.parse(topic)
        self.do(lambda server: server.context.topics.create_partitioned(name, count))

    def grow(self, topic: str, count: int) -> None:
        name = TopicName.parse(topic)
        self.do(lambda server: server.context.topics.grow(name, count))


def check(rows: list[Row], sent: dict[str, list[bytes]]) -> None:
    found: dict[str, list[bytes]] = defaultdict(list)
    for row in rows:
        assert row.key is not None
        found[row.key].append(row.value)
    seen = sorted(value for values in found.values() for value in values)
    wanted = sorted(value for values in sent.values() for value in values)
    twice = sorted({value for value in seen if seen.count(value) > 1})
    missing = sorted(set(wanted) - set(seen))
    assert seen == wanted, f"twice: {twice}, missing: {missing}, {len(seen)} of {len(wanted)}"
    for key, values in found.items():
        assert values == sent[key], f"key {key} is out of order"


class Query:
    """A streaming query over its whole life, crashes included."""

    def __init__(self, stage: Talk, options: dict[str, str]) -> None:
        self.stage = stage
        self.options = options
        self.offsets: list[str] = []
        self.batches: list[list[Row]] = []
        self.segments: list[set[int]] = []
        """Which segments a batch read."""
        self._initial = ""
        self._is_committed = True
        self.restart()

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch]

    @property
    def times(self) -> list[list[datetime]]:
        """When the rows of each batch were published."""
        return [[row.published for row in batch if row.published] for batch in self.batches]

    def restart(self, *, available_now: bool = False, **options: str) -> None:
        """As if the driver had died: nothing is known but the log of offsets."""
        self.options |= options
        source = MagnetarSource(self.stage._options(self.options))
        self._schema = source.schema()
        source = _pickled(source)
        reader = source.streamReader(self._schema)
        assert isinstance(reader, StreamReader)
        self.reader: StreamReader = reader
        self._task_reader = _pickled(source.streamReader(self._schema))
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        self._initial = json.dumps(self.reader.initialOffset())
        if not self._is_committed:
            self.run_last()

    def plan(self, limit: ReadLimit | None = None) -> str:
        """The end of the next batch, as Spark would write it down."""
        start = json.loads(self.offsets[-1] if self.offsets else self._initial)
        chosen = limit or self.reader.getDefaultReadLimit()
        end = json.dumps(self.reader.latestOffset(start, chosen))
        self.reader.reportLatestOffset()
        return end

    def step(self, limit: ReadLimit | None = None, *, crash: str | None = None) -> bool:
        """One batch; False: there is nothing new. `crash`: before-wal, after-wal, in-commit."""
        end = self.plan(limit)
        if end == (self.offsets[-1] if self.offsets else self._initial):
            return False
        if crash == "before-wal":
            self.restart()
            return True
        self.offsets.append(end)
        self._is_committed = False
        if crash == "after-wal":
            self.restart()
            return True
        if len(self.offsets) > 1:
            self.reader.commit(json.loads(self.offsets[-2]))
        if crash == "in-commit":
            self.restart()
            return True
        self.run_last()
        return True

    def run_last(self) -> None:
        """Read the last batch of the log: the first time, or again."""
        is_first = len(self.offsets) == 1
        start = self._initial if is_first else self.offsets[-2]
        end = self.offsets[-1]
        partitions = self.reader.partitions(json.loads(start), json.loads(end))
        self.num_tasks = len(partitions)
        rows: list[Row] = []
        for partition in partitions:
            told = pickle.loads(pickle.dumps(partition))
            rows += rows_of(self._task_reader, told, self._schema)
        if not self._is_committed:
            self.batches.append(rows)
            self.segments.append({row.segment for row in rows})
        self._is_committed = True
        self._last = rows

    def replay(self) -> None:
        """The last batch once more, by a new driver: it must have the same rows."""
        before = self._last
        self.restart()
        self.run_last()
        assert sorted(self._last) == sorted(before)

    def drain(self, batches: int = 100) -> None:
        """Until there is nothing new."""
        for _ in range(batches):
            if not self.step():
                return
        raise AssertionError(f"no end after {batches} batches")

    def check(self) -> None:
        self.stage.check(self.rows)


ALL: Final = ReadAllAvailable()


def rows_of(reader: Any, partition: Any, schema: StructType) -> list[Row]:
    wanted = to_arrow_schema(schema, timezone="UTC")
    found: list[Row] = []
    for batch in reader.read(partition):
        assert isinstance(batch, pa.RecordBatch)
        assert batch.schema.equals(wanted), f"{batch.schema} is not {wanted}"
        columns = batch.to_pydict()
        empty = [None] * batch.num_rows
        found += [
            Row(*each)
            for each in zip(
                columns.get("key", empty),
                columns.get("value", empty),
                columns.get("segment", empty),
                columns.get("messageId", empty),
                columns.get("publishTime", empty),
                strict=True,
            )
        ]
    return found


def _pickled(given: Any) -> Any:
    return pickle.loads(pickle.dumps(given))


@contextmanager
def stage(folder: Path, limits: Limits = LIMITS) -> Iterator[Stage]:
    thread = LoopThread()
    try:
        context = serving(folder, limits=limits, scalable_retention_minutes=0)
        server = thread.wait(context.__aenter__)
        try:
            made = Stage(thread, server)
            try:
                yield made
            finally:
                links.close_all()
                made.client.close()
        finally:
            thread.wait(lambda: context.__aexit__(None, None, None))
    finally:
        thread.stop()
