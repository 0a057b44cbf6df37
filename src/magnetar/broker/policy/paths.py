"""Keys of the records of scalable topics (pure): regular ones of their names are refused."""

from __future__ import annotations

from typing import Final

from magnetar.managed_ledger.names import encode_name
from magnetar.model.names import TopicName

# Below the broker, so that it can refuse these names without knowing scalable topics.
SCALABLE_TOPICS: Final = "/scalable/topics"


def scalable_key(topic: TopicName) -> str:
    """The record of a scalable topic, by its name, a segment's, or that of a regular topic."""
    return f"{SCALABLE_TOPICS}/{encode_name(str(topic.scalable_topic()))}"
