"""For the tutorial of pipelines: print ten settled orders; the next run goes on behind them."""

import sys

from magnetar import InitialPosition
from magnetar.blocking import Client

url = sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"
with (
    Client(url) as client,
    client.stream_consumer(
        "topic://public/default/settled",
        "read-settled",
        initial_position=InitialPosition.EARLIEST,
    ) as consumer,
):
    for _ in range(10):
        message = consumer.receive(timeout=120)
        print(message.key, message.value.decode())
        consumer.ack_cumulative(message)
