"""For the tutorial of pipelines: print settled orders as they are committed, ten of them."""

import sys

from magnetar import FROM_EARLIEST
from magnetar.blocking import Client

url = sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650"
with (
    Client(url) as client,
    client.checkpoint_consumer("topic://public/default/settled", start=FROM_EARLIEST) as consumer,
):
    for _ in range(10):
        message = consumer.receive(timeout=120)
        print(message.key, message.value.decode())
