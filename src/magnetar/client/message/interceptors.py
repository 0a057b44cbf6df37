"""Interceptors: code of an application for every message that a client sends, receives or settles.

Owns: `Interceptor`, the base of such code; `Draft`, a message on its way out as interceptors see
it; `Interceptors`, all of one client.

Invariants:
1. `sending` comes first and may change the draft. What it raises, the send raises; nothing is sent.
2. After the last `sending` of a draft, each interceptor gets exactly one `sent` or `not_sent`.
3. All other calls observe: what they raise is logged and changes nothing.
4. They are called in the order in which they were given, on the client's event loop: whatever
   blocks there blocks the client.

Columns (`send_arrow`, `receive_arrow`) make no message for a row, and so pass by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from magnetar.client.message.message import AnyMessageId, Message
from magnetar.runtime.logs import logger

_LOG: Final = logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """A message that is about to be sent: an interceptor may change everything but the topic."""

    topic: str
    """The topic of the producer."""
    data: bytes | None
    """The payload as the schema encoded it; None: the message has no value."""
    key: str | bytes | None
    """The routing key, if there is one."""
    properties: dict[str, str]
    """A dictionary of its own: what is added travels with the message."""


class Interceptor:
    """Does nothing: override what is of interest.

    class Stamp(Interceptor):
        def sending(self, draft: Draft) -> None:
            draft.properties["sent-by"] = "billing"

    client = Client("pulsar://localhost:6650", interceptors=[Stamp()])
    """

    def sending(self, draft: Draft) -> None:
        """A message is about to be sent; raise to refuse it."""

    def sent(self, draft: Draft, message_id: AnyMessageId) -> None:
        """The message is stored."""

    def not_sent(self, draft: Draft, error: BaseException) -> None:
        """The send failed, or was cancelled before the message was taken."""

    def received(self, message: Message[Any], subscription: str) -> None:
        """The application gets a message now."""

    def acknowledged(
        self, message: Message[Any] | AnyMessageId, subscription: str, *, is_cumulative: bool
    ) -> None:
        """The application acknowledged a message, maybe in a transaction, or all up to it."""

    def nacked(self, message: Message[Any], subscription: str) -> None:
        """The application gave a message back."""


class Interceptors:
    """The interceptors of one client; false if there are none."""

    __slots__ = ("_all",)

    def __init__(self, interceptors: Sequence[Interceptor] = ()) -> None:
        self._all = tuple(interceptors)

    def __bool__(self) -> bool:
        return bool(self._all)

    def sending(self, draft: Draft) -> None:
        for asked, each in enumerate(self._all):
            try:
                each.sending(draft)
            except BaseException as error:
                # Invariant 2: those before it took the draft for one that is sent; the one that
                # raised, and those behind it, did not.
                Interceptors(self._all[:asked]).not_sent(draft, error)
                raise

    def sent(self, draft: Draft, message_id: AnyMessageId) -> None:
        self._tell(lambda one: one.sent(draft, message_id))

    def not_sent(self, draft: Draft, error: BaseException) -> None:
        self._tell(lambda one: one.not_sent(draft, error))

    def received(self, message: Message[Any], subscription: str) -> None:
        self._tell(lambda one: one.received(message, subscription))

    def acknowledged(
        self, message: Message[Any] | AnyMessageId, subscription: str, *, is_cumulative: bool
    ) -> None:
        self._tell(
            lambda one: one.acknowledged(message, subscription, is_cumulative=is_cumulative),
        )

    def nacked(self, message: Message[Any], subscription: str) -> None:
        self._tell(lambda one: one.nacked(message, subscription))

    def _tell(self, what: Callable[[Interceptor], None]) -> None:
        for each in self._all:
            # Invariant 3: a metric or a trace must not fail a message.
            try:
                what(each)
            except Exception as error:  # noqa: BLE001 - the application's code, not ours
                name, text = type(each).__qualname__, f"{type(error).__name__}: {error}"
                _LOG.warning("interceptor-failed", interceptor=name, error=text)
