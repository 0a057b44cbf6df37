"""Who follows which layout, and how far."""

from __future__ import annotations

from magnetar.model.names import TopicName
from magnetar.scalable.layout.layout_watchers import LayoutWatchers
from tests.unit.scalable.world import TOPIC

OTHER = TopicName.parse("topic://public/default/other")


def test_a_connection_follows_while_it_has_a_watch() -> None:
    layout_watchers, connection = LayoutWatchers(), object()
    watches = [layout_watchers.add(TOPIC, connection, 0) for _ in range(2)]
    assert not layout_watchers.follows(OTHER, connection)
    assert not layout_watchers.follows(TOPIC, object())
    for watch in watches:
        assert layout_watchers.follows(TOPIC, connection)
        layout_watchers.remove(watch)
    assert not layout_watchers.follows(TOPIC, connection)


def test_all_were_told_when_the_last_one_was() -> None:
    layout_watchers, connection = LayoutWatchers(), object()
    assert layout_watchers.were_told(TOPIC, 5)  # there is nobody to be told
    first, second = (layout_watchers.add(TOPIC, connection, 4) for _ in range(2))
    layout_watchers.add(OTHER, connection, 0)
    seen = layout_watchers.moved.version
    layout_watchers.told(first, 5)
    assert not layout_watchers.were_told(TOPIC, 5)
    assert layout_watchers.moved.version == seen
    layout_watchers.told(second, 6)
    assert layout_watchers.were_told(TOPIC, 5)
    assert not layout_watchers.were_told(TOPIC, 6)
    assert layout_watchers.moved.version > seen


def test_a_watch_that_ends_need_not_be_told() -> None:
    layout_watchers = LayoutWatchers()
    late = layout_watchers.add(TOPIC, object(), 4)
    layout_watchers.add(TOPIC, object(), 5)
    seen = layout_watchers.moved.version
    assert not layout_watchers.were_told(TOPIC, 5)
    layout_watchers.remove(late)
    assert layout_watchers.were_told(TOPIC, 5)
    assert layout_watchers.moved.version > seen
