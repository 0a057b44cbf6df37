"""Pure: what a reader of the compacted view of a simulated topic may see.

Owns: `wrong_with`, which compares what such a reader got with the messages that were sent, and
`left_of`, the messages that compaction leaves, both written apart from the product's.

Invariants:
1. What was seen is right if one horizon explains all of it: up to it the last message of each key
   that does not delete the key, in its place and as it was sent; behind it the log as it is.
2. The horizon is nowhere below that of a run that reported its success, nor below anything that
   the log has dropped: nothing may be trimmed before it was compacted.
3. A batch that cannot be opened is seen as a whole. A message without a key is not seen.
4. Where the log drops entries, one whose receipt was lost may have gone unseen: a key that such a
   one may have deleted may be missing.

Relies on: nobody publishing or compacting while log and view are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from harness.simulation.broker.history import NOWHERE, Sent, TopicStory
from magnetar.model.ids import Position
from magnetar.wire.messages import metadata_of, payload_offset
from magnetar.wire.pb import pulsar_pb2 as pb

_SIZE_BYTES: Final = 4


class Shown(NamedTuple):
    """One message that a reader sees, or an entry that it sees as a whole."""

    position: Position
    number: int
    data: bytes


def wrong_with(
    story: TopicStory, log: Sequence[Position], view: Sequence[tuple[Position, bytes]]
) -> str:
    """What no horizon explains; empty: one does. `log` is all that the log has now."""
    positions = [position for position, _ in view]
    if sorted(set(positions)) != positions:
        return f"the view is out of order: {positions}"
    seen: list[Shown] = []
    for position, payload in view:
        sent = _sent(story, position, payload)
        if sent is None:
            return f"the view has {position}, which nobody sent"
        story.stored(position, sent)
        seen += _opened(position, payload, sent)
    present = set(log)
    dropped = max((each for each in story.at if each not in present), default=NOWHERE)
    least = max(story.horizon_min, dropped)
    doubtful = _doubtful(story)
    first = ""
    # Cases: a horizon is nowhere, so that there is no view, or any entry from the least one on.
    for horizon in [NOWHERE, *sorted(story.at)]:
        if horizon < least:
            continue
        wrong = _differs(left_of(story.at, horizon), seen, doubtful)
        if not wrong:
            return ""
        first = first or f"of a view from {horizon} on, {wrong}"
    return first


def left_of(log: Mapping[Position, Sent], horizon: Position) -> dict[Shown, str | None]:
    """The messages that are seen, in order, with the keys by which compaction leaves them."""
    latest: dict[str, tuple[Position, int]] = {}
    ordered = sorted(log)
    for position in ordered:
        if position > horizon:
            break
        for index, part in enumerate(log[position].parts):
            if part.key is not None:
                latest[part.key] = (position, index)
    left: dict[Shown, str | None] = {}
    for position in ordered:
        sent = log[position]
        if position > horizon or not sent.parts:
            left |= dict.fromkeys(_opened(position, sent.payload, sent))
            continue
        for index, part in enumerate(sent.parts):
            if part.key is None or part.is_null or latest[part.key] != (position, index):
                continue
            left[Shown(position, index, part.data or sent.payload)] = part.key
    return left


def _differs(due: Mapping[Shown, str | None], seen: Iterable[Shown], doubtful: set[str]) -> str:
    """The first difference; empty: none."""
    found = set(seen)
    for each in seen:
        if each not in due:
            return f"{each.position} (message {each.number}) is seen, and is not due"
    for each, key in due.items():
        if each not in found and key not in doubtful:
            return f"{each.position} (message {each.number}, key {key}) is not seen"
    return ""


def _doubtful(story: TopicStory) -> set[str]:
    """The keys that entries may have deleted that nobody saw (invariant 4)."""
    return {
        part.key
        for producer in story.producers
        for sent in producer.sends
        if story.trims and sent.tries and not sent.positions
        for part in sent.parts
        if part.key is not None and part.is_null
    }


def _sent(story: TopicStory, position: Position, payload: bytes) -> Sent | None:
    """The send that an entry was or is left of."""
    known = story.at.get(position)
    if known is not None:
        return known
    metadata = metadata_of(payload)
    for producer in story.producers:
        for sent in producer.sends:
            if (producer.name, sent.sequence_id) == (metadata.producer_name, metadata.sequence_id):
                return sent
    return None


def _opened(position: Position, payload: bytes, sent: Sent) -> list[Shown]:
    """The messages in an entry, without those that were compacted out."""
    if len(sent.parts) < 2:
        return [Shown(position, 0, payload)]
    found, rest = [], payload[payload_offset(payload) :]
    for index in range(sent.messages):
        size = int.from_bytes(rest[:_SIZE_BYTES], "big")
        head = pb.SingleMessageMetadata.FromString(rest[_SIZE_BYTES : _SIZE_BYTES + size])
        end = _SIZE_BYTES + size + head.payload_size
        if not head.compacted_out:
            found.append(Shown(position, index, rest[:end]))
        rest = rest[end:]
    return found
