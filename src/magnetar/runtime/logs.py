"""Structured logging on the standard library's `logging`.

Owns: `EventLogger` (an event name plus fields), and the two ways to write a record: a key=value
line for terminals, a JSON object for machines.

Invariants:
1. An event name is a constant in kebab-case; everything that varies is a field.
2. One record is one line, except for a trace below a key=value line.
3. Nothing is logged per message: lifecycle at info, what an operator must see at warning and
   above, decisions that are made rarely at debug.

Importing this configures nothing; `configure` is for programs, not for library users.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Final, TextIO

from magnetar.errors import MagnetarError

ROOT: Final = "magnetar"

_FIELDS: Final = "magnetar_fields"
_RESERVED: Final = frozenset({"time", "level", "source", "event", "trace"})
_NEEDS_QUOTES: Final = frozenset(' "=\\')


class EventLogger:
    """Writes events of one source."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields, None)

    def info(self, event: str, /, **fields: object) -> None:
        self._write(logging.INFO, event, fields, None)

    def warning(self, event: str, /, **fields: object) -> None:
        self._write(logging.WARNING, event, fields, None)

    def error(self, event: str, /, cause: BaseException | None = None, **fields: object) -> None:
        """Log an error; a cause adds its message, and its trace unless it is an error of ours."""
        if cause is None:
            self._write(logging.ERROR, event, fields, None)
            return
        fields["error"] = f"{type(cause).__name__}: {cause}"
        # Errors of our tree say what happened and what to do; a trace would only hide that.
        trace = None if isinstance(cause, MagnetarError) else cause
        self._write(logging.ERROR, event, fields, trace)

    def _write(
        self, level: int, event: str, fields: dict[str, object], trace: BaseException | None
    ) -> None:
        # Most debug lines are written nowhere: this spares them the rest.
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", event, exc_info=trace, extra={_FIELDS: fields})


def logger(name: str) -> EventLogger:
    """The logger of one source, named as its module (`__name__`)."""
    return EventLogger(logging.getLogger(name))


def configure(stream: TextIO, *, level: str = "info", as_json: bool = False) -> logging.Handler:
    """Send everything below `magnetar` to `stream`; the handler, so that it can be removed."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if as_json else KeyValueLines())
    root = logging.getLogger(ROOT)
    root.setLevel(level.upper())
    root.addHandler(handler)
    # The root logger's handlers would write each line a second time.
    root.propagate = False
    return handler


class KeyValueLines(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info magnetar.journal journal-opened files=3`."""

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        parts = [_time(record), level, record.name, record.getMessage()]
        parts += [f"{key}={_quoted(value)}" for key, value in _fields(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One JSON object per line; a field named as one of ours gets a `_` behind its name."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "source": record.name,
            "event": record.getMessage(),
        }
        for key, value in _fields(record).items():
            # A field called `time` must not hide when it happened.
            entry[f"{key}_" if key in _RESERVED else key] = value
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, _FIELDS, {})
    return fields


def _quoted(value: object) -> str:
    text = str(value)
    # Quoted where a line could be torn, or a value taken for two (invariant 2).
    if text and text.isprintable() and _NEEDS_QUOTES.isdisjoint(text):
        return text
    return json.dumps(text, ensure_ascii=False)
