"""What the page about transactions shows works, and its tables name everything."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from magnetar.client.transaction.state import TransactionState
from magnetar.model.subscriptions import InitialPosition
from tests.integration.client.stage import new_client, play, stored
from tests.integration.server.scalable_stage import NAME, Stage

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "client-transactions.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("example", range(len(EXAMPLES)))
def test_examples_run(example: int) -> None:
    names: dict[str, Any] = {}
    head = "async def run(client, producer, consumer, message):\n"
    exec(head + indent(EXAMPLES[example], "    "), names)

    async def story(stage: Stage) -> None:
        async with (
            new_client(stage) as client,
            await client.producer(NAME) as producer,
            await client.queue_consumer(
                NAME, "s", initial_position=InitialPosition.EARLIEST
            ) as consumer,
        ):
            await producer.send(b"order", key="k")
            await names["run"](client, producer, consumer, await consumer.receive(timeout=20.0))
        assert len(await stored(stage)) == 2

    play(story)


def test_every_state_has_its_line() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(state.name for state in TransactionState)
