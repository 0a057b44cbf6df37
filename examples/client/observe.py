"""Interceptors, metrics for Prometheus and traces of OpenTelemetry."""

import asyncio
import sys

from opentelemetry import trace
from prometheus_client import CollectorRegistry, generate_latest

from magnetar import Client, Draft, Interceptor
from magnetar.client.connection.open_telemetry import Tracing, context_of

TOPIC = "topic://public/default/observed"
tracer = trace.get_tracer("shop")


class Stamp(Interceptor):
    """Says in every message who sent it."""

    def sending(self, draft: Draft) -> None:
        draft.properties["sent-by"] = "billing"


async def main(service_url: str) -> None:
    async with Client(service_url, interceptors=[Stamp(), Tracing()]) as client:
        registry = CollectorRegistry()
        registry.register(client.metrics)

        async with (
            await client.queue_consumer(TOPIC, "sub") as consumer,
            await client.producer(TOPIC) as producer,
        ):
            await producer.send(b"order")
            message = await consumer.receive(timeout=10)
            with tracer.start_as_current_span("handle order", context=context_of(message)):
                print(message.properties["sent-by"], "sent", message.value)
            await consumer.ack(message)

        for line in generate_latest(registry).decode().splitlines():
            if line.startswith("magnetar_client_sent_messages_total"):
                print(line)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"))
