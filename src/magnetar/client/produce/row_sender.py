"""The rows of record batches on their way through a producer, an entry at a time.

Owns: `RowSender`, which makes a `PendingBatch` of as many rows as fit into a batch, and takes one
apart if its messages must go elsewhere.

Invariants:
1. Rows of a key leave in their order, and behind what was handed in before them.
2. While it waits for room, others may send; rows are routed by the layout that holds in the step in
   which they are handed in.
3. Few rows for one place (`_FEW`) are sent one by one, and so share batches with what comes next.

Relies on: `MessageSender` for the steps of a send, `SegmentProducers` for the routing, and
`PendingMessages` for what is reserved: all below it. It calls nothing above.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from magnetar.client.arrow import arrow
from magnetar.client.arrow.outgoing_rows import OutgoingRows, RowRun
from magnetar.client.message.message import AnyMessageId
from magnetar.client.message.routing import Router
from magnetar.client.produce.message_sender import MessageSender, place_of
from magnetar.client.produce.outbox import UNNUMBERED, Pending, PendingBatch
from magnetar.client.produce.pending_messages import PendingMessages
from magnetar.client.produce.segment_producers import SegmentProducers
from magnetar.client.produce.settings import ProducerSettings
from magnetar.client.transaction.participants import SendTransaction
from magnetar.model.segments import Segment

# Below this an entry of its own costs more than sharing one with what comes next.
_FEW: Final = 8
_OVERHEAD_BYTES: Final = 2048
"""What an entry takes in memory beside its bytes."""

Receipt = asyncio.Future[AnyMessageId]


class RowSender:
    """Sends rows by one producer."""

    def __init__(
        self,
        settings: ProducerSettings,
        pending: PendingMessages,
        segments: SegmentProducers,
        sender: MessageSender,
    ) -> None:
        self._settings = settings
        # Without batching there is nothing to gain; by key, a batch may have one key only.
        self._makes_batches = settings.batching and not settings.batch_by_key
        # A batch takes room for all its messages at once: more than there is would wait forever.
        self._messages_max = min(settings.batch_messages, settings.max_pending)
        self._pending = pending
        self._segments = segments
        self._sender = sender
        self._loop = asyncio.get_running_loop()

    async def submit(self, batch: Any, txn: SendTransaction | None) -> list[Receipt]:
        """Hand all rows in, as soon as there is room; the receipts of entries and messages."""
        self._sender.prepare()
        receipts: list[Receipt] = []
        for part in arrow.sent_columns(batch):
            rows = OutgoingRows.of(part) if self._makes_batches else None
            if rows is None:
                # Columns that are not read by hand, or a producer without batches of its own.
                receipts += [await self._submit_one(row, txn) for row in arrow.outgoing(part)]
            else:
                receipts += await self._submit_rows(rows, txn)
        return receipts

    async def _submit_one(self, row: arrow.Row, txn: SendTransaction | None) -> Receipt:
        """Send one row on its own."""
        return await self._sender.submit(
            row.value,
            key=row.key,
            properties=row.properties,
            event_time=row.event_time_ms,
            txn=txn,
        )

    async def _submit_rows(self, rows: OutgoingRows, txn: SendTransaction | None) -> list[Receipt]:
        receipts: list[Receipt] = []
        # Once, unless the layout changes meanwhile: then what is left is placed anew.
        while rows.num_rows:
            router = self._segments.router
            placed, places = rows.placed(router)
            done = await self._submit_placed(placed, places, router, txn, receipts)
            rows = placed.slice(done, placed.num_rows - done)
        return receipts

    async def _submit_placed(
        self,
        rows: OutgoingRows,
        places: Sequence[RowRun],
        router: Router,
        txn: SendTransaction | None,
        receipts: list[Receipt],
    ) -> int:
        """How many were handed in: not all, if the layout changed meanwhile."""
        segments, bytes_max = self._segments, self._settings.batch_bytes
        at = 0
        for place in places:
            # A place is a run of rows for one segment (and bucket); it fills as many entries as it
            # needs.
            while at < place.end:
                if segments.router is not router:
                    return at
                count = rows.fitting(
                    at, place.end, messages_max=self._messages_max, bytes_max=bytes_max
                )
                part = rows.slice(at, count)
                if count < _FEW:
                    receipts += [await self._submit_one(row, txn) for row in part.rows()]
                elif not await self._submit_batch(part, place.segment, router, txn, receipts):
                    return at
                at += count
        return at

    async def _submit_batch(
        self,
        rows: OutgoingRows,
        segment: Segment | None,
        router: Router,
        txn: SendTransaction | None,
        receipts: list[Receipt],
    ) -> bool:
        """False: the layout changed while it waited for room."""
        segments, sender = self._segments, self._sender
        batch = self._batch_of(rows)
        await sender.reserve(batch)
        try:
            # Invariant 2: its segment may be gone since it was placed.
            if segments.router is not router:
                self._pending.give_back(batch)
                return False
            # Rows without a key go where it is the producer's turn to send.
            target = segments.segment_of_rows(rows.num_rows) if segment is None else segment
            if txn is not None:
                await sender.join(batch, target, txn)
        except BaseException:
            self._pending.give_back(batch)
            raise
        sender.hand_in(batch, target)
        receipts.append(batch.receipt)
        return True

    def _batch_of(self, rows: OutgoingRows) -> PendingBatch:
        size = rows.size

        def divide(batch: PendingBatch) -> list[Pending]:
            return self._divided(batch, rows)

        return PendingBatch(
            payload=b"",
            sequence_id=UNNUMBERED,
            key=rows.only_key,
            schema_version=self._pending.schema_version,
            receipt=self._loop.create_future(),
            due_at=self._loop.time() + self._settings.send_timeout,
            own_size=size,
            count=rows.num_rows,
            cost=size + _OVERHEAD_BYTES,
            rows=rows,
            divide=divide,
        )

    def _divided(self, batch: PendingBatch, rows: OutgoingRows) -> list[Pending]:
        """The messages of a batch, each with a receipt: its own is done when all of these are."""
        # Written before: the messages keep the numbers that the entry had, so that the broker can
        # tell which of them it has.
        is_numbered = batch.first_sequence != UNNUMBERED
        share, rest = divmod(batch.cost, batch.count)
        messages: list[Pending] = []
        for number, row in enumerate(rows.rows()):
            message = Pending(
                payload=row.value or b"",
                sequence_id=batch.first_sequence + number if is_numbered else UNNUMBERED,
                key=row.key,
                properties=row.properties,
                event_time_ms=row.event_time_ms or 0,
                null_value=row.value is None,
                schema_version=batch.schema_version,
                txn=batch.txn,
                receipt=self._loop.create_future(),
                due_at=batch.due_at,
                own_size=share,
                cost=share if number else share + rest,
                place=place_of(row.key, batch.place),
                ordinal=batch.ordinal,
            )
            messages.append(message)
        _gather([each.receipt for each in messages], batch.receipt)
        self._pending.replace(batch, messages)
        return messages


def _gather(receipts: Sequence[Receipt], whole: Receipt) -> None:
    """Settle `whole` once all of these are: with the id of the last one, or the first failure."""
    left = len(receipts)

    def one_is_done(_: Receipt) -> None:
        nonlocal left
        # Whoever waits for the batch hears once, when nothing of it is open any more.
        left -= 1
        if left or whole.done():
            return
        errors = [error for each in receipts if (error := each.exception()) is not None]
        if errors:
            whole.set_exception(errors[0])
            whole.exception()  # it is logged: nobody needs to await it
        else:
            whole.set_result(receipts[-1].result())

    for receipt in receipts:
        receipt.add_done_callback(one_is_done)
