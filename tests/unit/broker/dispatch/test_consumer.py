"""A consumer's outbox, permits and news, without a subscription."""

from __future__ import annotations

import asyncio

from harness.limits import PATIENCE_S
from magnetar.broker.api import Delivery
from magnetar.broker.dispatch.consumer import Consumer, News
from magnetar.broker.dispatch.dispatch_state import DispatchState
from magnetar.broker.dispatch.plan import DispatchLimits, MembershipChange
from magnetar.errors import ServiceNotReady
from magnetar.model.ids import Position
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from tests.unit.broker.subscription_world import EXCLUSIVE, options_of


def new_consumer(**limits: int) -> tuple[Consumer, DispatchState, Signal]:
    state = DispatchState(EXCLUSIVE, DispatchLimits(), topic="t")
    assert isinstance(state.on_join(7, "c"), MembershipChange)
    wake = Signal()
    consumer = Consumer(
        options_of(EXCLUSIVE),
        key=7,
        state=state,
        wake=wake,
        clock=SystemClock(),
        limits=Limits().override(limits),
    )
    return consumer, state, wake


def delivery(entry_id: int, size: int = 10, messages: int = 1) -> Delivery:
    return Delivery(Position(1, entry_id), bytes(size), messages)


def test_deliveries_leave_in_order_and_wake_the_session_once_per_offer() -> None:
    consumer, _, _ = new_consumer()
    consumer.offer([delivery(1), delivery(2)])
    consumer.offer([delivery(3)])
    assert consumer.outbox_ready.version == 2
    assert [each.position.entry_id for each in consumer.take()] == [1, 2, 3]
    assert consumer.take() == []
    assert (consumer.messages_out, consumer.bytes_out) == (3, 30)


def test_a_full_outbox_stops_the_choice_until_it_is_taken() -> None:
    consumer, state, wake = new_consumer(consumer_outbox_bytes=25)
    consumer.flow(100)
    before = wake.version
    consumer.offer([delivery(1), delivery(2)])
    assert state.next_read() is not None
    consumer.offer([delivery(3)])
    assert state.next_read() is None
    consumer.take()
    assert state.next_read() is not None
    assert wake.version == before + 1


def test_the_number_of_entries_is_bounded_too() -> None:
    consumer, state, _ = new_consumer(consumer_outbox_entries=2)
    consumer.flow(100)
    consumer.offer([delivery(1), delivery(2)])
    assert state.next_read() is None
    assert (consumer.outbox_entries, consumer.outbox_bytes) == (2, 20)


def test_a_dropped_outbox_gives_its_permits_back() -> None:
    consumer, _, _ = new_consumer()
    consumer.flow(1)
    consumer.offer([delivery(1, messages=5)])
    consumer.drop_outbox()
    assert consumer.permits == 6
    assert consumer.messages_out == consumer.bytes_out == 0
    assert consumer.take() == []


def test_news_are_the_last_activity_and_the_end_once() -> None:
    consumer, _, _ = new_consumer()
    consumer.tell_activity(False)
    consumer.tell_activity(True)
    consumer.tell_end()
    assert consumer.take_news() == [News.ACTIVE, News.REACHED_END]
    consumer.tell_end()
    assert consumer.take_news() == []


def test_a_stopped_consumer_takes_nothing_and_keeps_the_first_reason() -> None:
    consumer, _, _ = new_consumer()
    consumer.offer([delivery(1)])
    consumer.stop(ServiceNotReady("first"))
    consumer.stop(None)
    consumer.offer([delivery(2)])
    assert consumer.take() == []
    assert consumer.stopped.version == 1
    assert str(consumer.error).startswith("first")


def test_the_session_is_woken_by_each_kind_of_event() -> None:
    async def main() -> None:
        for event in ("offer", "news", "stop"):
            consumer, _, _ = new_consumer()
            waiting = asyncio.ensure_future(consumer.outbox_ready.past(0))
            await asyncio.sleep(0)
            if event == "offer":
                consumer.offer([delivery(1)])
            elif event == "news":
                consumer.tell_end()
            else:
                consumer.stop()
            await asyncio.wait_for(waiting, PATIENCE_S)

    asyncio.run(main())
