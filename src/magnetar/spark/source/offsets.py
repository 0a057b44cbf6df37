"""Pure: where a query is in its topics, and the JSON that Spark keeps of it.

Owns: `TopicOffset`, one topic; `Offset`, all of them; `Sentinel`, where a query without a
checkpoint is to begin; their canonical JSON:

    {"topics": {"topic://t/n/x": {"epoch": 9, "id": "5f", "seg": {"0": "D", "1": [7, 12, 0]}}},
     "v": 1}

Invariants:
1. Equal offsets have equal JSON, letter by letter: Spark compares the texts, and an offset that is
   written in another way would be new data for ever. Nothing volatile is in it.
2. A position is the next message to read. `D` (here None): the segment is sealed, and everything in
   it was read.
3. The first offset of a query holds the start that its sentinel was resolved to as `base`: Spark
   does not keep what `initialOffset` returns, and asks for the first batch again after a crash.
4. What `parse` takes, `format` gives back as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from magnetar.errors import WrongCheckpoint
from magnetar.model.ranges import RangePosition

VERSION: Final = 1
DRAINED: Final = "D"


@dataclass(frozen=True, slots=True)
class TopicOffset:
    """The place of a query in one topic."""

    creation_id: str
    epoch: int
    """The newest layout that was used: an older one would bring dropped segments back."""
    segments: Mapping[int, RangePosition | None]
    """Those that were begun; None: sealed, and read to its end."""


@dataclass(frozen=True, slots=True)
class Offset:
    """The place of a query in all its topics."""

    topics: Mapping[str, TopicOffset] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sentinel:
    """The beginning of a query without a checkpoint, as its options say it; not resolved."""

    start: str


def format_sentinel(sentinel: Sentinel) -> dict[str, Any]:
    return {"from": sentinel.start, "v": VERSION}


def format_offset(offset: Offset, base: Offset | None = None) -> dict[str, Any]:
    """The canonical form; `base`: the resolved start, in the first offset of a query."""
    made: dict[str, Any] = {}
    if base is not None:
        made["base"] = _topics(base)
    return made | {"topics": _topics(offset), "v": VERSION}


def parse_start(text: Mapping[str, Any]) -> Offset | Sentinel:
    """What Spark hands over as the start of a batch."""
    if "from" in text:
        return Sentinel(str(text["from"]))
    return parse_offset(text)


def parse_offset(text: Mapping[str, Any]) -> Offset:
    """What Spark hands over as the end of a batch; raises `WrongCheckpoint`."""
    _check_version(text)
    return _parsed(text.get("topics"))


def base_of(text: Mapping[str, Any]) -> Offset:
    """The resolved start that the first offset of a query holds."""
    _check_version(text)
    if "base" not in text:
        raise WrongCheckpoint("the first offset of the checkpoint does not say where it began")
    return _parsed(text["base"])


def _topics(offset: Offset) -> dict[str, Any]:
    # Sorted, since Spark compares texts (invariant 1).
    return {
        topic: {
            "epoch": place.epoch,
            "id": place.creation_id,
            "seg": {
                str(number): DRAINED if position is None else written(position)
                for number, position in sorted(place.segments.items())
            },
        }
        for topic, place in sorted(offset.topics.items())
    }


def written(position: RangePosition) -> list[int]:
    return [position.ledger, position.entry, position.batch_index]


def _check_version(text: Mapping[str, Any]) -> None:
    version = text.get("v")
    # A checkpoint of another source has no version; one of a newer release has a greater one.
    if version != VERSION:
        found = "is none of this source's" if version is None else f"has version {version}"
        raise WrongCheckpoint(f"an offset in the checkpoint {found}")


def _parsed(topics: object) -> Offset:
    try:
        return Offset({topic: _place(place) for topic, place in _mapping(topics).items()})
    except (KeyError, TypeError, ValueError) as error:
        raise WrongCheckpoint(f"an offset cannot be read: {error!r}") from error


def _place(text: object) -> TopicOffset:
    place = _mapping(text)
    # Keys of JSON are text; positions become tuples, which compare in the order of the log.
    segments = {
        int(number): None if found == DRAINED else read_position(found)
        for number, found in _mapping(place["seg"]).items()
    }
    return TopicOffset(str(place["id"]), int(place["epoch"]), segments)


def read_position(text: object) -> RangePosition:
    """Read a position from `[ledger, entry, batch index]`; raises `ValueError`."""
    if not isinstance(text, list | tuple) or len(text) != 3:
        raise ValueError(f"{text!r} is no position")
    if not all(isinstance(each, int) and each >= 0 for each in text):
        raise ValueError(f"{text!r} is no position")
    return RangePosition(*text)


def _mapping(text: object) -> Mapping[str, Any]:
    if not isinstance(text, Mapping):
        raise ValueError(f"{text!r} is no object")
    return text
