"""The traffic of a client, sent and received, for Prometheus.

Owns: `ProducerTraffic` and `ConsumerTraffic`, plain counts that senders and receivers add to;
`ClientMetrics`, which shows them when it is asked.

Invariants:
1. Counting takes no lock and no call per message beyond an addition.
2. At most `TOPICS_MAX` topics have counts of their own; the rest share those of `OTHERS`.
3. A count only grows, and outlives the producer or consumer that it came from.

A scrape from another thread may see a message counted and its bytes not yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

# Every topic is a time series at whoever scrapes.
TOPICS_MAX: Final = 1000
OTHERS: Final = "(others)"

_SENT: Final = (
    ("messages", "sent_messages", "messages that are stored"),
    ("bytes", "sent_bytes", "bytes of stored messages, before compression"),
    ("failures", "send_failures", "messages whose send failed"),
    ("seconds", "send_seconds", "seconds from handing a message in to its receipt, summed up"),
)
_RECEIVED: Final = (
    ("messages", "received_messages", "messages that the application received"),
    ("bytes", "received_bytes", "bytes of received messages, decompressed"),
    ("acknowledged", "acknowledgements", "acknowledgements; a cumulative one counts once"),
    ("nacked", "nacks", "messages that the application gave back"),
)


class ProducerTraffic:
    """The counts of what went to one topic."""

    __slots__ = ("bytes", "failures", "messages", "seconds")

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.failures = 0
        self.seconds = 0.0


class ConsumerTraffic:
    """The counts of what came from one topic through one subscription."""

    __slots__ = ("acknowledged", "bytes", "messages", "nacked")

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.acknowledged = 0
        self.nacked = 0


class ClientMetrics(Collector):
    """The counts of one client, as a collector of `prometheus_client`.

    prometheus_client.REGISTRY.register(client.metrics)
    """

    def __init__(
        self, connections: Callable[[], int], throttled: Callable[[], int] = lambda: 0
    ) -> None:
        self._connections = connections
        self._throttled = throttled
        self.reconnects = 0
        """Connections that were made anew after a loss."""
        self._sent: dict[str, ProducerTraffic] = {}
        self._received: dict[tuple[str, str], ConsumerTraffic] = {}

    def sent_to(self, topic: str) -> ProducerTraffic:
        """Where to count what goes to a topic."""
        if topic not in self._sent and len(self._sent) >= TOPICS_MAX:
            topic = OTHERS
        return self._sent.setdefault(topic, ProducerTraffic())

    def received_from(self, topic: str, subscription: str) -> ConsumerTraffic:
        """Where to count what comes from a topic through a subscription."""
        place = (topic, subscription)
        if place not in self._received and len(self._received) >= TOPICS_MAX:
            place = (OTHERS, OTHERS)
        return self._received.setdefault(place, ConsumerTraffic())

    def describe(self) -> Iterable[Metric]:
        """The families there are; registering asks for them."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        for field, name, doc in _SENT:
            family = CounterMetricFamily(f"magnetar_client_{name}", doc, labels=["topic"])
            # A copy: a scrape runs in another thread than the one that adds topics.
            for topic, sent in list(self._sent.items()):
                family.add_metric([topic], getattr(sent, field))
            yield family
        for field, name, doc in _RECEIVED:
            labels = ["topic", "subscription"]
            family = CounterMetricFamily(f"magnetar_client_{name}", doc, labels=labels)
            for place, received in list(self._received.items()):
                family.add_metric(place, getattr(received, field))
            yield family
        yield GaugeMetricFamily(
            "magnetar_client_connections", "connections that are open", value=self._connections()
        )
        yield GaugeMetricFamily(
            "magnetar_client_throttled_connections",
            "connections that a broker does not read because of a rate of publishing",
            value=self._throttled(),
        )
        yield CounterMetricFamily(
            "magnetar_client_reconnects",
            "connections that were made anew after a loss",
            value=self.reconnects,
        )
