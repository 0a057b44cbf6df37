"""Long work in slices: no piece of it holds the event loop for more than a few milliseconds.

Owns: `SLICE_ITEMS`, `slices`, `SlicePace` and `in_slices`.

Slices are counted in items and not in time: on virtual time a run is the same every time. Between
two of them anything may happen, so whoever uses these checks again what it relied on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from typing import Final, TypeVar

SLICE_ITEMS: Final = 250
"""Items of one slice: at up to twenty microseconds each they take five milliseconds."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def slices(items: Sequence[Item], size: int = SLICE_ITEMS) -> Iterator[Sequence[Item]]:
    """Cut a sequence into pieces of `size` items, the last one perhaps of fewer."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


class SlicePace:
    """Counts the items of one piece of work, and gives others a turn after every slice."""

    __slots__ = ("_left", "_size")

    def __init__(self, size: int = SLICE_ITEMS) -> None:
        self._size = size
        self._left = size

    async def after(self, items: int = 1) -> None:
        """Note that so many items are done; if that ends a slice others have had a turn."""
        self._left -= items
        if self._left <= 0:
            self._left = self._size
            await asyncio.sleep(0)


async def in_slices(work: Generator[None, None, Result]) -> Result:
    """Carry out work that yields after each slice; others have a turn then."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: Result = done.value
            return result
        await asyncio.sleep(0)
