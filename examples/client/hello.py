"""Hello: send two messages to a scalable topic and read them back."""

import sys

from magnetar import InitialPosition
from magnetar.blocking import Client

TOPIC = "topic://public/default/greetings"

with Client(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650") as client:
    with client.producer(TOPIC) as producer:
        producer.send(b"hello", key="en")  # back when it is on disk
        producer.send(b"world", key="en")
    earliest = InitialPosition.EARLIEST
    with client.stream_consumer(TOPIC, "mine", initial_position=earliest) as consumer:
        for _ in range(2):
            message = consumer.receive(timeout=10)
            print(message.key, message.value.decode())
            consumer.ack_cumulative(message)
