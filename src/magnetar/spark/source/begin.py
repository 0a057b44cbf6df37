"""Pure: where a read is to begin and to end, as a user says it.

Owns: `Bound`, one topic's beginning or end, and `read_bounds`, from the text of `startingOffsets`
or `endingOffsets`: `earliest`, `latest`, an offset of this source, or an object with a place for
each topic:

    {"orders": "earliest", "topic://public/default/x": {"0": "7:12:0", "1": "latest"}}

Invariants:
1. A text and its sentinel say the same: `read_bounds` is all that is needed of it after a restart.
2. A message id begins with that message: it is the first that is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from magnetar.errors import InvalidSetting, MagnetarError
from magnetar.model.names import TopicName
from magnetar.model.ranges import RangePosition
from magnetar.spark.source.offsets import TopicOffset, parse_offset, read_position

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

_WORDS: Final = (EARLIEST, LATEST)
# As the column `messageId` shows it; the batch index may be left out.
_MESSAGE_ID: Final = re.compile(r"(\d{1,19}):(\d{1,19})(?::(\d{1,9}))?")
_TIME: Final = re.compile(r"time:(\d+)")
_HINT: Final = (
    'use earliest, latest, an offset of this source, or {"topic": "earliest"} with a place for '
    'every topic, or {"topic": {"segment": "ledger:entry:index"}}'
)


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of one topic: a word, a time, a place of an offset, or positions by segment."""

    word: str | None = None
    time_ms: int | None = None
    place: TopicOffset | None = None
    segments: Mapping[int, RangePosition | str] | None = None


def at_time(time_ms: int) -> str:
    """The text of a sentinel that begins at a time."""
    return f"time:{time_ms}"


def read_bounds(name: str, text: str, topics: Iterable[str]) -> dict[str, Bound]:
    """A bound for every topic; raises `InvalidSetting` about the option `name`."""
    wanted = list(topics)
    word = text.strip().lower()
    # One word for all topics; a time, which only a sentinel of ours holds; else JSON.
    if word in _WORDS:
        return dict.fromkeys(wanted, Bound(word))
    if found := _TIME.fullmatch(text):
        return dict.fromkeys(wanted, Bound(time_ms=int(found[1])))
    try:
        parsed = json.loads(text)
        bounds = _by_topic(parsed) if isinstance(parsed, dict) else _refuse(f"{text!r} is none")
    except (ValueError, MagnetarError) as error:
        said = error.args[0] if isinstance(error, MagnetarError) else error
        raise InvalidSetting(f"the option {name} cannot be used: {said}", hint=_HINT) from None
    # Every topic needs a place, and no other may be named: a mistyped name would silently read from
    # somewhere else.
    missing = [topic for topic in wanted if topic not in bounds]
    foreign = [topic for topic in bounds if topic not in wanted]
    if foreign:
        raise InvalidSetting(f"the option {name} names {foreign[0]}, which is not read")
    if missing:
        raise InvalidSetting(f"the option {name} does not say where {missing[0]} begins or ends")
    return bounds


def _by_topic(parsed: Mapping[str, Any]) -> dict[str, Bound]:
    # An offset of this source, as it stands in a checkpoint. A topic that is called `v` has to be
    # named in full.
    if "v" in parsed:
        return {topic: Bound(place=at) for topic, at in parse_offset(parsed).topics.items()}
    return {str(TopicName.parse(topic)): _bound(at) for topic, at in parsed.items()}


def _bound(at: object) -> Bound:
    if isinstance(at, dict):
        return Bound(segments={_number(number): _position(each) for number, each in at.items()})
    if isinstance(at, str) and at.lower() in _WORDS:
        return Bound(at.lower())
    _refuse(f"{at!r} is no place in a topic")


def _number(text: str) -> int:
    if not text.isdecimal():
        _refuse(f"{text!r} is no segment")
    return int(text)


def _position(at: object) -> RangePosition | str:
    # A word for one segment, the id of a message, or a position as offsets write it.
    if isinstance(at, str):
        if at.lower() in _WORDS:
            return at.lower()
        if found := _MESSAGE_ID.fullmatch(at):
            return RangePosition(int(found[1]), int(found[2]), int(found[3] or 0))
    return read_position(at)


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)
