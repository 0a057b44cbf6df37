"""Logging: key=value lines, JSON lines, traces only for what is not ours."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from magnetar.errors import DiskFull
from magnetar.runtime import logs

Configure = Callable[..., io.StringIO]


@pytest.fixture
def configure() -> Iterator[Configure]:
    root = logging.getLogger(logs.ROOT)
    before = root.level, root.propagate
    handlers: list[logging.Handler] = []

    def start(*, level: str = "info", as_json: bool = False) -> io.StringIO:
        stream = io.StringIO()
        handlers.append(logs.configure(stream, level=level, as_json=as_json))
        return stream

    yield start
    for handler in handlers:
        root.removeHandler(handler)
    root.setLevel(before[0])
    root.propagate = before[1]


def test_key_value_lines(configure: Configure) -> None:
    stream = configure()
    log = logs.logger("magnetar.journal")
    log.info("journal-opened", files=3, folder="/a b", empty="", note='say "x"\n', level="high")
    time, _, rest = stream.getvalue().partition(" ")
    assert time.endswith("Z")
    assert rest == (
        "info magnetar.journal journal-opened "
        'files=3 folder="/a b" empty="" note="say \\"x\\"\\n" level=high\n'
    )


def test_json_lines(configure: Configure) -> None:
    stream = configure(as_json=True)
    logs.logger("magnetar.journal").warning(
        "queue-full", bytes=7, level="high", error=DiskFull("x")
    )
    entry = json.loads(stream.getvalue())
    assert (entry["level"], entry["source"], entry["event"]) == (
        "warning",
        "magnetar.journal",
        "queue-full",
    )
    assert (entry["bytes"], entry["level_"]) == (7, "high")
    assert entry["error"].startswith("x (free some space")


def test_levels(configure: Configure) -> None:
    stream = configure(level="warning")
    log = logs.logger("magnetar.x")
    log.debug("quiet")
    log.info("quiet")
    log.warning("loud")
    assert [line.split()[3] for line in stream.getvalue().splitlines()] == ["loud"]


def test_our_errors_need_no_trace(configure: Configure) -> None:
    stream = configure()
    logs.logger("magnetar.x").error("write-failed", DiskFull("no room"), file="j-1")
    (line,) = stream.getvalue().splitlines()
    assert 'file=j-1 error="DiskFull: no room (free some space' in line


@pytest.mark.parametrize("as_json", [False, True])
def test_a_foreign_error_brings_its_trace(configure: Configure, as_json: bool) -> None:
    stream = configure(as_json=as_json)
    try:
        raise ZeroDivisionError("oops")
    except ZeroDivisionError as error:
        logs.logger("magnetar.x").error("crashed", error)
    assert "Traceback" in stream.getvalue()
    if as_json:
        assert "oops" in json.loads(stream.getvalue())["trace"]


def test_percent_signs_are_plain_text(configure: Configure) -> None:
    stream = configure()
    logs.logger("magnetar.x").error("100%-full", share="100%s")
    assert stream.getvalue().endswith("100%-full share=100%s\n")
