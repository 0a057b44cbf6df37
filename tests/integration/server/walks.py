"""Walks of commands through the files of a server: which borders they cross, in which direction.

Owns: `Walk`, a profile hook that takes down every call from one file of the server to another, and
`walk`, which plays one step of a client under it.

A border is crossed where a function of one file calls one of another; the same border counts once
in a walk. A call is upward if the callee stands in a higher layer than the caller, in the order of
the import contract "layers" of pyproject.toml. Calls by the event loop have no caller. What the
client in the same process does (`magnetar.testing`) is left out.
"""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import magnetar
from harness.limits import within
from tests.meta.tree import ROOT

_SOURCES: Final = str(Path(magnetar.__file__).parent) + "/"
_TESTING: Final = _SOURCES + "testing/"
_INNER: Final = frozenset({"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>"})
_TO_THE_JOURNAL: Final = ("journal/journal.py", "append")


class Place(NamedTuple):
    """A function, by its file below `src/magnetar`."""

    file: str
    function: str


def layers() -> dict[str, int]:
    """The height of each package: the higher one imports the lower one."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    (rows,) = [each["layers"] for each in contracts if each["id"] == "layers"]
    return {
        name.strip(" ()"): height
        for height, row in enumerate(reversed(rows))
        for name in row.split("|")
    }


class Walk:
    """One step of a client, as the server's files see it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Place, Place]] = []
        """From one file to another, in order."""
        self.to_journal: int | None = None
        """How many of them there were when the first record went to the journal."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code.co_name in _INNER:
            return
        callee = _place(frame)
        if callee is None or callee.file.startswith("wire/pb/"):
            return
        caller = _caller(frame)
        if caller is None or caller.file == callee.file:
            return
        self.calls.append((caller, callee))
        if callee == _TO_THE_JOURNAL and self.to_journal is None:
            self.to_journal = len(self.calls)

    def borders(self, *, to_journal: bool = False) -> list[tuple[str, str]]:
        """The borders that were crossed, in order; or only those up to the first journal record."""
        calls = self.calls[: self.to_journal] if to_journal else self.calls
        return list(dict.fromkeys((caller.file, callee.file) for caller, callee in calls))

    def files(self) -> set[str]:
        return {file for border in self.borders() for file in border}

    def upward(self) -> list[str]:
        height = layers()
        return [
            f"{caller.file} {caller.function} -> {callee.file} {callee.function}"
            for caller, callee in dict.fromkeys(self.calls)
            if height[_package(callee)] > height[_package(caller)]
        ]


async def walk(
    step: Callable[[], Awaitable[Any]], outstanding: Callable[[], int]
) -> tuple[Walk, Any]:
    """Play a step; what follows from it within the next turns of the loop counts too.

    It begins when nothing is left of earlier steps: what a commit leaves to be cleaned up would
    count as the next step's on a machine whose disk is slow. `outstanding` tells how much waits
    for the disk.
    """
    await _quiet(outstanding)
    found = Walk()
    sys.setprofile(found)
    try:
        result = await step()
        for _ in range(20):
            await asyncio.sleep(0)
    finally:
        sys.setprofile(None)
    return found, result


async def _quiet(outstanding: Callable[[], int]) -> None:
    """Return when some turns of the loop in a row did nothing, and nothing waits for the disk."""
    async with within("a server that has nothing to do"):
        while True:
            probe = Walk()
            sys.setprofile(probe)
            try:
                for _ in range(20):
                    await asyncio.sleep(0)
            finally:
                sys.setprofile(None)
            if not probe.calls and not outstanding():
                return


def _place(frame: FrameType) -> Place | None:
    code = frame.f_code
    if not code.co_filename.startswith(_SOURCES) or code.co_filename.startswith(_TESTING):
        return None
    return Place(code.co_filename.removeprefix(_SOURCES), code.co_name)


def _caller(frame: FrameType) -> Place | None:
    """The nearest function of ours that called; None: the loop did, or the client."""
    found: Place | None = None
    above = frame.f_back
    while above is not None:
        if above.f_code.co_filename.startswith(_TESTING):
            return None
        if found is None:
            found = _place(above)
        above = above.f_back
    return found


def _package(place: Place) -> str:
    return place.file.partition("/")[0].removesuffix(".py")
