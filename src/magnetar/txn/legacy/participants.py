"""What the coordinator of a legacy transaction asks of its topics and subscriptions.

Owns: `Participants`, the seam between a coordinator and whatever holds topics.

Invariants that whoever implements it keeps:
1. A return means that the end is done and durable, or that there is nothing to end: the topic or
   the subscription never was, is gone, or has nothing of this transaction.
2. Both are idempotent: the coordinator repeats them until one call returned, also after a restart.
3. What may pass by itself is raised as `ServiceNotReady`, `Unavailable` or another transient error;
   the coordinator then tries again.

`low_watermark`: no transaction of this coordinator at or below this number is open any more.
"""

from __future__ import annotations

from typing import Protocol

from magnetar.wire.messages import TxnId


class Participants(Protocol):
    """Where legacy transactions end."""

    async def end_on_topic(
        self, topic: str, txn: TxnId, *, commit: bool, low_watermark: int
    ) -> None: ...

    async def end_on_subscription(
        self, topic: str, subscription: str, txn: TxnId, *, commit: bool, low_watermark: int
    ) -> None: ...
