"""Traces of OpenTelemetry over messages: from the producer through the topic to the consumer.

Owns: `Tracing`, an interceptor. A send is a span from handing the message in to its receipt, whose
context travels in the message's properties (`traceparent`, or what the application's propagator
writes); a receive is a span below it. `context_of` is for the spans of the application's own work.

Needs `magnetar[otel]`; exporters and samplers are the application's, as OpenTelemetry has it.

Invariant: a span that was started is ended, whatever becomes of its message.
"""

from __future__ import annotations

from typing import Any, Final

from opentelemetry import context, propagate, trace

from magnetar.client.message.interceptors import Draft, Interceptor
from magnetar.client.message.message import AnyMessageId, Message

_SYSTEM: Final = ("messaging.system", "pulsar")


class Tracing(Interceptor):
    """Makes spans of the messages of a client.

    client = Client("pulsar://localhost:6650", interceptors=[Tracing()])
    """

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        """Make spans with this provider, or with the global one of OpenTelemetry."""
        self._tracer = trace.get_tracer("magnetar.client", tracer_provider=provider)
        self._sending: dict[Draft, trace.Span] = {}

    def sending(self, draft: Draft) -> None:
        span = self._tracer.start_span(
            f"send {draft.topic}",
            kind=trace.SpanKind.PRODUCER,
            attributes=_attributes(draft.topic, "send", len(draft.data or b"")),
        )
        # By the draft itself, which is compared by identity: `sent` or `not_sent` comes for it
        # exactly once.
        self._sending[draft] = span
        propagate.inject(draft.properties, trace.set_span_in_context(span))

    def sent(self, draft: Draft, message_id: AnyMessageId) -> None:
        span = self._sending.pop(draft)
        span.set_attribute("messaging.message.id", str(message_id))
        span.end()

    def not_sent(self, draft: Draft, error: BaseException) -> None:
        span = self._sending.pop(draft)
        span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(trace.StatusCode.ERROR, str(error))
        span.end()

    def received(self, message: Message[Any], subscription: str) -> None:
        attributes = _attributes(message.topic, "receive", len(message.data))
        attributes["messaging.destination.subscription.name"] = subscription
        attributes["messaging.message.id"] = str(message.id)
        # Ended at once: how long the application works on the message is a span of its own.
        self._tracer.start_span(
            f"receive {message.topic}",
            context=context_of(message),
            kind=trace.SpanKind.CONSUMER,
            attributes=attributes,
        ).end()


def context_of(message: Message[Any]) -> context.Context:
    """The trace that a message belongs to.

    with tracer.start_as_current_span("handle order", context=context_of(message)):
        ...
    """
    return propagate.extract(message.properties)


def _attributes(topic: str, operation: str, size: int) -> dict[str, str | int]:
    return {
        _SYSTEM[0]: _SYSTEM[1],
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
        "messaging.message.body.size": size,
    }
