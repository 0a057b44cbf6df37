"""The names that producers and consumers may use, where scalable topics are served too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from magnetar.errors import NotAllowed, TopicNotFound, TopicTerminated
from magnetar.model.names import Domain, TopicName
from magnetar.server.context import Context


async def admit(context: Context, name: TopicName) -> None:
    """Refuse a scalable topic, which has no messages itself, and segments that there are not."""
    # A v4 client that was given a v5 name: told what to do, not that the topic is missing.
    if name.domain is Domain.TOPIC:
        context.check_scalable()
        raise NotAllowed(
            f"{name} is a scalable topic: its messages are in its segments",
            hint="use a client of version 5, which looks up where they are",
        )
    # Segments exist as their layout says: a client must not bring one back that was pruned.
    if name.domain is Domain.SEGMENT:
        await context.scalable.admit(name)


async def admit_producer(context: Context, name: TopicName) -> None:
    """Refuse producers of a segment while the backlog of its whole topic is too large."""
    if name.domain is Domain.SEGMENT:
        await context.scalable.admit_producer(name)


@contextmanager
def used(context: Context, name: TopicName) -> Iterator[None]:
    """Where a topic is used: what fails because it was migrated says so."""
    try:
        yield
    except (TopicNotFound, TopicTerminated) as error:
        raise context.explained(name, error) from error


def may_create(context: Context, name: TopicName) -> bool:
    """Whether using a name may create the topic: no segment, and nothing that was migrated."""
    if name.domain.is_scalable:
        return False
    if name.domain is not Domain.PERSISTENT or not context.has_scalable:
        return True
    # A regular topic of this name may be gone because it was migrated: its old producers must not
    # make it anew. The cache is enough, since creating checks again.
    return context.scalable.layouts.cached(name.scalable_topic()) is None
