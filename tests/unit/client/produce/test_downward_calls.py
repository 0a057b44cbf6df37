"""What is sent goes down through the parts of a producer: no part calls one above it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pyarrow as pa

from magnetar.client.produce import producer
from magnetar.client.produce.producer import Producer
from tests.unit.client.fake_broker import FakeBroker, play
from tests.unit.client.produce.test_segment_producer import REGULAR, client_of, older

FOLDER = "magnetar/client/produce/"
PARTS = [
    "producer",
    "producer_core",
    "row_sender",
    "message_sender",
    "segment_producers",
    "segment_producer",
    "pending_messages",
    "outbox",
    "semaphore",
    "settings",
]
"""From top to bottom."""

IN_BETWEEN = {"<listcomp>", "<genexpr>", "<lambda>", "<dictcomp>"}


class Calls:
    """Which part called which, while it watched."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        called = _part(frame.f_code)
        if event != "call" or called is None or frame.f_code.co_name in IN_BETWEEN:
            return
        caller = frame.f_back
        while caller is not None and _part(caller.f_code) is None:
            caller = caller.f_back
        if caller is not None:
            self.seen.append((_part(caller.f_code) or "", called, frame.f_code.co_name))

    def upward(self) -> list[tuple[str, str, str]]:
        return [each for each in self.seen if PARTS.index(each[0]) > PARTS.index(each[1])]


def _part(code: CodeType) -> str | None:
    _, found, name = code.co_filename.partition(FOLDER)
    return name.removesuffix(".py") if found else None


async def one_of_each(sends: Producer[bytes]) -> None:
    rows = {"key": [b"%d" % (number % 3) for number in range(200)], "value": [b"v"] * 200}
    await sends.send_arrow(pa.RecordBatch.from_pydict(rows))
    await sends.send(b"single", key="k")
    await sends.flush()


def test_a_batch_of_rows_and_a_message_go_down_and_their_receipts_too() -> None:
    calls = Calls()

    async def story(broker: FakeBroker) -> None:
        older(broker)
        async with client_of(broker) as client:
            sends = await client.producer(REGULAR)
            with calls.watched():
                await one_of_each(sends)

    play(story)
    assert calls.upward() == []
    assert {called for _, called, _ in calls.seen} >= set(PARTS) - {"producer", "settings"}


def test_the_parts_are_those_of_the_folder() -> None:
    folder = Path(producer.__file__).parent
    found = {each.stem for each in folder.glob("*.py")} - {"__init__"}
    assert found == set(PARTS)
