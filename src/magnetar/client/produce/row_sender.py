"""The rows of record batches on their way through a producer, an entry at a time.

Owns: `RowSender`, which makes a `PendingBatch` of as many rows as fit into a batch, and takes one
apart if its messages must go elsewhere.

Invariants:
1. Rows of a key leave in their order, and behind what was handed in before them.
2. While it waits for room, others may send; rows are routed by the layout that holds in the step in
   which they are handed in.
3. Few rows for one place (`_FEW`) are sent one by one, and so share batches with what comes next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Protocol

from magnetar.client.arrow import arrow
from magnetar.client.arrow.outgoing_rows import OutgoingRows, RowRun
from magnetar.client.message.batch import OutgoingEntry, Stamp, filled_entry, shared_metadata
from magnetar.client.message.message import AnyMessageId
from magnetar.client.message.routing import Router
from magnetar.client.produce.outbox import UNNUMBERED, Pending, PendingBatch
from magnetar.client.produce.segment_producers import SegmentProducers
from magnetar.client.produce.settings import ProducerSettings
from magnetar.client.transaction.participants import SendTransaction
from magnetar.model.hashing import key_hash, segment_hash
from magnetar.model.segments import Segment

_FEW: Final = 8
_OVERHEAD_BYTES: Final = 2048
"""What an entry takes in memory beside its bytes."""

Receipt = asyncio.Future[AnyMessageId]


class SendsRows(Protocol):
    """What the sender of rows needs of its producer."""

    @property
    def settings(self) -> ProducerSettings: ...

    @property
    def segment_producers(self) -> SegmentProducers: ...

    @property
    def schema_version(self) -> bytes: ...

    async def reserve(self, message: Pending) -> None:
        """Wait for room; raises if it does not come in time, or the producer is closed."""
        ...

    def give_back(self, message: Pending) -> None:
        """What was reserved for it."""
        ...

    async def join(self, message: Pending, segment: Segment, txn: SendTransaction) -> None:
        """Make it a part of a transaction; raises if that takes no more."""
        ...

    def hand_in(self, message: Pending, segment: Segment) -> None:
        """Send it, behind what was handed in before."""
        ...

    async def submit_row(self, row: arrow.Row, txn: SendTransaction | None) -> Receipt:
        """Send one message on its own."""
        ...

    def replace(self, batch: PendingBatch, messages: Sequence[Pending]) -> None:
        """Each of these counts on its own from now on."""
        ...


class RowSender:
    """Sends rows by one producer."""

    def __init__(self, home: SendsRows) -> None:
        self._home = home
        self._loop = asyncio.get_running_loop()

    async def submit(self, batch: Any, txn: SendTransaction | None) -> list[Receipt]:
        """Hand all rows in, as soon as there is room; the receipts of entries and messages."""
        receipts: list[Receipt] = []
        settings = self._home.settings
        for part in arrow.sent_columns(batch):
            makes_batches = settings.batching and not settings.batch_by_key
            rows = OutgoingRows.of(part) if makes_batches else None
            if rows is None:
                each = arrow.outgoing(part)
                receipts += [await self._home.submit_row(row, txn) for row in each]
            else:
                receipts += await self._submit_rows(rows, txn)
        return receipts

    async def _submit_rows(self, rows: OutgoingRows, txn: SendTransaction | None) -> list[Receipt]:
        receipts: list[Receipt] = []
        while rows.num_rows:
            router = self._home.segment_producers.router
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
        settings, segments = self._home.settings, self._home.segment_producers
        at = 0
        messages_max = min(settings.batch_messages, settings.max_pending)
        for place in places:
            while at < place.end:
                if segments.router is not router:
                    return at
                count = rows.fitting(
                    at, place.end, messages_max=messages_max, bytes_max=settings.batch_bytes
                )
                part = rows.slice(at, count)
                if count < _FEW:
                    receipts += [await self._home.submit_row(row, txn) for row in part.rows()]
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
        home = self._home
        batch = self._batch_of(rows)
        await home.reserve(batch)
        try:
            if home.segment_producers.router is not router:
                home.give_back(batch)
                return False
            target = (
                home.segment_producers.segment_of_rows(rows.num_rows)
                if segment is None
                else segment
            )
            if txn is not None:
                await home.join(batch, target, txn)
        except BaseException:
            home.give_back(batch)
            raise
        home.hand_in(batch, target)
        receipts.append(batch.receipt)
        return True

    def _batch_of(self, rows: OutgoingRows) -> PendingBatch:
        size = rows.size

        def encode(batch: PendingBatch, stamp: Stamp, hashes: bool) -> OutgoingEntry:
            return filled_entry(
                shared_metadata(batch, stamp),
                rows.payload(batch.first_sequence),
                stamp.compression,
                num_messages=batch.count,
                sequence_ids=(batch.first_sequence, batch.sequence_id),
                places=rows.hash_span if hashes else None,
                txn=batch.txn,
            )

        def divide(batch: PendingBatch) -> list[Pending]:
            return self._divided(batch, rows)

        return PendingBatch(
            payload=b"",
            sequence_id=UNNUMBERED,
            key=rows.only_key,
            schema_version=self._home.schema_version,
            receipt=self._loop.create_future(),
            due_at=self._loop.time() + self._home.settings.send_timeout,
            own_size=size,
            count=rows.num_rows,
            cost=size + _OVERHEAD_BYTES,
            encode=encode,
            divide=divide,
        )

    def _divided(self, batch: PendingBatch, rows: OutgoingRows) -> list[Pending]:
        """Its messages, each with a receipt: that of the batch is done when all of these are."""
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
        self._home.replace(batch, messages)
        return messages


def place_of(key: str | bytes | None, otherwise: int) -> int:
    """Where a key that is not text stands on the ring: brokers cannot know it otherwise."""
    return segment_hash(key_hash(key)) if isinstance(key, bytes) else otherwise


def _gather(receipts: Sequence[Receipt], whole: Receipt) -> None:
    """Settle `whole` once all of these are: with the id of the last one, or the first failure."""
    left = len(receipts)

    def one_is_done(_: Receipt) -> None:
        nonlocal left
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
