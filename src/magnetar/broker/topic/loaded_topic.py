"""What a broker serves under the name of a topic."""

from __future__ import annotations

from typing import TypeAlias

from magnetar.broker.topic.nonpersistent import NonPersistentTopic
from magnetar.broker.topic.topic import Topic

LoadedTopic: TypeAlias = Topic | NonPersistentTopic
