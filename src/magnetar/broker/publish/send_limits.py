"""Pure: the limits that a topic's policies set to a single message.

Owns: `SendLimits`. A topic without such limits has none of these, so nothing is looked at.
"""

from __future__ import annotations

from typing import NamedTuple

from magnetar.broker.entries import UNPLACED, EntryView, may_be_delayed
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.errors import MetadataError, NotAllowed
from magnetar.model.names import TopicName
from magnetar.wire.messages import Send


class SendLimits(NamedTuple):
    """The limits of each message of a topic; 0 is none."""

    max_delay_ms: int = 0
    """From its publishing to its time of delivery."""
    max_bytes: int = 0
    """Of its metadata and payload as they are stored; chunks are made as large as the broker
    takes them, and have no other limit."""
    encrypted_only: bool = False
    """Whether each must name an encryption key."""

    @classmethod
    def of(cls, policies: TopicPolicies, topic: TopicName) -> SendLimits | None:
        """None: there are no limits."""
        delay_ms = policies.delayed_delivery.max_delivery_delay_in_millis
        # Brokers and tools write system topics themselves, and have no keys.
        encrypted_only = policies.encryption_required and not topic.is_system
        if not (delay_ms or policies.max_message_bytes or encrypted_only):
            return None
        return cls(delay_ms, policies.max_message_bytes, encrypted_only)

    def refusal(self, send: Send) -> NotAllowed | MetadataError | None:
        """Why a message is beyond them; None: it is not."""
        payload = send.headers_and_payload
        if self.max_bytes and len(payload) > self.max_bytes and not send.is_chunk:
            return NotAllowed(
                f"message {send.sequence_id} of producer {send.producer_id} has {len(payload)} "
                "bytes",
                hint=f"the topic takes at most {self.max_bytes}",
            )
        if self.encrypted_only and not EntryView(UNPLACED, payload).metadata.encryption_keys:
            return MetadataError(
                f"message {send.sequence_id} of producer {send.producer_id} is not encrypted",
                hint="this topic takes encrypted messages only",
            )
        if not self.max_delay_ms or not may_be_delayed(payload):
            return None
        view = EntryView(UNPLACED, payload)
        delay_ms = (view.deliver_at or 0) - view.publish_time
        if delay_ms <= self.max_delay_ms:
            return None
        return NotAllowed(
            f"message {send.sequence_id} of producer {send.producer_id} is to be delivered "
            f"{delay_ms} ms after it was published",
            hint=f"the longest delay here is {self.max_delay_ms} ms",
        )
