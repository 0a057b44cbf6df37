"""What a broker serves under the name of a topic."""

from __future__ import annotations

from typing import TypeAlias

from magnetar.broker.nonpersistent import NonPersistentTopic
from magnetar.broker.topic import Topic

LoadedTopic: TypeAlias = Topic | NonPersistentTopic
