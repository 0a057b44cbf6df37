"""Pure: times as applications give them, and as messages carry them.

Owns: `milliseconds`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from magnetar.errors import InvalidValue

_UINT64: Final = 2**64


def milliseconds(moment: datetime | int) -> int:
    """Milliseconds since 1970, of a time or as they are; raises `InvalidValue` if it is none."""
    if not isinstance(moment, int):
        if not isinstance(moment, datetime):
            raise InvalidValue(f"{moment!r} is no time", hint="give a datetime, or milliseconds")
        if moment.tzinfo is None:
            hint = "use datetime.now(UTC), for example"
            raise InvalidValue(f"{moment} has no time zone", hint=hint)
        moment = round(moment.timestamp() * 1000)
    if not 0 <= moment < _UINT64:
        raise InvalidValue(f"{moment} ms after 1970 is no time that a message can have")
    return moment
