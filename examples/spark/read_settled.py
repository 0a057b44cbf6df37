"""For the tutorial of pipelines: print ten settled orders; the next run goes on behind them."""

import sys

from magnetar import InitialPosition
from magnetar.blocking import Client
from magnetar.errors import DeadlineExceeded

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
        try:
            message = consumer.receive(timeout=120)
        except DeadlineExceeded:
            sys.exit("nothing came for 120 s: does the pipeline run, are there new orders?")
        print(message.key, message.value.decode())
        consumer.ack_cumulative(message)
