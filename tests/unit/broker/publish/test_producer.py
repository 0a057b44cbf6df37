"""One producer: order of receipts, refusals, dedup, failures, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.api import DROPPED, Receipt
from magnetar.broker.publish.dedup import Dedup
from magnetar.broker.publish.producer import Producer
from magnetar.broker.publish.send_limits import SendLimits
from magnetar.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    DiskFailed,
    ManagedLedgerSealed,
    NotAllowed,
    StorageError,
    TooManyRequests,
    TopicTerminated,
)
from magnetar.model.ids import Position
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.signal import Signal
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.messages import Send, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.broker.world import (
    EPOCH_MS,
    due,
    entry,
    message,
    options,
    rare,
    receipts,
    run_of,
)


class Bench:
    """A producer on a log that is written by hand."""

    def __init__(self, dedup: Dedup | None = None) -> None:
        self.futures: list[asyncio.Future[Position]] = []
        self.refusal: StorageError | TooManyRequests | None = None
        self.trouble = Signal()
        self.producer = Producer(
            "p",
            options(),
            self.append,
            clock=LoopClock(EPOCH_MS),
            trouble=self.trouble,
            dedup=dedup,
        )
        self.producer.grant(None)

    def append(self, payload: bytes) -> asyncio.Future[Position]:
        if self.refusal is not None:
            raise self.refusal
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]

    def store(self, *numbers: int) -> None:
        for number in numbers:
            self.futures[number].set_result(Position(1, number))

    def fail(self, *numbers: int) -> None:
        for number in numbers:
            self.futures[number].set_exception(DiskFailed("broken"))


def on_bench(scenario: Callable[[Bench], Awaitable[None]], dedup: Dedup | None = None) -> None:
    async def main() -> None:
        await scenario(Bench(dedup))

    run(main())


def test_receipts_come_in_order_and_together() -> None:
    async def scenario(bench: Bench) -> None:
        producer = bench.producer
        for number in range(4):
            producer.send(message(number))
        waiting = asyncio.create_task(due(producer))
        await asyncio.sleep(0)
        bench.store(0, 1, 2)
        found = await waiting
        assert found == [Receipt(n, None, Position(1, n)) for n in range(3)]
        assert producer.pending == 1
        bench.store(3)
        assert [each.sequence_id for each in await due(producer)] == [3]
        assert (producer.messages_in, producer.pending) == (4, 0)

    on_bench(scenario)


def test_a_waiter_sees_a_send_that_comes_later() -> None:
    async def scenario(bench: Bench) -> None:
        waiting = asyncio.create_task(due(bench.producer))
        await asyncio.sleep(0)
        bench.producer.send(message(5, batch=3))
        bench.store(0)
        assert [each.sequence_id for each in await waiting] == [5]
        assert bench.producer.messages_in == 3

    on_bench(scenario)


def test_a_cancelled_waiter_loses_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        bench.producer.send(message(1))
        waiting = asyncio.create_task(due(bench.producer))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert not bench.futures[0].cancelled()
        bench.store(0)
        assert [each.sequence_id for each in await due(bench.producer)] == [1]

    on_bench(scenario)


@pytest.mark.parametrize("together", [True, False])
def test_a_lie_about_the_number_of_messages_is_refused_in_its_place(together: bool) -> None:
    """What is refused counts nowhere: not as messages, not for dedup."""

    async def scenario(bench: Bench) -> None:
        producer = bench.producer
        lies = (
            Send(1, 2, 1_000_000, entry(2)),
            Send(1, 3, 0, entry(3)),
            Send(1, 4, 1, entry(4, batch=2**31 - 1)),
            # Behind more than a size of one byte can say.
            Send(1, 4, 1, entry(4, producer="p" * 300, batch=2**31 - 1)),
            Send(1, 4, 1, entry(4, producer="p" * 65_536, batch=2**31 - 1)),
        )
        sends = [message(1), *lies, message(5, batch=3)]
        if together:
            producer.send_run(run_of(sends))
        else:
            for each in sends:
                producer.send(each)
        bench.store(0, 1)
        found = await receipts(producer, 7)
        assert [each.sequence_id for each in found] == [1, 2, 3, 4, 4, 4, 5]
        assert [type(each.error) for each in found[1:-1]] == [NotAllowed] * 5
        assert (found[0].error, found[-1].error) == (None, None)
        assert producer.messages_in == 4
        assert not producer.stopped

    on_bench(scenario)


def test_refusals_keep_their_place() -> None:
    async def scenario(bench: Bench) -> None:
        producer = bench.producer
        producer.send(message(1))
        producer.send(rare(2, checksum_ok=False))
        producer.send(rare(3, txn=True))
        producer.send(rare(4, highest=9))
        bench.store(0, 1)
        found = await receipts(producer, 4)
        assert [each.sequence_id for each in found] == [1, 2, 3, 4]
        errors = [type(each.error) for each in found]
        assert errors == [type(None), ChecksumMismatch, NotAllowed, type(None)]
        assert found[3].highest_sequence_id == 9
        assert not producer.stopped

    on_bench(scenario)


def test_a_waiting_producer_may_not_send() -> None:
    async def main() -> None:
        bench = Bench()
        waiting = Producer(
            "w", options(), bench.append, clock=LoopClock(EPOCH_MS), trouble=bench.trouble
        )
        waiting.send(message(1))
        (refused,) = await due(waiting)
        assert isinstance(refused.error, NotAllowed)
        assert not bench.futures

    run(main())


def test_a_failed_append_ends_the_producer_without_later_receipts() -> None:
    async def scenario(bench: Bench) -> None:
        producer = bench.producer
        for number in range(4):
            producer.send(message(number))
        bench.store(0)
        bench.fail(1)
        bench.store(2)
        assert [each.sequence_id for each in await due(producer)] == [0]
        assert await due(producer) == []
        assert isinstance(producer.failure, DiskFailed)
        assert bench.trouble.version == 1
        producer.send(message(9))
        assert len(bench.futures) == 4
        bench.store(3)
        await producer.close(1.0)
        assert producer.pending == 0

    on_bench(scenario)


def test_a_send_after_an_unnoticed_failure_is_not_appended() -> None:
    async def scenario(bench: Bench) -> None:
        bench.producer.send(message(0))
        bench.producer.send(message(1))
        bench.store(0)
        bench.fail(1)
        bench.producer.send(message(2))
        assert len(bench.futures) == 2
        assert [each.sequence_id for each in await due(bench.producer)] == [0]
        assert await due(bench.producer) == []

    on_bench(scenario)


@pytest.mark.parametrize("dedup", [None, Dedup(10)], ids=["plain", "dedup"])
def test_an_append_that_is_refused_at_once(dedup: Dedup | None) -> None:
    async def scenario(bench: Bench) -> None:
        producer = bench.producer
        producer.send(message(1))
        bench.refusal = TooManyRequests("full")
        producer.send(message(2))
        bench.refusal = None
        producer.send(message(3))
        assert len(bench.futures) == 1
        bench.store(0)
        assert [each.sequence_id for each in await due(producer)] == [1]
        assert await due(producer) == []
        assert isinstance(producer.failure, TooManyRequests)
        assert bench.trouble.version == 0, "a full queue is no reason to fence the topic"
        if dedup is not None:
            assert dedup.last_sequence_id("p") == 1

    on_bench(scenario, dedup)


def test_a_terminated_topic_is_answered_and_the_producer_lives() -> None:
    async def scenario(bench: Bench) -> None:
        bench.refusal = ManagedLedgerSealed("sealed")
        bench.producer.send(message(1))
        (found,) = await due(bench.producer)
        assert isinstance(found.error, TopicTerminated)
        assert not bench.producer.stopped

    on_bench(scenario)


def test_duplicates_get_an_empty_receipt_in_their_turn() -> None:
    async def scenario(bench: Bench) -> None:
        producer = bench.producer
        producer.send(message(1))
        bench.store(0)
        await due(producer)
        producer.send(message(2))
        producer.send(message(1))
        producer.send(message(2))
        assert len(bench.futures) == 2
        bench.store(1)
        found = await receipts(producer, 3)
        assert [each.sequence_id for each in found] == [2, 1, 2]
        assert [each.position for each in found] == [Position(1, 1), DROPPED, DROPPED]
        assert [type(each.error) for each in found] == [type(None), type(None), StorageError]

    on_bench(scenario, Dedup(10))


def test_of_chunks_only_the_last_is_judged() -> None:
    async def scenario(bench: Bench) -> None:
        producer = bench.producer
        for number in range(3):
            producer.send(rare(5, chunk=(number, 3)))
        bench.store(0, 1, 2)
        assert len(await receipts(producer, 3)) == 3
        producer.send(rare(5, chunk=(0, 3)))
        producer.send(rare(5, chunk=(2, 3)))
        assert len(bench.futures) == 4
        bench.store(3)
        assert [each.position for each in await receipts(producer, 2)] == [Position(1, 3), DROPPED]

    on_bench(scenario, Dedup(10))


def test_stopping_still_gives_the_receipts_owed() -> None:
    async def scenario(bench: Bench) -> None:
        producer = bench.producer
        producer.send(message(1))
        producer.stop(NotAllowed("go"))
        producer.send(message(2))
        closing = asyncio.create_task(producer.close(5.0))
        await asyncio.sleep(0)
        bench.store(0)
        await closing
        assert [each.sequence_id for each in await due(producer)] == [1]
        assert await due(producer) == []
        assert isinstance(producer.failure, NotAllowed)

    on_bench(scenario)


def test_closing_has_a_deadline() -> None:
    async def scenario(bench: Bench) -> None:
        bench.producer.send(message(1))
        with pytest.raises(DeadlineExceeded):
            await bench.producer.close(2.0)
        bench.store(0)
        await bench.producer.close(2.0)

    on_bench(scenario)


STEPS = st.lists(st.sampled_from(["send", "store", "fail", "take"]), max_size=40)


@given(STEPS)
def test_receipts_are_a_prefix_of_what_was_stored(steps: list[str]) -> None:
    """Whatever happens: in order, each once, none behind a failure, and close settles all."""

    async def scenario(bench: Bench) -> None:
        producer, sent, done = bench.producer, 0, 0
        good: list[int] = []
        failed = False
        got: list[Receipt] = []
        for step in steps:
            if step == "send":
                producer.send(message(sent))
                sent += 1
            elif step == "take":
                producer.settle()
                if producer._receipts:
                    got += await due(producer)
            elif done < len(bench.futures):
                (bench.store if step == "store" else bench.fail)(done)
                failed = failed or step == "fail"
                if not failed:
                    good.append(done)
                done += 1
        for number in range(done, len(bench.futures)):
            bench.store(number)
            if not failed:
                good.append(number)
        producer.settle()
        await producer.close(1.0)
        while some := await due(producer):
            got += some
        assert [each.position.entry_id for each in got] == good
        assert producer.pending == 0
        assert (producer.failure is not None) == failed

    on_bench(scenario)


# --- runs


class RunBench(Bench):
    """A log that takes runs too; what it stored, and the receipts, can be compared."""

    def __init__(self, dedup: Dedup | None, *, takes_runs: bool) -> None:
        super().__init__(dedup)
        self.stored: list[bytes] = []
        self.got: list[Receipt] = []
        self.runs = 0
        self._queued: list[tuple[asyncio.Future[Position], list[bytes]]] = []
        self._next = 0
        self.producer = Producer(
            "p",
            options(),
            self.append,
            clock=LoopClock(EPOCH_MS),
            trouble=self.trouble,
            dedup=dedup,
            append_run=self.append_run if takes_runs else None,
        )
        self.producer.grant(None)

    def append(self, payload: bytes) -> asyncio.Future[Position]:
        future = super().append(payload)
        self._queued.append((future, [payload]))
        return future

    def append_run(self, payloads: list[bytes], size: int) -> asyncio.Future[Position] | None:
        assert size == sum(map(len, payloads))
        # As a ledger that is about to roll over: so many it takes, but not together.
        if len(payloads) > 5:
            return None
        self.runs += 1
        future = super().append(b"")
        self._queued.append((future, payloads))
        return future

    def commit(self, *, fails: bool) -> None:
        """All that is queued is durable, or is not."""
        queued, self._queued = self._queued, []
        for future, payloads in queued:
            if fails:
                future.set_exception(DiskFailed("broken"))
                continue
            future.set_result(Position(1, self._next))
            self.stored += payloads
            self._next += len(payloads)

    async def take(self) -> None:
        self.producer.settle()
        if self.producer._receipts:
            self.got += await due(self.producer)


RUN_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "resend", "commit", "take", "fail", "refuse"]),
        st.integers(1, 7),
        st.integers(0, 2),
    ),
    max_size=25,
)


@given(RUN_STEPS, st.booleans())
def test_a_run_has_the_outcome_of_its_sends(
    steps: list[tuple[str, int, int]], has_dedup: bool
) -> None:
    """Invariant 7: the same input as runs and one by one gives the same log and receipts."""

    async def play(*, takes_runs: bool) -> RunBench:
        dedup = Dedup(10) if has_dedup else None
        bench = RunBench(dedup, takes_runs=takes_runs)
        bench.producer.dedup = dedup
        if dedup is not None:
            bench.producer.send(message(0))  # from here on its name has a fast path
        sequence = 1
        for step, count, gap in steps:
            if step in ("send", "resend"):
                first = max(0, sequence - count) if step == "resend" else sequence + gap
                sequence = max(sequence, first + count)
                sends = [message(first + number) for number in range(count)]
                bench.producer.send_run(run_of(sends))
            elif step == "take":
                await bench.take()
            elif step == "refuse":
                bench.refusal = TooManyRequests("full") if gap == 0 else None
            else:
                bench.commit(fails=step == "fail")
        bench.commit(fails=False)
        await bench.producer.close(1.0)
        await bench.take()
        return bench

    async def main() -> None:
        runs, singles = await play(takes_runs=True), await play(takes_runs=False)
        assert singles.runs == 0
        assert runs.stored == singles.stored
        assert [str(each) for each in runs.got] == [str(each) for each in singles.got]
        assert runs.producer.messages_in == singles.producer.messages_in
        assert runs.producer.bytes_in == singles.producer.bytes_in
        assert str(runs.producer.failure) == str(singles.producer.failure)
        assert runs.producer.pending == 0
        if has_dedup:
            one, other = (each.producer.dedup for each in (runs, singles))
            assert one is not None
            assert other is not None
            one.check_invariants()
            assert one.snapshot(DROPPED) == other.snapshot(DROPPED)
            assert one.last_sequence_id("p") == other.last_sequence_id("p")

    run(main())


def delayed(sequence_id: int, delay_ms: int) -> Send:
    metadata = pb.MessageMetadata(
        producer_name="p",
        sequence_id=sequence_id,
        publish_time=EPOCH_MS,
        deliver_at_time=EPOCH_MS + delay_ms,
    )
    return Send(1, sequence_id, 1, encode_entry(metadata, b"x"))


def test_what_is_to_be_delivered_too_late_is_refused_in_its_place() -> None:
    async def scenario(bench: Bench) -> None:
        producer = bench.producer
        producer.limit_sends(SendLimits(max_delay_ms=1000))
        producer.send_run(run_of([delayed(0, 1000), message(1), delayed(2, 1001), message(3)]))
        bench.store(0, 1, 2)
        found = await receipts(producer, 4)
        assert [each.sequence_id for each in found] == [0, 1, 2, 3]
        assert [type(each.error) for each in found] == [
            type(None),
            type(None),
            NotAllowed,
            type(None),
        ]
        assert "1001 ms after" in str(found[2].error)
        assert not producer.stopped
        # Without a limit nothing is looked at, and runs go as a whole again.
        producer.limit_sends(None)
        producer.send(delayed(4, 10**9))
        bench.store(3)
        (receipt,) = await receipts(producer, 1)
        assert receipt.error is None

    on_bench(scenario)


def test_what_is_too_large_for_the_topic_is_refused_in_its_place() -> None:
    async def scenario(bench: Bench) -> None:
        small, large = message(0), message(1, "x" * 100)
        size = len(small.headers_and_payload)
        bench.producer.limit_sends(SendLimits(max_bytes=size))
        bench.producer.send_run(run_of([small, large]))
        # Chunks are as large as the broker takes them.
        chunk = rare(2, chunk=(0, 2))
        assert len(chunk.headers_and_payload) > size
        bench.producer.send(chunk)
        bench.store(0, 1)
        found = await receipts(bench.producer, 3)
        assert [each.error is None for each in found] == [True, False, True]
        assert f"at most {size}" in str(found[1].error)
        assert not bench.producer.stopped

    on_bench(scenario)


def test_a_limit_of_delays_does_not_make_a_stopped_producer_send() -> None:
    async def scenario(bench: Bench) -> None:
        bench.producer.stop()
        bench.producer.limit_sends(SendLimits(max_delay_ms=1000))
        bench.producer.limit_sends(None)
        bench.producer.send(message(0))
        assert not bench.futures

    on_bench(scenario)
