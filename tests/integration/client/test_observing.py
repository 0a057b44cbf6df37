"""Interceptors, metrics and traces of the client, with a real broker on virtual time."""

from __future__ import annotations

import asyncio
import re
from random import Random
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from prometheus_client import CollectorRegistry

from magnetar.client.connection import metrics as client_metrics
from magnetar.client.connection.metrics import ClientMetrics
from magnetar.client.connection.open_telemetry import Tracing, context_of
from magnetar.client.message.interceptors import Draft, Interceptor
from magnetar.client.message.message import AnyMessageId, Message
from magnetar.errors import AlreadyClosed, NotAllowed, SendTimedOut
from magnetar.model.subscriptions import InitialPosition
from tests.integration.client.stage import new_client, play
from tests.integration.client.test_producing_in_trouble import cut_links
from tests.integration.server.scalable_stage import NAME, Stage
from tests.meta.tree import ROOT

SUBSCRIPTION = "sub"


class Notes(Interceptor):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def sending(self, draft: Draft) -> None:
        self.seen.append(("sending", draft.data))

    def sent(self, draft: Draft, message_id: AnyMessageId) -> None:
        self.seen.append(("sent", draft.data))

    def not_sent(self, draft: Draft, error: BaseException) -> None:
        self.seen.append(("not sent", type(error)))

    def received(self, message: Message[Any], subscription: str) -> None:
        self.seen.append(("received", message.data))

    def acknowledged(
        self, message: Message[Any] | AnyMessageId, subscription: str, *, is_cumulative: bool
    ) -> None:
        self.seen.append(("acknowledged", is_cumulative))

    def nacked(self, message: Message[Any], subscription: str) -> None:
        self.seen.append(("nacked", message.data))


class Stamp(Interceptor):
    def sending(self, draft: Draft) -> None:
        draft.properties["stamp"] = "yes"
        draft.key = "other"
        draft.data = (draft.data or b"") + b"!"


class Broken(Interceptor):
    """Fails wherever it only observes."""

    def sent(self, draft: Draft, message_id: AnyMessageId) -> None:
        raise RuntimeError("sent")

    def received(self, message: Message[Any], subscription: str) -> None:
        raise RuntimeError("received")


class Refusing(Interceptor):
    def sending(self, draft: Draft) -> None:
        raise NotAllowed("not today")


def test_interceptors_see_the_whole_life_of_a_message() -> None:
    notes = Notes()

    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage, interceptors=[notes]) as client:
            consumer = await client.queue_consumer(NAME, SUBSCRIPTION)
            producer = await client.producer(NAME)
            await producer.send(b"a")
            message = await consumer.receive()
            consumer.nack(message)
            await consumer.ack(await consumer.receive())
            stream = await client.stream_consumer(
                NAME, "stream", initial_position=InitialPosition.EARLIEST
            )
            await stream.ack_cumulative(await stream.receive())

    play(story)
    assert notes.seen == [
        *(("sending", b"a"), ("sent", b"a")),
        *(("received", b"a"), ("nacked", b"a")),
        *(("received", b"a"), ("acknowledged", False)),
        *(("received", b"a"), ("acknowledged", True)),
    ]


def test_an_interceptor_may_change_what_is_sent() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage, interceptors=[Stamp()]) as client:
            consumer = await client.queue_consumer(NAME, SUBSCRIPTION)
            producer = await client.producer(NAME)
            given = {"mine": "1"}
            await producer.send(b"a", key="k", properties=given)
            message = await consumer.receive()
            assert (message.data, message.key) == (b"a!", "other")
            assert message.properties == {"mine": "1", "stamp": "yes"}
            assert given == {"mine": "1"}

    play(story)


def test_what_observes_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()

    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage, interceptors=[Broken(), notes]) as client:
            consumer = await client.queue_consumer(NAME, SUBSCRIPTION)
            producer = await client.producer(NAME)
            await producer.send(b"a")
            await consumer.ack(await consumer.receive())

    play(story)
    assert [kind for kind, _ in notes.seen] == ["sending", "sent", "received", "acknowledged"]
    assert sum("interceptor-failed" in each.message for each in caplog.records) == 2


def test_a_refused_message_is_not_sent_and_everybody_before_is_told() -> None:
    first, last = Notes(), Notes()

    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage, interceptors=[first, Refusing(), last]) as client:
            producer = await client.producer(NAME)
            with pytest.raises(NotAllowed, match="not today"):
                await producer.send(b"a")
            assert producer.pending == 0

    play(story)
    assert first.seen == [("sending", b"a"), ("not sent", NotAllowed)]
    assert last.seen == []


def test_every_draft_is_sent_or_not_sent_once() -> None:
    notes = Notes()

    async def story(stage: Stage) -> None:
        await stage.create(1)
        client = new_client(stage, interceptors=[notes])
        producer = await client.producer(NAME, max_pending=1, send_timeout=60.0)
        receipt = await producer.submit(b"stored")
        waits = asyncio.create_task(producer.submit(b"no room"))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        await receipt
        await client.close()
        with pytest.raises(AlreadyClosed):
            await producer.submit(b"too late")

    play(story)
    assert sorted(notes.seen, key=str) == sorted(
        [
            *(("sending", each) for each in (b"stored", b"no room", b"too late")),
            ("sent", b"stored"),
            ("not sent", asyncio.CancelledError),
            ("not sent", AlreadyClosed),
        ],
        key=str,
    )


# --- metrics


def test_metrics_count_what_was_sent_and_received() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            registry = CollectorRegistry()
            registry.register(client.metrics)
            consumer = await client.queue_consumer(NAME, SUBSCRIPTION)
            producer = await client.producer(NAME)
            for number in range(10):
                await producer.submit(b"four", key=str(number))
            await producer.flush()
            messages = [await consumer.receive() for _ in range(10)]
            consumer.nack(messages.pop())
            await consumer.ack_many(messages)

            def value(name: str, **labels: str) -> float:
                found = registry.get_sample_value(f"magnetar_client_{name}", labels)
                assert found is not None, name
                return found

            to, through = {"topic": NAME}, {"topic": NAME, "subscription": SUBSCRIPTION}
            assert value("sent_messages_total", **to) == 10
            assert value("sent_bytes_total", **to) == 10 * (4 + 1)
            assert value("send_failures_total", **to) == 0
            assert value("send_seconds_total", **to) > 0
            assert value("received_messages_total", **through) == 10
            assert value("received_bytes_total", **through) == 40
            assert value("acknowledgements_total", **through) == 9
            assert value("nacks_total", **through) == 1
            assert value("connections") >= 1
            assert value("reconnects_total") == 0

    play(story)


def test_metrics_count_failures_and_reconnects() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            producer = await client.producer(NAME, send_timeout=5.0)
            before = client.metrics.reconnects
            await cut_links(stage, Random(1))
            await producer.send(b"again")
            assert client.metrics.reconnects > before
            await stage.host.kill()
            with pytest.raises(SendTimedOut):
                await producer.send(b"never")
            assert client.metrics.sent_to(NAME).failures == 1
            assert await stage.host.start()

    play(story, disk=True)


def test_the_page_lists_every_metric() -> None:
    page = (ROOT / "docs" / "client" / "observe.md").read_text("utf-8")
    listed = re.findall(r"^\| `(magnetar_client_\w+)` \| ([\w, ]*) ?\|", page, re.MULTILINE)
    metrics = ClientMetrics(lambda: 0)
    metrics.sent_to("t"), metrics.received_from("t", "s")
    found = [
        (f"{each.name}_total" if each.type == "counter" else each.name, sample.labels)
        for each in metrics.collect()
        for sample in each.samples
    ]
    assert [(name, ", ".join(labels)) for name, labels in found] == [
        (name, labels.strip()) for name, labels in listed
    ]


def test_topics_beyond_the_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_metrics, "TOPICS_MAX", 2)
    metrics = ClientMetrics(lambda: 0)
    own = [metrics.sent_to(topic) for topic in "ab"]
    assert metrics.sent_to("c") is metrics.sent_to("d") is metrics.sent_to(client_metrics.OTHERS)
    assert [metrics.sent_to(topic) for topic in "ab"] == own


# --- traces


def test_a_trace_goes_from_the_producer_to_the_consumer() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage, interceptors=[Tracing(provider)]) as client:
            consumer = await client.queue_consumer(NAME, SUBSCRIPTION)
            producer = await client.producer(NAME)
            sent_id = await producer.send(b"four")
            message = await consumer.receive()
            consumer.ack(message)
            (sending, receiving) = exporter.get_finished_spans()
            assert (sending.kind, receiving.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
            assert sending.context is not None
            assert receiving.parent is not None
            assert receiving.parent.span_id == sending.context.span_id
            assert get_current_span(context_of(message)).get_span_context().trace_id == (
                sending.context.trace_id
            )
            assert sending.attributes is not None
            assert receiving.attributes is not None
            assert sending.attributes["messaging.message.id"] == str(sent_id)
            assert sending.attributes["messaging.message.body.size"] == 4
            assert receiving.attributes["messaging.destination.subscription.name"] == SUBSCRIPTION
        with pytest.raises(AlreadyClosed):
            await producer.send(b"late")
        (failed,) = exporter.get_finished_spans()[2:]
        assert failed.status.status_code is StatusCode.ERROR

    play(story)
