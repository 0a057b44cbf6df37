"""A process of its own that reads a scalable topic from a checkpoint to the end.

    python -m tests.integration.server.scalable_reader URL TOPIC CHECKPOINT COUNT

It prints what it was given, as pairs of key and sequence id, once nothing more comes; the
checkpoint is in hexadecimal digits.
"""

from __future__ import annotations

import asyncio
import json
import sys

from harness.limits import PATIENCE_S
from harness.simulation.scalable.clients import CheckpointConsumer
from harness.simulation.scalable.links import Links
from magnetar.errors import DeadlineExceeded

_QUIET_S = 0.3


async def read(url: str, topic: str, checkpoint: bytes, count: int) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    async with (
        Links(url, wait_s=PATIENCE_S) as links,
        CheckpointConsumer(links, topic, "c", start=checkpoint) as reader,
    ):
        while True:
            try:
                delivery = await reader.receive(_QUIET_S if len(found) >= count else PATIENCE_S)
            except DeadlineExceeded:
                return found
            found.append((delivery.key, delivery.sequence))


def main() -> None:
    url, topic, checkpoint, count = sys.argv[1:]
    found = asyncio.run(read(url, topic, bytes.fromhex(checkpoint), int(count)))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
