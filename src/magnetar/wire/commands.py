"""Pure: which commands there are, who may send each, and where in a BaseCommand its body is.

Owns: `Side`, and the tables made from the .proto and from the list below.

Invariants:
1. Every command of the .proto is listed exactly once: for one side, or for both.
2. The member of BaseCommand that holds a command's body has its type as number and as name.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from magnetar.wire.pb import pulsar_pb2 as pb


class Side(Enum):
    """An end of a connection."""

    SERVER = "server"
    CLIENT = "client"

    @property
    def peer(self) -> Side:
        return Side.CLIENT if self is Side.SERVER else Side.SERVER


# A client closes its producers and consumers when its application is
# done with them, a broker when their topic moves away.
_BOTH: Final = frozenset({"PING", "PONG", "CLOSE_PRODUCER", "CLOSE_CONSUMER"})

# END_TXN_ON_* go from one broker to another, where the asking one acts as a client.
_CLIENT_ONLY: Final = frozenset(
    {
        "CONNECT",
        "AUTH_RESPONSE",
        "PRODUCER",
        "SEND",
        "SUBSCRIBE",
        "FLOW",
        "ACK",
        "REDELIVER_UNACKNOWLEDGED_MESSAGES",
        "SEEK",
        "UNSUBSCRIBE",
        "GET_LAST_MESSAGE_ID",
        "CONSUMER_STATS",
        "PARTITIONED_METADATA",
        "LOOKUP",
        "GET_TOPICS_OF_NAMESPACE",
        "WATCH_TOPIC_LIST",
        "WATCH_TOPIC_LIST_CLOSE",
        "GET_SCHEMA",
        "GET_OR_CREATE_SCHEMA",
        "TC_CLIENT_CONNECT_REQUEST",
        "NEW_TXN",
        "ADD_PARTITION_TO_TXN",
        "ADD_SUBSCRIPTION_TO_TXN",
        "END_TXN",
        "END_TXN_ON_PARTITION",
        "END_TXN_ON_SUBSCRIPTION",
        "WATCH_TC_ASSIGNMENTS",
        "WATCH_TC_ASSIGNMENTS_CLOSE",
        "SCALABLE_TOPIC_LOOKUP",
        "SCALABLE_TOPIC_CLOSE",
        "SCALABLE_TOPIC_SUBSCRIBE",
        "SCALABLE_TOPIC_UNSUBSCRIBE",
        "WATCH_SCALABLE_TOPICS",
        "WATCH_SCALABLE_TOPICS_CLOSE",
        "OPEN_GROUP",
        "COMMIT_GROUP",
        "GROUP_STATUS",
        "RANGE_LAYOUT",
        "RANGE_STATES",
        "RANGE_READ",
        "RANGE_NEWS",
        "RANGE_COUNTS",
        "RANGE_CUT",
        "RANGE_PIECES",
        "RANGE_AT_TIME",
        "RANGE_MOVE",
    }
)

_SERVER_ONLY: Final = frozenset(
    {
        "CONNECTED",
        "AUTH_CHALLENGE",
        "SUCCESS",
        "ERROR",
        "PRODUCER_SUCCESS",
        "SEND_RECEIPT",
        "SEND_ERROR",
        "MESSAGE",
        "ACK_RESPONSE",
        "ACTIVE_CONSUMER_CHANGE",
        "REACHED_END_OF_TOPIC",
        "GET_LAST_MESSAGE_ID_RESPONSE",
        "CONSUMER_STATS_RESPONSE",
        "PARTITIONED_METADATA_RESPONSE",
        "LOOKUP_RESPONSE",
        "GET_TOPICS_OF_NAMESPACE_RESPONSE",
        "WATCH_TOPIC_LIST_SUCCESS",
        "WATCH_TOPIC_UPDATE",
        "TOPIC_MIGRATED",
        "GET_SCHEMA_RESPONSE",
        "GET_OR_CREATE_SCHEMA_RESPONSE",
        "TC_CLIENT_CONNECT_RESPONSE",
        "NEW_TXN_RESPONSE",
        "ADD_PARTITION_TO_TXN_RESPONSE",
        "ADD_SUBSCRIPTION_TO_TXN_RESPONSE",
        "END_TXN_RESPONSE",
        "END_TXN_ON_PARTITION_RESPONSE",
        "END_TXN_ON_SUBSCRIPTION_RESPONSE",
        "WATCH_TC_ASSIGNMENTS_UPDATE",
        "SCALABLE_TOPIC_UPDATE",
        "SCALABLE_TOPIC_SUBSCRIBE_RESPONSE",
        "SCALABLE_TOPIC_ASSIGNMENT_UPDATE",
        "WATCH_SCALABLE_TOPICS_UPDATE",
        "OPEN_GROUP_RESPONSE",
        "COMMIT_GROUP_RESPONSE",
        "GROUP_STATUS_RESPONSE",
        "RANGE_LAYOUT_RESPONSE",
        "RANGE_STATES_RESPONSE",
        "RANGE_READ_RESPONSE",
        "RANGE_NEWS_RESPONSE",
        "RANGE_COUNTS_RESPONSE",
        "RANGE_CUT_RESPONSE",
        "RANGE_PIECES_RESPONSE",
        "RANGE_AT_TIME_RESPONSE",
        "RANGE_MOVE_RESPONSE",
        "PUBLISH_THROTTLED",
    }
)

TYPES: Final[dict[str, int]] = dict(pb.BaseCommand.Type.items())
"""Number of each command by its name."""

NAMES: Final[dict[int, str]] = {number: name for name, number in TYPES.items()}

MEMBERS: Final[dict[int, str]] = {number: name.lower() for name, number in TYPES.items()}
"""The member of BaseCommand that holds the body of a command."""

SENT_BY: Final[dict[Side, frozenset[int]]] = {
    Side.CLIENT: frozenset(TYPES[name] for name in _CLIENT_ONLY | _BOTH),
    Side.SERVER: frozenset(TYPES[name] for name in _SERVER_ONLY | _BOTH),
}
"""The commands that each side may send."""

SENT_BEFORE_OPEN: Final[dict[Side, frozenset[int]]] = {
    Side.CLIENT: frozenset(TYPES[name] for name in ("CONNECT", "AUTH_RESPONSE", "PING", "PONG")),
    Side.SERVER: frozenset(
        TYPES[name] for name in ("CONNECTED", "AUTH_CHALLENGE", "ERROR", "PING", "PONG")
    ),
}
"""Of these, what may come before the handshake is done."""

WITH_PAYLOAD: Final = frozenset({TYPES["SEND"], TYPES["MESSAGE"]})
"""The commands that bytes follow in their frame: metadata and payload."""

WITH_ENTRIES: Final = frozenset({TYPES["RANGE_READ_RESPONSE"]})
"""The commands that whole entries follow in their frame, as many as they say."""
