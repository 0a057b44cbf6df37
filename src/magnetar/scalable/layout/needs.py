"""The needs for what is in a sealed segment: whether anybody has one, and who.

Owns: `why_needed`, the one rule by which segments are pruned and by which an operator may delete
one without force.

Invariants:
1. A segment is needed by a subscription that has not drained it or is not on all segments yet, by a
   checkpoint group that has not read it, by a reader that is connected to it, and by a transaction
   that is undecided there.
2. What was drained is marked durably: a segment need not be loaded to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from magnetar.model.names import TopicName
from magnetar.model.segments import Segment
from magnetar.scalable.layout.segments import SegmentHost
from magnetar.scalable.records import SubscriptionRecord, segment_topic


async def why_needed(
    topic: TopicName,
    segment: Segment,
    host: SegmentHost,
    subscriptions: Iterable[SubscriptionRecord],
    drained_by: Callable[[str], Collection[int]],
    unread_by: Collection[str],
) -> str | None:
    """Tell who needs a segment; None: nobody does.

    `drained_by` are the segments that a subscription has drained, `unread_by` the checkpoint groups
    that have not read this one.
    """
    name = segment_topic(topic, segment)
    for subscription in subscriptions:
        # Invariant 2.
        if segment.segment_id in drained_by(subscription.name):
            continue
        # None: it has no cursor there, so nothing there is owed to it.
        backlog = await host.backlog(name, subscription.name)
        if backlog not in (0, None):
            return f"subscription {subscription.name!r} has a backlog of {backlog} in it"
        if not subscription.established:
            return f"subscription {subscription.name!r} is being created"
    # Checkpoint groups keep their positions themselves; only their marks tell what they have read.
    if unread_by:
        return f"checkpoint group {min(unread_by)!r} has not read it"
    if (await host.use(name)).readers:
        return "a reader is connected to it"
    # An undecided transaction may yet have to show entries here ('sealing is irrelevant').
    if await host.undecided(name):
        return "a transaction in it is not decided"
    return None
