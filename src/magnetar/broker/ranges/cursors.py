"""A durable cursor that follows who reads ranges: for backlogs and retention, not for reading.

Owns: `move_cursor`.

Invariants:
1. Everything before the position is acknowledged, durably, when it returns; the position's own
   batch in part if it stands inside it. A cursor never goes back, so a repeated or late move does
   nothing.
2. A position that was trimmed is passed already; one behind the end is refused.
"""

from __future__ import annotations

from magnetar.broker.dispatch.dispatcher import messages_in
from magnetar.broker.ranges.view import RangeView
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.errors import NotAllowed
from magnetar.model.names import TopicName
from magnetar.model.ranges import RangePosition


async def move_cursor(
    view: RangeView, name: TopicName, subscription: Subscription, position: RangePosition | None
) -> None:
    """Move a cursor on to a position; None: to the end of a topic that takes no more messages."""
    state = view.state()
    # A sealed segment has an end: who has read all of it need not know where that is.
    if position is None:
        if not state.is_sealed:
            raise NotAllowed(f"{name} has no end yet", hint="name the position to move to")
        position = state.stable
    elif position > view.tail():
        raise NotAllowed(f"{name} ends at {view.tail()}: no cursor can be moved to {position}")
    # Inside a batch: the messages before it are acknowledged by index (PIP-54). One that is gone
    # was trimmed, and all of it is passed.
    if position.batch_index:
        unacked = await _unacked(view, position)
        if unacked is not None:
            await subscription.move_to(position.at, unacked)
            return
    last = view.ledger.last_valid(position.at.previous)
    if last is not None:
        await subscription.move_to(last)


async def _unacked(view: RangeView, position: RangePosition) -> int | None:
    """Which messages of its batch are still to be read; None: it is not there."""
    entries = await view.ledger.read(position.at, 1)
    if not entries or entries[0].position != position.at:
        return None
    count = messages_in(entries[0].payload)
    return ((1 << count) - 1) >> position.batch_index << position.batch_index
