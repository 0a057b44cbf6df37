"""The opening of a producer, consumer or reader: awaited, or entered as it is.

Owns: `Opening`, and `opens`, which makes a coroutine function return one; `Closable`.

Invariants:
1. `await client.producer(...)`, `async with await client.producer(...)` and `async with
   client.producer(...)` all open exactly one thing; the last two close it at the end of the block.
2. An `Opening` is a coroutine to whoever asks (`asyncio.create_task`, `gather`), and one that
   nobody awaits is warned of, as any coroutine is.
3. Who uses it as if it were open is told to await it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from types import TracebackType
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from magnetar.errors import NotAllowed

_HINT: Final = "use `await`, or `async with`"


class Closable(Protocol):
    """A thing that a client made, and closes at its end."""

    async def close(self) -> None: ...


Made = TypeVar("Made", bound=Closable)
Given = ParamSpec("Given")


class Opening(Coroutine[Any, Any, Made]):
    """A producer, consumer or reader that is to be opened: `await` it, or enter it."""

    def __init__(self, work: Coroutine[Any, Any, Made], what: str) -> None:
        self._work = work
        self._what = what
        self._made: Made | None = None

    def __await__(self) -> Generator[Any, Any, Made]:
        return self._work.__await__()

    # --- as a block

    async def __aenter__(self) -> Made:
        self._made = await self._work
        return self._made

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._made is not None, "it was entered"
        await self._made.close()

    def __getattr__(self, name: str) -> Any:
        # Only what neither a coroutine nor a block has gets here: `receive`, `ack` ...
        raise AttributeError(f"no {name}: this {self._what} is not open yet ({_HINT})")

    # --- as a coroutine (invariant 2)

    def send(self, value: Any, /, **given: Any) -> Any:
        # Whoever drives a coroutine begins with None: anything else is meant for a producer.
        if value is not None or given:
            raise NotAllowed(f"this {self._what} is not open yet", hint=_HINT)
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()


def opens(
    function: Callable[Given, Coroutine[Any, Any, Made]],
) -> Callable[Given, Opening[Made]]:
    """Let what a coroutine function opens be entered without an `await` as well."""

    what = function.__name__.replace("_", " ")

    @wraps(function)
    def opening(*args: Given.args, **options: Given.kwargs) -> Opening[Made]:
        return Opening(function(*args, **options), what)

    return opening
