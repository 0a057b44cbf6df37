"""The handshake and the keepalive commands.

Owns: CONNECT, AUTH_RESPONSE, PING, PONG, and what a server says of itself.

Invariants:
1. Only features that are implemented are announced: clients use what they see.
2. The protocol version of a connection is the lower one of both sides.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from magnetar.errors import MagnetarError
from magnetar.server.context import Context
from magnetar.server.replies import unasked_error
from magnetar.server.session import ClientSoftware, Session
from magnetar.wire.frames import command
from magnetar.wire.pb import pulsar_pb2 as pb

# The version that Pulsar 4's clients speak. A higher one would promise commands that are not here
# (invariant 2).
PROTOCOL_VERSION: Final = 21
SERVER_VERSION: Final = f"Magnetar-{version('magnetar')}"

# Invariant 1. PIP-145 (topic list watchers) and PIP-344 (metadata without auto-creation) for
# Pulsar's clients; ranges for ours.
_FEATURES: Final = {
    "supports_topic_watchers": True,
    "supports_topic_watcher_reconcile": True,
    "supports_get_partitioned_metadata_without_auto_creation": True,
    "supports_ranges": True,
}
_PONG: Final = command("PONG")
_CLIENT_VERSION_MAX: Final = 128
"""Characters of a client's name for its own version."""


def connect(session: Session, body: pb.CommandConnect) -> None:
    try:
        principal = session.context.authority.identify(body)
    # Told why, then closed: no other command may follow a refused CONNECT.
    except MagnetarError as error:
        session.write(unasked_error(error))
        session.close()
        return
    session.principal = principal
    # A handshake is not refused for it, but it is kept with all that this client opens.
    software = body.client_version[:_CLIENT_VERSION_MAX]
    session.client = ClientSoftware(software, body.protocol_version)
    session.keeps_transactions = body.feature_flags.supports_transactions_over_layouts
    session.hears_throttles = body.feature_flags.supports_publish_throttled
    # From here on the state machine lets other commands through.
    session.wire.open()
    session.write(
        command(
            "CONNECTED",
            server_version=SERVER_VERSION,
            protocol_version=min(PROTOCOL_VERSION, body.protocol_version),
            max_message_size=session.context.config.max_message_bytes,
            feature_flags=_features(session.context),
        )
    )


def _features(context: Context) -> dict[str, bool]:
    return _FEATURES | {
        "supports_scalable_topics": context.has_scalable,
        "supports_tc_metadata_discovery": context.has_transactions,
        "supports_transaction_groups": context.has_transactions,
    }


def auth_response(session: Session, body: pb.CommandAuthResponse) -> None:
    """Ignore it: credentials do not expire here, so nobody was asked for new ones."""


def ping(session: Session, body: pb.CommandPing) -> None:
    session.write(_PONG)


def pong(session: Session, body: pb.CommandPong) -> None:
    """Do nothing more: the session has noted that something arrived."""
