"""Which names producers and consumers may use, where scalable topics are served too."""

from __future__ import annotations

from magnetar.errors import NotAllowed
from magnetar.model.names import Domain, TopicName
from magnetar.server.context import Context


async def admit(context: Context, name: TopicName) -> None:
    """Refuse a scalable topic, which has no messages itself, and segments that there are not."""
    if name.domain is Domain.TOPIC:
        context.check_scalable()
        raise NotAllowed(
            f"{name} is a scalable topic: its messages are in its segments",
            hint="use a client of version 5, which looks up where they are",
        )
    if name.domain is Domain.SEGMENT:
        await context.scalable.admit(name)


def may_create(context: Context, name: TopicName) -> bool:
    """Whether using a name may create the topic: no segment, and nothing that was migrated."""
    if name.domain.is_scalable:
        return False
    if name.domain is not Domain.PERSISTENT or not context.has_scalable:
        return True
    return context.scalable.layouts.cached(name.scalable_topic()) is None
