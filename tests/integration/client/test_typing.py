"""Types tell: right use passes mypy, and each wrong use is found on its line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.limits import PATIENCE_S
from tests.meta.tree import ROOT

PROGRAM = """
from dataclasses import dataclass

import magnetar
from magnetar import Client, JsonSchema, STRING, blocking


@dataclass
class Order:
    number: int


async def right(client: Client) -> None:
    orders = await client.producer("orders", schema=JsonSchema(Order), batch_messages=5)
    await orders.send(Order(1), key="k")
    plain = await client.producer("plain")
    await plain.send(b"x", key=b"k", event_time=5)
    queue = await client.queue_consumer("orders", "sub", schema=JsonSchema(Order))
    message = await queue.receive(timeout=1)
    number: int = message.value.number
    queue.ack(message)
    await queue.ack(message)
    async for each in queue:
        queue.nack(each)
    async with client.transaction(timeout=number) as txn:
        await orders.send(Order(2), txn=txn)
        queue.ack(message, txn=txn)
    texts = await client.reader("notes", schema=STRING)
    text: str = (await texts.receive()).value
    print(text)


def right_threads(client: blocking.Client) -> None:
    with client.producer("orders", schema=JsonSchema(Order)) as orders, client.transaction() as txn:
        orders.send(Order(1), txn=txn)
    for message in client.consumer("plain", "sub"):
        value: bytes = message.value
        print(value)


async def wrong(client: Client, threads: blocking.Client) -> None:
    Client("pulsar://x", timeout=5)  # wrong
    await client.producer("t", batchsize=3)  # wrong
    await client.producer(5)  # wrong
    orders = await client.producer("orders", schema=JsonSchema(Order))
    await orders.send(b"bytes")  # wrong
    await orders.send(Order(1), key=5)  # wrong
    await orders.send(Order(1), txn="txn")  # wrong
    orders.send(Order(1))  # wrong
    await client.queue_consumer("t")  # wrong
    await client.stream_consumer("t", "sub", dead_letter=None)  # wrong
    queue = await client.queue_consumer("orders", "sub", schema=JsonSchema(Order))
    message = await queue.receive(timeout="5")  # wrong
    text: str = message.value  # wrong
    stream = await client.stream_consumer("t", "sub")
    stream.nack(message)  # wrong
    (await client.reader("t")).ack(message)  # wrong
    client.transaction(timeout="60")  # wrong
    await threads.producer("t").send(b"x")  # wrong
    threads.producer("t").send(5)  # wrong
    print(magnetar.NoSuchName, text)  # wrong
"""
ERROR = re.compile(r"^[^:]+:(\d+): error: ", re.MULTILINE)


@pytest.mark.slow
def test_wrong_use_is_found_and_right_use_is_not(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
    )
    wanted = {
        number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")
    }
    assert {int(found) for found in ERROR.findall(done.stdout)} == wanted, done.stdout + done.stderr
