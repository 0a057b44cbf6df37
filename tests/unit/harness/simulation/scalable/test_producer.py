"""The producer and the layout watch of the test tools, against a broker that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from harness.simulation.scalable.history import Event, LayoutSeen
from harness.simulation.scalable.links import DagWatch, Links
from harness.simulation.scalable.producer import ScalableProducer
from magnetar.errors import DeadlineExceeded
from magnetar.model.segments import SegmentLayout
from magnetar.testing.virtual import virtual_time
from magnetar.testing.virtual.network import Network
from magnetar.wire.commands import NAMES, Side
from magnetar.wire.connection import Connection
from magnetar.wire.frames import command, frame_bytes_max
from magnetar.wire.messages import Received, Send, metadata_of
from magnetar.wire.pb import pulsar_pb2 as pb

TOPIC = "topic://public/default/x"
URL = "pulsar://broker:6650"
KEYS = [f"k{number}" for number in range(12)]

ONE = SegmentLayout.create(1, now_ms=0)
TWO = ONE.split(0, now_ms=1)
MERGED = TWO.merge((1, 2), now_ms=2)


def _topic(layout: SegmentLayout, segment_id: int) -> str:
    return f"segment://public/default/x/{layout.segments[segment_id].descriptor}"


class _Broker:
    """Stores what it gets, once per producer and sequence id, until a topic is terminated."""

    def __init__(self) -> None:
        self.layout = ONE
        self.stored: dict[str, list[tuple[str, int]]] = {}
        """Key and sequence id, by topic."""
        self.terminated: set[str] = set()
        self.answers = True
        """Whether it sends receipts now."""
        self.sessions: list[_Session] = []
        self._known: set[int] = set()

    def accept(self) -> _Session:
        self.sessions.append(_Session(self))
        return self.sessions[-1]

    def terminate(self, *topics: str) -> None:
        self.terminated.update(topics)
        for session in self.sessions:
            for number, topic in list(session.producers.items()):
                if topic in topics:
                    del session.producers[number]
                    session.write("CLOSE_PRODUCER", producer_id=number, request_id=0)

    def show(self, layout: SegmentLayout) -> None:
        self.layout = layout
        for session in self.sessions:
            session.show()

    def store(self, topic: str, send: Send) -> None:
        if send.sequence_id not in self._known:
            self._known.add(send.sequence_id)
            key = metadata_of(send.headers_and_payload).partition_key
            self.stored.setdefault(topic, []).append((key, send.sequence_id))

    @property
    def count(self) -> int:
        return len(self._known)


class _Session(asyncio.Protocol):
    def __init__(self, broker: _Broker) -> None:
        self.producers: dict[int, str] = {}
        self.held: list[tuple[int, int]] = []
        self._broker = broker
        self._watches: list[int] = []
        self._wire = Connection(frame_bytes_max(), side=Side.SERVER)
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._broker.sessions.remove(self)

    def write(self, name: str, **fields: object) -> None:
        if not self._transport.is_closing():
            self._transport.write(command(name, **fields))

    def data_received(self, data: bytes) -> None:
        for each in self._wire.receive(data):
            if isinstance(each, Send):
                self._send(each)
            elif isinstance(each, Received):
                getattr(self, f"on_{NAMES[each.type].lower()}")(each.body)

    def on_connect(self, body: Any) -> None:
        self._wire.open()
        self.write("CONNECTED", server_version="scripted", protocol_version=21)

    def on_ping(self, body: Any) -> None:
        self.write("PONG")

    def on_lookup(self, body: Any) -> None:
        connect = pb.CommandLookupTopicResponse.Connect
        self.write(
            "LOOKUP_RESPONSE", request_id=body.request_id, response=connect, brokerServiceUrl=URL
        )

    def on_scalable_topic_lookup(self, body: Any) -> None:
        self._watches.append(body.session_id)
        self.show()

    def on_scalable_topic_close(self, body: Any) -> None:
        self._watches.remove(body.session_id)

    def show(self) -> None:
        segments = [
            pb.SegmentInfoProto(
                segment_id=each.segment_id,
                hash_start=each.hash_range.start,
                hash_end=each.hash_range.end,
                state=each.state.value,
                parent_ids=each.parent_ids,
                child_ids=each.child_ids,
                created_at_epoch=each.created_at_epoch,
                created_at_ms=0,
            )
            for each in self._broker.layout.segments.values()
        ]
        dag = pb.ScalableTopicDAG(epoch=self._broker.layout.epoch, segments=segments)
        for number in self._watches:
            self.write(
                "SCALABLE_TOPIC_UPDATE", session_id=number, dag=dag, resolved_topic_name=TOPIC
            )

    def on_producer(self, body: Any) -> None:
        assert body.producer_name.startswith("p-seg-")
        if body.topic in self._broker.terminated:
            error = pb.ServerError.TopicTerminatedError
            self.write("ERROR", request_id=body.request_id, error=error, message="")
            return
        self.producers[body.producer_id] = body.topic
        self.write("PRODUCER_SUCCESS", request_id=body.request_id, producer_name=body.producer_name)

    def on_close_producer(self, body: Any) -> None:
        """What is in flight is settled first."""
        self.answer()
        self.producers.pop(body.producer_id, None)
        self.write("SUCCESS", request_id=body.request_id)

    def _send(self, send: Send) -> None:
        topic = self.producers.get(send.producer_id)
        if topic is None:
            error = pb.ServerError.TopicTerminatedError
            ids = {"producer_id": send.producer_id, "sequence_id": send.sequence_id}
            self.write("SEND_ERROR", error=error, message="", **ids)
            return
        self._broker.store(topic, send)
        self.held.append((send.producer_id, send.sequence_id))
        if self._broker.answers:
            self.answer()

    def answer(self) -> None:
        for producer_id, sequence_id in self.held:
            self.write("SEND_RECEIPT", producer_id=producer_id, sequence_id=sequence_id)
        self.held.clear()


class _World:
    def __init__(self, seed: int) -> None:
        self.broker = _Broker()
        self.network = Network(Random(seed), asyncio.get_running_loop().time)
        self.events: list[Event] = []

    async def links(self) -> Links:
        listener = await self.network.listen(self.broker.accept, "broker", 6650)
        await listener.start()
        return Links(URL, connect=self.network.connect)

    def check(self, count: int) -> None:
        """Everything is stored once, each key in order, a parent's before its children's."""
        assert self.broker.count == count
        for key in KEYS:
            sequences = [
                sequence
                for topic in sorted(self.broker.stored, key=lambda name: int(name.split("-")[-1]))
                for stored_key, sequence in self.broker.stored[topic]
                if stored_key == key
            ]
            assert sequences == sorted(sequences), key


async def _send(producer: ScalableProducer, messages: int, random: Random) -> None:
    for number in range(messages):
        await producer.send(KEYS[number % len(KEYS)], b"payload")
        if random.random() < 0.2:
            await asyncio.sleep(random.expovariate(300))


def _run(scene: Callable[[_World], Coroutine[Any, Any, None]], seed: int) -> None:
    async def whole() -> None:
        await scene(_World(seed))

    virtual_time.run(whole(), until=3600)


@pytest.mark.parametrize("seed", range(8))
def test_order_is_kept_over_a_split_and_a_merge(seed: int) -> None:
    async def scene(world: _World) -> None:
        random = Random(seed)
        async with (
            await world.links() as links,
            ScalableProducer(links, TOPIC, "p", window=50, record=world.events.append) as producer,
        ):
            sending = asyncio.create_task(_send(producer, 400, random))
            for layout, parents in (
                (TWO, [_topic(ONE, 0)]),
                (MERGED, [_topic(TWO, 1), _topic(TWO, 2)]),
            ):
                await asyncio.sleep(random.uniform(0.05, 0.3))
                world.broker.terminate(*parents)
                await asyncio.sleep(random.uniform(0, 0.2))
                world.broker.show(layout)
            await sending
            await producer.flush()
            assert producer.waiting == 0
            assert len(producer.stalls) == 400
        world.check(400)

    _run(scene, seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_layout_that_comes_first_waits_for_what_is_in_flight(seed: int) -> None:
    async def scene(world: _World) -> None:
        async with (
            await world.links() as links,
            ScalableProducer(links, TOPIC, "p") as producer,
        ):
            world.broker.answers = False
            await _send(producer, 60, Random(seed))
            await asyncio.sleep(1)
            assert world.broker.count == 60
            world.broker.show(TWO)
            await producer.flush()
            world.broker.answers = True
            assert set(world.broker.stored) == {_topic(ONE, 0)}
            await _send(producer, 60, Random(seed))
            await producer.flush()
            assert set(world.broker.stored) == {_topic(TWO, number) for number in (0, 1, 2)}
        world.check(120)

    _run(scene, seed)


@pytest.mark.parametrize("seed", range(6))
def test_what_has_no_receipt_is_sent_again_after_a_lost_connection(seed: int) -> None:
    async def scene(world: _World) -> None:
        random = Random(seed)
        async with (
            await world.links() as links,
            ScalableProducer(links, TOPIC, "p", window=50) as producer,
        ):
            sending = asyncio.create_task(_send(producer, 300, random))
            for _ in range(3):
                await asyncio.sleep(random.uniform(0.05, 0.2))
                for link in world.network.links:
                    link.cut()
            await sending
            await producer.flush()
        world.check(300)

    _run(scene, seed)


def test_a_silent_connection_is_given_up() -> None:
    async def scene(world: _World) -> None:
        async with (
            await world.links() as links,
            ScalableProducer(links, TOPIC, "p") as producer,
        ):
            await _send(producer, 20, Random(1))
            await producer.flush()
            world.network.links[0].fall_silent()
            await _send(producer, 20, Random(2))
            await producer.flush()
        world.check(40)

    _run(scene, 1)


def test_the_window_is_a_limit_with_a_deadline() -> None:
    async def scene(world: _World) -> None:
        async with await world.links() as links:
            producer = ScalableProducer(links, TOPIC, "p", window=5, stall_s=7)
            await producer.start()
            world.broker.terminate(_topic(ONE, 0))  # and no other layout ever comes
            began = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded, match="no receipt of 0 for 7 s"):
                await _send(producer, 6, Random(1))
            assert producer.waiting == 5
            assert asyncio.get_running_loop().time() - began < 8
            await producer.stop()

    _run(scene, 1)


def test_a_watch_does_not_go_back() -> None:
    async def scene(world: _World) -> None:
        async with (
            await world.links() as links,
            DagWatch(links, TOPIC, "w", record=world.events.append) as watch,
        ):
            assert (await watch.first()).epoch == 0
            for layout in (MERGED, TWO, MERGED):
                world.broker.show(layout)
                await asyncio.sleep(1)
            assert watch.layout is not None
            assert watch.layout.epoch == 2
            assert watch.changes.version == 2
            world.network.links[0].cut()
            await asyncio.sleep(1)
            world.broker.show(MERGED.split(3, now_ms=3))
            await asyncio.sleep(1)
            assert watch.layout.epoch == 3
        seen = [event for event in world.events if isinstance(event, LayoutSeen)]
        assert [event.epoch for event in seen] == [0, 2, 1, 2, 2, 3]
        assert {event.observer for event in seen} == {"watch w #1", "watch w #2"}

    _run(scene, 1)
