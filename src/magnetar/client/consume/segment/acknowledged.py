"""An acknowledgement that may be awaited until the broker has it durably.

Owns: `Acknowledged`.

Invariants:
1. It need not be awaited: it is sent anyway, and a failure is logged.
2. Cancelling a wait for it takes nothing back, and does not disturb others who wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Sequence

from magnetar.errors import MagnetarError


class Acknowledged:
    """`await` it to know that the broker has it for good; raises if the broker never will."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[asyncio.Future[None]]) -> None:
        self._parts = parts

    @classmethod
    def all_of(cls, each: Iterable[Acknowledged]) -> Acknowledged:
        """Several as one; those that went with one command are the same."""
        return cls([part for one in dict.fromkeys(each) for part in one._parts])

    def done(self) -> bool:
        """Whether the broker has it, or never will."""
        return all(part.done() for part in self._parts)

    def raise_failure(self) -> None:
        """Raise why the broker will never have it, if that is so and it is done."""
        for part in self._parts:
            part.result()

    @property
    def has_failed(self) -> bool:
        """Whether the broker never had it, or refused it."""
        return any(part.done() and part.exception() is not None for part in self._parts)

    def __await__(self) -> Generator[None, None, None]:
        for part in self._parts:
            # Shielded: many wait for one command's answer (invariant 2).
            yield from asyncio.shield(part).__await__()


NOTHING_TO_DO = Acknowledged(())


def abandoned(error: MagnetarError) -> Acknowledged:
    """One that the broker will never have."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failed.set_exception(error)
    failed.exception()  # nobody needs to await it
    return Acknowledged((failed,))
