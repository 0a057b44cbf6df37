"""A client that sends in transactions and gives one up as soon as one of its sends fails.

Owns: `StrictSender`, which does what the official v5 client does with a new layout: it closes the
producer of a segment that is no longer active, and whatever it has not sent to it, or has no
receipt for, has failed. A message is not sent at once: first its transaction is told of the
segment, then it waits in a batch.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from harness.simulation.scalable.links import Line, Links, refusal, route
from magnetar.client.message.layouts import layout_from
from magnetar.errors import MagnetarError
from magnetar.model.hashing import key_hash
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.runtime.signal import Signal
from magnetar.testing.virtual.driver import build_message
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Command, Received, TxnId
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.scalable_stage import KEYS, NAME, TOPIC

BATCH_S: Final = 0.001
TTL_MS: Final = 600_000


class SendFailed(Exception):
    """A message has no receipt and will get none."""


class StrictSender:
    """One connection; several transactions at a time."""

    def __init__(self, links: Links, name: str) -> None:
        self.committed: list[bytes] = []
        """What consumers must get."""
        self.given_up = 0
        """How many transactions had a failed send, and were aborted therefore."""
        self.line: Line
        self._links = links
        self._name = name
        self._layout: SegmentLayout
        self._layouts = Signal()
        self._senders: dict[int, _SegmentSender] = {}
        self._sent = 0

    async def open(self) -> StrictSender:
        self.line = await self._links.lookup(NAME)
        number = self.line.register("session_id", self)
        self.line.send(
            "SCALABLE_TOPIC_LOOKUP", session_id=number, topic=NAME, create_if_missing=False
        )
        await self._layouts.past(0)
        return self

    # --- the line's side

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        self._layout = layout_from(body.dag)
        self._layouts.advance()
        active = {each.segment_id for each in self._layout.active}
        for number in [each for each in self._senders if each not in active]:
            self._senders.pop(number).close()

    def lost(self, error: Exception) -> None:
        self._layouts.close(error)

    # --- the application's side

    async def begin(self) -> TxnId:
        answer = await self.line.request("NEW_TXN", tc_id=0, txn_ttl_millis=TTL_MS, scalable=True)
        return TxnId(answer.txnid_most_bits, answer.txnid_least_bits)

    async def send(self, txn: TxnId, count: int) -> list[bytes]:
        """So many at once; SendFailed if one has failed."""
        first, self._sent = self._sent, self._sent + count
        numbers = range(first, first + count)
        payloads = [f"{self._name}/{number}".encode() for number in numbers]
        sends = [self._send(txn, f"k{n % KEYS}", each) for n, each in enumerate(payloads, first)]
        results = await asyncio.gather(*sends, return_exceptions=True)
        for result in results:
            if isinstance(result, MagnetarError | SendFailed):
                raise SendFailed(str(result))
            if result is not None:
                raise result
        return payloads

    async def end(self, txn: TxnId, *, commit: bool) -> None:
        action = pb.COMMIT if commit else pb.ABORT
        await self.line.request("END_TXN", txn_action=action, scalable=True, **_ids(txn))

    async def transact(self, count: int) -> None:
        """A transaction of so many messages: committed, or given up."""
        txn = await self.begin()
        try:
            payloads = await self.send(txn, count)
        except SendFailed:
            self.given_up += 1
            await self.end(txn, commit=False)
            return
        await self.end(txn, commit=True)
        self.committed += payloads

    async def _send(self, txn: TxnId, key: str, payload: bytes) -> None:
        segment = route(self._layout, key_hash(key))
        sender = self._senders.get(segment.segment_id)
        if sender is None:
            sender = self._senders[segment.segment_id] = _SegmentSender(
                self.line, self._name, segment
            )
        await sender.registered(txn)
        await asyncio.sleep(BATCH_S)
        await sender.send(txn, key, payload)


class _SegmentSender:
    """The producer of one segment."""

    def __init__(self, line: Line, name: str, segment: Segment) -> None:
        self._line = line
        self._topic = str(TOPIC.segment(segment.descriptor))
        self._name = f"{name}-seg-{segment.segment_id}"
        self._number = line.register("producer_id", self)
        self._opening = asyncio.create_task(self._open())
        self._registering: dict[TxnId, asyncio.Task[Any]] = {}
        self._sequence = 0
        self._pending: dict[int, asyncio.Future[None]] = {}
        self._closed = False

    async def _open(self) -> None:
        await self._line.request(
            "PRODUCER",
            topic=self._topic,
            producer_id=self._number,
            producer_name=self._name,
            user_provided_producer_name=True,
            txn_enabled=True,
        )

    async def registered(self, txn: TxnId) -> None:
        """It is open, and a transaction was told of its segment."""
        await asyncio.shield(self._opening)
        if txn not in self._registering:
            request = self._line.request(
                "ADD_PARTITION_TO_TXN", partitions=[self._topic], scalable=True, **_ids(txn)
            )
            self._registering[txn] = asyncio.create_task(request)
        await asyncio.shield(self._registering[txn])

    async def send(self, txn: TxnId, key: str, payload: bytes) -> None:
        if self._closed:
            raise SendFailed(f"{self._topic} is no longer active")
        sequence, self._sequence = self._sequence, self._sequence + 1
        message = build_message(
            payload, producer_name=self._name, sequence_id=sequence, key=key, **_ids(txn)
        )
        receipt = self._pending[sequence] = asyncio.get_running_loop().create_future()
        self._line.send(
            "SEND", message, producer_id=self._number, sequence_id=sequence, **_ids(txn)
        )
        await receipt

    def close(self) -> None:
        """As the official client does: what is pending has failed."""
        self._closed = True
        self._line.send("CLOSE_PRODUCER", producer_id=self._number, request_id=2**40 + self._number)
        self.lost(SendFailed(f"{self._topic} is no longer active"))

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        if command.type == TYPES["CLOSE_PRODUCER"]:
            self._closed = True
            return
        receipt = self._pending.pop(body.sequence_id, None)
        if receipt is None or receipt.done():
            return
        if command.type == TYPES["SEND_ERROR"]:
            receipt.set_exception(refusal("SEND", body.error, body.message))
        else:
            receipt.set_result(None)

    def lost(self, error: Exception) -> None:
        pending, self._pending = self._pending, {}
        for receipt in pending.values():
            if not receipt.done():
                receipt.set_exception(error)


def _ids(txn: TxnId) -> dict[str, Any]:
    return {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}
