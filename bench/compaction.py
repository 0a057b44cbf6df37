"""How fast a topic of a real server is compacted, alone and beside publishers, and what they lose.

    python -m bench.compaction [--messages 1000000] [--keys 10000]

A million messages of ten thousand keys in batches are compacted several times, each time in a topic
of their own: once while nothing else happens, and in each of five turns beside a publisher that
sends as fast as it can to another topic. That publisher is measured for the same time before and
after, so that each turn has a ratio of its own; the median of them counts.

Returns 1 if the speed beside publishers, or what these keep of theirs, is below its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import urllib.request
from typing import Any

import uvloop

from bench.broker import Running, load, server
from bench.load import FrameCounter
from bench.report import Row, publish
from bench.restart import connected
from bench.storage import scratch
from magnetar.client.message.batch import Outgoing, Stamp, batch_entry
from magnetar.wire.compression import Compression
from magnetar.wire.frames import encode_send

MESSAGES_PER_SECOND_MIN = 100_000
RATIO_MIN = 0.8
TURNS = 5
BATCH = 1000
PAYLOAD = bytes(range(100))
WINDOW = 16
PUBLISH: dict[str, Any] = {"connections": 1, "window": 1000}
PUBLISH_SECONDS = 4.0
"""Shorter than any compaction takes beside publishers."""
WAIT_SECONDS = 120.0
LOOK_SECONDS = 0.05


def topic_of(number: int) -> str:
    return f"public/default/compacted-{number}"


class Filler(FrameCounter):
    """Sends entries that were made before, so many at a time."""

    def __init__(self, entries: list[bytes]) -> None:
        super().__init__()
        self._entries = entries
        self._sent = self._done = 0

    def counted(self, frames: int) -> None:
        self._done += frames
        if self._done == len(self._entries):
            self.done.set_result(None)
        while self._sent < len(self._entries) and self._sent - self._done < WINDOW:
            entry = self._entries[self._sent]
            self.transport.writelines(encode_send(1, self._sent * BATCH, entry, num_messages=BATCH))
            self._sent += 1


def entries_of(messages: int, keys: int) -> list[bytes]:
    chance = random.Random(1)
    stamp = Stamp("bench", time.time_ns() // 1_000_000, Compression.LZ4)
    made = []
    for first in range(0, messages, BATCH):
        batch = [
            Outgoing(payload=PAYLOAD, sequence_id=number, key=f"key-{chance.randrange(keys)}")
            for number in range(first, first + BATCH)
        ]
        made.append(batch_entry(batch, stamp).headers_and_payload)
    return made


async def fill(port: int, topic: str, entries: list[bytes]) -> None:
    driver = await connected(port)
    await driver.request("PRODUCER", topic=f"persistent://{topic}", producer_id=1)
    filler = Filler(entries)
    filler.begin(driver.detach())
    await asyncio.wait_for(filler.done, WAIT_SECONDS)


def ask(target: Running, method: str, path: str) -> Any:
    url = f"{target.admin_url}/admin/v2/persistent/{path}"
    with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
        data = answer.read()
        return json.loads(data) if data else None


def seconds_of(target: Running, topic: str) -> float:
    """Wait for the end of a compaction; how long it took, as the server says."""
    until = time.monotonic() + WAIT_SECONDS
    while (found := ask(target, "GET", f"{topic}/compaction"))["status"] == "RUNNING":
        if time.monotonic() > until:
            raise TimeoutError(f"{topic} is still being compacted")
        time.sleep(LOOK_SECONDS)
    if found["status"] != "SUCCESS":
        raise RuntimeError(found["lastError"])
    stats = ask(target, "GET", f"{topic}/stats")["compaction"]
    return float(stats["lastCompactionDurationTimeInMills"]) / 1000


def longest_turn(target: Running) -> float:
    """The server's longest turn of its loop in the last minute or two."""
    with urllib.request.urlopen(f"{target.admin_url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    name = "magnetar_loop_longest_turn_seconds "
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def measure(messages: int, keys: int) -> list[Row]:
    entries = entries_of(messages, keys)
    publisher: dict[str, Any] = {
        **PUBLISH, "topic": "persistent://public/default/published", "seconds": PUBLISH_SECONDS,
    }  # fmt: skip
    beside, ratios, rates, turns = [], [], [], []
    with scratch() as folder, server(folder) as target:
        for number in range(TURNS + 1):
            uvloop.run(fill(target.port, topic_of(number), entries))
        cpu = target.cpu_seconds()
        ask(target, "PUT", f"{topic_of(0)}/compaction")
        alone = seconds_of(target, topic_of(0))
        cpu, turn = target.cpu_seconds() - cpu, longest_turn(target)
        load(target, "publish", **publisher)
        undisturbed = [load(target, "publish", **publisher)["rate"]]
        for number in range(1, TURNS + 1):
            ask(target, "PUT", f"{topic_of(number)}/compaction")
            with_it = load(target, "publish", **publisher)
            # It must go on to the end of the publisher, or the rest is undisturbed.
            state = ask(target, "GET", f"{topic_of(number)}/compaction")
            turns.append(state["status"] == "RUNNING")
            beside.append(messages / seconds_of(target, topic_of(number)))
            undisturbed.append(load(target, "publish", **publisher)["rate"])
            ratios.append(with_it["rate"] / statistics.mean(undisturbed[-2:]))
            rates.append(with_it["rate"])
            print(f"turn {number}: {beside[-1]:,.0f} messages/s, publishers keep {ratios[-1]:.2f}")
    name = f"{messages:,} of {keys:,} keys"
    return [
        Row(measure=f"{name}: alone", value=messages / alone, unit="1/s"),
        Row(measure=f"{name}: alone, cpu", value=cpu / alone, unit="cores"),
        Row(measure=f"{name}: alone, longest turn", value=1000 * turn, unit="ms"),
        Row(measure=f"{name}: beside a publisher", value=statistics.median(beside), unit="1/s"),
        Row(
            measure=f"{name}: the publisher", value=statistics.median(rates), unit="1/s",
            anchor="without compaction", ratio=statistics.median(ratios), samples=TURNS,
        ),
        Row(measure=f"{name}: turns that overlap as a whole", value=sum(turns), unit="turns"),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compaction")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=10_000)
    options = parser.parse_args()
    rows = measure(options.messages, options.keys)
    publish("compaction", rows)
    values = {row.measure.rpartition(": ")[2]: row for row in rows}
    ratio = values["the publisher"].ratio
    slow = values["beside a publisher"].value < MESSAGES_PER_SECOND_MIN
    return int(slow or ratio is None or ratio < RATIO_MIN)


if __name__ == "__main__":
    sys.exit(main())
