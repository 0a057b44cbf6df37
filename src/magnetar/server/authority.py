"""Access: who a connection acts for, and what it may do.

Owns: the questions of access. `identify` is the one place where a principal comes to be known,
`authorise` the one place where a command of it is allowed, `is_superuser` the one that says who may
do what brokers do among themselves. Everything is allowed until rules exist, as it is in Pulsar
without authorization.

Invariants:
1. A session has exactly one principal, from CONNECT on; before it, no command but CONNECT runs.
2. Every command that names a topic or a namespace passes `authorise` before anything is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from magnetar.model.names import NamespaceName, TopicName
from magnetar.wire.pb import pulsar_pb2 as pb


class Action(Enum):
    """The actions that a principal may want to do."""

    # The actions of Pulsar's authorization, as far as commands of clients need them.
    LOOK_UP = "look up"
    LIST = "list"
    PRODUCE = "produce"
    CONSUME = "consume"


@dataclass(frozen=True, slots=True)
class Principal:
    """The one a connection acts for; without a role nobody was identified."""

    role: str | None = None


# A role of None is a principal too: rules to come decide what it may do.
ANYBODY: Final = Principal()


class Authority:
    """The rules of one server."""

    def is_superuser(self, principal: Principal) -> bool:
        """Whether it may do what brokers do among themselves; everybody may until rules exist."""
        return True

    def identify(self, connect: pb.CommandConnect) -> Principal:
        """The principal of a handshake. Any credentials are accepted: none are asked for."""
        return ANYBODY

    def authorise(
        self, principal: Principal, action: Action, target: TopicName | NamespaceName
    ) -> None:
        """Return if the principal may do this; nobody is refused."""
