"""The blocking client: the same names, for threads."""

import sys
from concurrent.futures import ThreadPoolExecutor

from magnetar import InitialPosition
from magnetar.blocking import Client, Producer

TOPIC = "topic://public/default/threads"


def send(producer: Producer[bytes], number: int) -> None:
    producer.send(b"%d" % number, key=str(number % 4))


def main(service_url: str) -> None:
    with Client(service_url) as client:
        with client.producer(TOPIC) as producer, ThreadPoolExecutor(8) as pool:
            for number in range(100):
                pool.submit(send, producer, number)

        with client.queue_consumer(
            TOPIC, "sub", initial_position=InitialPosition.EARLIEST
        ) as consumer:
            for count, message in enumerate(consumer, 1):
                consumer.ack(message)
                if count == 100:
                    break
            print(count, "messages")

        with client.producer(TOPIC) as producer, client.transaction() as txn:
            producer.send(b"all or nothing", txn=txn)


main(sys.argv[1] if len(sys.argv) > 1 else "pulsar://localhost:6650")
