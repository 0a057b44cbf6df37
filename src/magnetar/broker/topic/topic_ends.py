"""Where the subscriptions of a terminated topic stand: at its end, or not yet.

Owns: `TopicEnds`: the signal for those who wait until all of a terminated topic is acknowledged.

Invariants:
1. On a terminated topic `moved` advances after every step that may bring a subscription to the end
   or away from it (acknowledgements, skips, seeks), and when one comes or goes.
2. A topic that is not terminated has no coroutine here, and none of its subscriptions is watched.

Relies on: a subscription's `wake`, which advances with each such step once its topic is sealed; a
topic that calls `watch` and `unwatch` as subscriptions come and go, and stops the coroutines.
"""

from __future__ import annotations

from collections.abc import Iterable

from magnetar.broker.subscribe.subscription import Subscription
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal


class TopicEnds:
    """Watches the subscriptions of one terminated topic."""

    def __init__(self, tasks: Service) -> None:
        self.moved = Signal()
        self._tasks = tasks
        self._watched: set[Subscription] = set()

    def watch(self, subscriptions: Iterable[Subscription]) -> None:
        """Watch those of them that are new."""
        for subscription in subscriptions:
            if subscription not in self._watched:
                self._watched.add(subscription)
                watch = self._watch(subscription, subscription.wake.version)
                self._tasks.spawn(watch, f"end of {subscription.name}")
        self.moved.advance()

    def unwatch(self, subscription: Subscription) -> None:
        """It is gone; one that was not watched is ignored."""
        if subscription in self._watched:
            self._watched.remove(subscription)
            subscription.wake.advance()

    async def _watch(self, subscription: Subscription, seen: int) -> None:
        while subscription in self._watched:
            seen = await subscription.wake.past(seen)
            self.moved.advance()
