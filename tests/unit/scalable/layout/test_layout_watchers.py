"""Who follows which layout, and how far."""

from __future__ import annotations

from magnetar.model.names import TopicName
from magnetar.scalable.layout.layout_watchers import Followers
from tests.unit.scalable.world import TOPIC

OTHER = TopicName.parse("topic://public/default/other")


def test_a_connection_follows_while_it_has_a_watch() -> None:
    followers, connection = Followers(), object()
    watches = [followers.add(TOPIC, connection, 0) for _ in range(2)]
    assert not followers.follows(OTHER, connection)
    assert not followers.follows(TOPIC, object())
    for watch in watches:
        assert followers.follows(TOPIC, connection)
        followers.remove(watch)
    assert not followers.follows(TOPIC, connection)


def test_all_were_told_when_the_last_one_was() -> None:
    followers, connection = Followers(), object()
    assert followers.were_told(TOPIC, 5)  # there is nobody to be told
    first, second = (followers.add(TOPIC, connection, 4) for _ in range(2))
    followers.add(OTHER, connection, 0)
    seen = followers.moved.version
    followers.told(first, 5)
    assert not followers.were_told(TOPIC, 5)
    assert followers.moved.version == seen
    followers.told(second, 6)
    assert followers.were_told(TOPIC, 5)
    assert not followers.were_told(TOPIC, 6)
    assert followers.moved.version > seen


def test_a_watch_that_ends_need_not_be_told() -> None:
    followers = Followers()
    late = followers.add(TOPIC, object(), 4)
    followers.add(TOPIC, object(), 5)
    seen = followers.moved.version
    assert not followers.were_told(TOPIC, 5)
    followers.remove(late)
    assert followers.were_told(TOPIC, 5)
    assert followers.moved.version > seen
