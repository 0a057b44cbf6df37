"""Commands of ranges that are refused, and with which code."""

from __future__ import annotations

from typing import Any

from magnetar.errors import WireCode

_AT = {"ledger_id": 1, "entry_id": 1}
_SPAN = {"topic": "missing", "start": _AT, "end": _AT}

REFUSED_RANGES: list[tuple[str, dict[str, Any], WireCode]] = [
    ("LAYOUT", {"topic": "missing"}, WireCode.TOPIC_NOT_FOUND),
    ("LAYOUT", {"topic": "topic://public/default/missing"}, WireCode.TOPIC_NOT_FOUND),
    ("LAYOUT", {"topic": "non-persistent://public/default/x"}, WireCode.NOT_ALLOWED),
    ("STATES", {"topics": ["missing"] * 10_001}, WireCode.TOO_MANY_REQUESTS),
    ("READ", {"topic": "missing", "start": _AT, "end": _AT}, WireCode.TOPIC_NOT_FOUND),
    ("READ", {"topic": "a b://c", "start": _AT, "end": _AT}, WireCode.INVALID_TOPIC_NAME),
    ("NEWS", {"poll_id": 1, "topic": "x://y", "epoch": 0}, WireCode.INVALID_TOPIC_NAME),
    ("COUNTS", {"spans": [_SPAN] * 10_001}, WireCode.TOO_MANY_REQUESTS),
    ("CUT", {"span": _SPAN}, WireCode.TOPIC_NOT_FOUND),
    ("PIECES", {"span": _SPAN, "count": 2}, WireCode.TOPIC_NOT_FOUND),
    ("AT_TIME", {"topic": "missing", "publish_time": 1}, WireCode.TOPIC_NOT_FOUND),
    ("MOVE", {"subscription": ""}, WireCode.NOT_ALLOWED),
]
