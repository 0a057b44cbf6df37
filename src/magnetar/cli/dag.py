"""Pure: the segments of a scalable topic drawn as text.

One line per segment. Generations are columns of a tree: a segment stands below the last of its
parents, and to the right of it, so whoever reads from the top has read every parent before its
children. The ring is drawn beside it, to the same scale on every line: what was split and merged,
and where, is seen without reading a number. Every child names all its parents.

Invariants:
1. Every segment has exactly one line, however many parents it has, and none is drawn before those
   of its parents.
2. A line holds no more than the tree needs: 64 segments and their parents are 127 lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

RING_SIZE: Final = 65536

# A cell is a 32nd of the ring: five splits in a row can be told apart.
_RING_CELLS: Final = 32
_FULL: Final = {"ACTIVE": "█", "SEALED": "░"}
_OUTSIDE: Final = "·"
_SHORT: Final = 8
"""A list of ids with more pieces than this is cut."""


class SegmentLine(NamedTuple):
    """One segment."""

    text: str
    active: bool


class _Node(NamedTuple):
    segment: Mapping[str, Any]
    stem: str
    """What is drawn before its id."""


def draw(record: Mapping[str, Any]) -> list[SegmentLine]:
    """The lines of a topic, from its record in the form of the admin interface."""
    nodes = _ordered(record["segments"])
    if not nodes:
        return []
    width = max(len(node.stem) + len(str(node.segment["segmentId"])) for node in nodes)
    return [_line(node, width) for node in nodes]


def _line(node: _Node, width: int) -> SegmentLine:
    segment = node.segment
    start, end = segment["hashRange"]["start"], segment["hashRange"]["end"]
    tree = f"{node.stem}{segment['segmentId']}".ljust(width)
    state = segment["state"].lower()
    text = f"{tree}  {start:04x}-{end:04x}  {state}  {_ring(start, end, segment['state'])}"
    buckets = len(segment.get("entryBucketSplits") or ()) + 1
    notes = [
        f"from {id_list(segment['parentIds'])}" if segment["parentIds"] else "",
        f"into {id_list(segment['childIds'])}" if segment["childIds"] else "",
        f"{buckets} buckets" if buckets > 1 and state == "active" else "",
        f"= {segment['legacyTopicName']}" if segment.get("legacyTopicName") else "",
    ]
    return SegmentLine("  ".join([text, *filter(None, notes)]), state == "active")


def _ring(start: int, end: int, state: str) -> str:
    """The part of the ring that a segment has; at least one cell, however small it is."""
    first = start * _RING_CELLS // RING_SIZE
    # Rounded outwards, so that a small segment is seen and neighbours have no gap between them.
    last = max(first, ((end + 1) * _RING_CELLS - 1) // RING_SIZE)
    inside = _FULL.get(state, "?") * (last - first + 1)
    return _OUTSIDE * first + inside + _OUTSIDE * (_RING_CELLS - 1 - last)


def id_list(ids: Sequence[int]) -> str:
    """Ids, those that follow one another as `a-b`."""
    pieces: list[str] = []
    first = last = None
    # The None at the end closes the last run.
    for number in [*sorted(ids), None]:
        if last is not None and number == last + 1:
            last = number
            continue
        if first is not None and last is not None:
            # Two neighbours as `3,4`: `3-4` would look like a range of more.
            gap = "-" if last > first + 1 else ","
            pieces.append(str(first) if first == last else f"{first}{gap}{last}")
        first = last = number
    if len(pieces) > _SHORT:
        pieces = [*pieces[:_SHORT], f"... ({len(ids)})"]
    return ",".join(pieces)


# --- the tree


def _ordered(segments: Mapping[str, Mapping[str, Any]]) -> list[_Node]:
    by_id = {each["segmentId"]: each for each in segments.values()}
    # Parents that are still to be drawn; pruned ones are not waited for.
    waiting = {
        number: sum(parent in by_id for parent in each["parentIds"])
        for number, each in by_id.items()
    }
    found: list[_Node] = []
    # A stack instead of calls: a topic that was split and merged for long is deep.
    roots = [number for number, parents in waiting.items() if not parents]
    stack = [(number, "", "") for number in reversed(_in_ring_order(by_id, roots))]
    while stack:
        number, stem, below = stack.pop()
        segment = by_id[number]
        found.append(_Node(segment, stem))
        ready = []
        for child in segment["childIds"]:
            if child in by_id:
                waiting[child] -= 1
                # Invariant 1: a merged segment is drawn below the last of its parents, and once.
                if not waiting[child]:
                    ready.append(child)
        children = _in_ring_order(by_id, ready)
        for child in reversed(children):
            is_last = child == children[-1]
            turn, rest = ("└─", "  ") if is_last else ("├─", "│ ")
            stack.append((child, f"{below}{turn}", f"{below}{rest}"))
    return found


def _in_ring_order(by_id: Mapping[int, Mapping[str, Any]], ids: Iterable[int]) -> list[int]:
    return sorted(ids, key=lambda number: (by_id[number]["hashRange"]["start"], number))
