"""Limits of single messages: what is refused, and that nothing is looked at without them."""

from __future__ import annotations

from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.values import DelayedDeliveryPolicies
from magnetar.broker.publish.send_limits import SendLimits
from magnetar.model.names import TopicName
from magnetar.wire.messages import Send, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb

PUBLISHED_MS = 9

NAME = TopicName.parse("public/default/orders")


def send(**fields: int) -> Send:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=5, publish_time=PUBLISHED_MS)
    for name, value in fields.items():
        setattr(metadata, name, value)
    return Send(1, 5, 1, encode_entry(metadata, b"payload"))


def test_too_late_is_later_than_the_limit_after_its_publish_time() -> None:
    limits = SendLimits(max_delay_ms=10)
    for fields in ({}, {"deliver_at_time": 19}, {"deliver_at_time": -1}):
        assert limits.refusal(send(**fields)) is None
    refused = limits.refusal(send(deliver_at_time=20))
    assert refused is not None
    assert "11 ms" in str(refused)


def test_too_large_is_larger_than_the_limit() -> None:
    size = len(send().headers_and_payload)
    assert SendLimits(max_bytes=size).refusal(send()) is None
    refused = SendLimits(max_bytes=size - 1).refusal(send())
    assert refused is not None
    assert f"{size} bytes" in str(refused)


def test_there_are_none_unless_a_policy_says_so() -> None:
    assert SendLimits.of(TopicPolicies(), NAME) is None
    assert SendLimits.of(TopicPolicies(max_message_bytes=5), NAME) == SendLimits(0, 5)
    delays = DelayedDeliveryPolicies(True, 1000, 7)
    assert SendLimits.of(TopicPolicies(delayed_delivery=delays), NAME) == SendLimits(7, 0)
    secret = TopicPolicies(encryption_required=True)
    assert SendLimits.of(secret, NAME) == SendLimits(encrypted_only=True)
    for system in ("public/default/__change_events-partition-3", "pulsar/system/any"):
        assert SendLimits.of(secret, TopicName.parse(system)) is None
    assert SendLimits.of(secret, TopicName.parse("public/default/__mine")) is not None
