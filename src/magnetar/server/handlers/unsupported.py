"""Commands of parts that this server does not have: a clear answer instead of silence.

Owns: the refusal of transactions. Their clients wait for a reply of a certain type; `replies` knows
which.
"""

from __future__ import annotations

from typing import Any

from magnetar.errors import NotAllowed
from magnetar.server.session import Session


async def transaction(session: Session, body: Any) -> None:
    raise NotAllowed("transactions are not enabled on this server")


def nothing_to_close(session: Session, body: Any) -> None:
    """The end of something that was never begun here, and that nobody waits for."""
