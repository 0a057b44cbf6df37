"""The state beside one scalable topic, kept in memory by its controller.

Owns: `TopicState`: the records of a topic's state directory, followed by one watch; and
`read_segments`, what the marks of a checkpoint group mean.

Invariants:
1. `changes`, which its owner gives, advances after the view changed.
2. The view is what the store held at some moment not long ago. Decisions that need the present
   (which subscriptions there are, before segments are sealed) read the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from typing import TypeVar

import msgspec

from magnetar.metadata.api import MetadataStore, Record
from magnetar.metadata.recipes import TableView
from magnetar.model.names import TopicName
from magnetar.runtime.signal import Signal
from magnetar.scalable.records import (
    DrainedRecord,
    GroupRecord,
    LoadRecord,
    SubscriptionRecord,
    decode,
    kind_of_key,
    segment_of_key,
    state_directory,
)

Body = TypeVar("Body", bound=msgspec.Struct)


class TopicState:
    """A live view; run `run` in a task."""

    def __init__(self, metadata: MetadataStore, topic: TopicName, changes: Signal) -> None:
        self._view = TableView(metadata, state_directory(topic), changes)
        # Decoded once per version: a controller looks at everything each time that anything moves.
        self._decoded: dict[str, tuple[int, msgspec.Struct]] = {}

    @property
    def is_loaded(self) -> bool:
        return self._view.is_loaded

    async def run(self) -> None:
        """Follow the directory until the store object is closed."""
        await self._view.run()

    def subscriptions(self) -> list[SubscriptionRecord]:
        return self._all("sub", SubscriptionRecord)

    def groups(self) -> list[GroupRecord]:
        return self._all("group", GroupRecord)

    def loads(self) -> dict[int, LoadRecord]:
        return {each.segment_id: each for each in self._all("load", LoadRecord)}

    def drained(self, subscription: str) -> set[int]:
        """Segments of which a subscription has acknowledged everything, durably."""
        marks = self._all("drained", DrainedRecord)
        return {each.segment_id for each in marks if each.group == subscription}

    def drained_by_all(self) -> set[int] | None:
        """Sealed segments that every subscription has drained, as far as is known.

        None: there is no subscription.
        """
        names = {each.name for each in self.subscriptions()}
        if not self.is_loaded:
            return set()
        if not names:
            return None
        # In one pass: there may be as many marks as segments times subscriptions.
        marks = (each for each in self._all("drained", DrainedRecord) if each.group in names)
        counts = Counter(each.segment_id for each in marks)
        return {number for number, count in counts.items() if count == len(names)}

    def done(self, group: GroupRecord) -> set[int]:
        """Segments that a checkpoint group's present owners have read to the end."""
        return read_segments(group, self._all("done", DrainedRecord))

    def keys_of(self, prefix: str, group: str) -> list[str]:
        """The keys of the marks of one subscription or group."""
        return [
            key
            for key, each in self._view.records.items()
            if kind_of_key(key) == prefix and self._body(each, DrainedRecord).group == group
        ]

    def keys_beside(self, segment_ids: Set[int]) -> list[str]:
        """The keys of what is kept about other segments than these."""
        return [
            key
            for key in self._view.records
            if kind_of_key(key) in ("drained", "done", "load")
            and segment_of_key(key) not in segment_ids
        ]

    def _all(self, prefix: str, kind: type[Body]) -> list[Body]:
        found = self._view.records.items()
        return [self._body(each, kind) for key, each in found if kind_of_key(key) == prefix]

    def _body(self, record: Record, kind: type[Body]) -> Body:
        known = self._decoded.get(record.key)
        if known is not None and known[0] == record.version and isinstance(known[1], kind):
            return known[1]
        body = decode(record, kind)
        self._decoded[record.key] = record.version, body
        return body


def read_segments(group: GroupRecord, marks: Iterable[DrainedRecord]) -> set[int]:
    """Segments that a checkpoint group's present owners have read to the end, by their marks."""
    # What a former owner read does not count: the present one has no position there (see
    # `assignment`).
    return {
        each.segment_id
        for each in marks
        if each.group == group.name and each.member in group.owners.get(each.segment_id, ())
    }
