"""Refusals of commands: the one place where an error becomes a frame.

Owns: which reply each command has for an error, and the text of it.

Invariants:
1. A command that clients wait on gets exactly one reply of the type that they wait for.
2. A client of the Go library recognises errors by the names of codes inside the text: a text here
   never holds such a name, whatever topics, subscriptions and producers are called.
3. What is not an error of Magnetar is a bug: it is answered as unknown, without its text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from magnetar.errors import InvariantBroken, MagnetarError, NotAllowed, without_client_words
from magnetar.txn.coordinator_partitions import partition_of
from magnetar.wire.frames import command
from magnetar.wire.pb import pulsar_pb2 as pb

# -1 as Pulsar writes it into an unsigned field: no client has such a request.
NO_REQUEST: Final = 2**64 - 1
"""The request id of what the broker says unasked."""

_Refusal = Callable[[Any, int, str], bytes | None]
"""(body of the command, code, text) -> frame."""


def refusal(command_type: int, body: Any, error: BaseException) -> bytes | None:
    """The frame that refuses a command; None if nobody waits for an answer to it."""
    # Invariant 3: a bug's text may hold anything, even data of others.
    known = error if isinstance(error, MagnetarError) else _BUG
    refuse = _REFUSALS.get(command_type)
    return None if refuse is None else refuse(body, int(known.wire_code), text_of(known))


def text_of(error: MagnetarError) -> str:
    """The text of an error for any client (invariant 2)."""
    return without_client_words(str(error))


_WRONG_PORT: Final = (
    b"This port speaks Pulsar's binary protocol: give clients pulsar://host:port.\n"
    b"The admin interface has a port of its own (setting `admin_port`, 8080 by default).\n"
)
WRONG_PORT_ANSWER: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_WRONG_PORT), _WRONG_PORT)
)
"""The answer to HTTP at the port of the binary protocol."""


def unasked_error(error: MagnetarError) -> bytes:
    """What no request can be named for: a refused handshake, a broken stream."""
    return command(
        "ERROR", request_id=NO_REQUEST, error=int(error.wire_code), message=text_of(error)
    )


def send_refusal(producer_id: int, sequence_id: int, error: MagnetarError) -> bytes:
    return command(
        "SEND_ERROR",
        producer_id=producer_id,
        sequence_id=sequence_id,
        error=int(error.wire_code),
        message=text_of(error),
    )


def ack_refusal(consumer_id: int, request_id: int, error: MagnetarError) -> bytes:
    return command(
        "ACK_RESPONSE",
        consumer_id=consumer_id,
        request_id=request_id,
        error=int(error.wire_code),
        message=text_of(error),
    )


def txn_fields(body: Any) -> dict[str, int]:
    """The transaction of an acknowledgement, if it names one, as its answer repeats it."""
    if not (body.HasField("txnid_most_bits") and body.HasField("txnid_least_bits")):
        return {}
    return {
        "txnid_most_bits": body.txnid_most_bits,
        "txnid_least_bits": body.txnid_least_bits,
    }


def unknown_command(number: int) -> bytes:
    """The answer to a command that is in no list: no reply of its own can exist."""
    error = NotAllowed(f"there is no command {number}")
    return unasked_error(error)


_BUG: Final = InvariantBroken("the broker could not do this")


def _plain(body: Any, code: int, text: str) -> bytes:
    return command("ERROR", request_id=body.request_id, error=code, message=text)


def _failed_lookup(reply: str, failed: int) -> _Refusal:
    def refuse(body: Any, code: int, text: str) -> bytes:
        return command(reply, request_id=body.request_id, response=failed, error=code, message=text)

    return refuse


def _with_error_code(reply: str) -> _Refusal:
    def refuse(body: Any, code: int, text: str) -> bytes:
        return command(reply, request_id=body.request_id, error_code=code, error_message=text)

    return refuse


def _ack(body: Any, code: int, text: str) -> bytes | None:
    # Most acks carry no request id: nobody waits for an answer.
    if not body.HasField("request_id"):
        return None
    return command(
        "ACK_RESPONSE",
        consumer_id=body.consumer_id,
        request_id=body.request_id,
        error=code,
        message=text,
        **txn_fields(body),
    )


def _by(field: str, reply: str) -> _Refusal:
    """Refuse by a reply that repeats `field` and has `error` and `message`."""

    def refuse(body: Any, code: int, text: str) -> bytes:
        fields: dict[str, Any] = {field: getattr(body, field), "error": code, "message": text}
        return command(reply, **fields)

    return refuse


def _of_transaction(reply: str) -> _Refusal:
    """Clients find the request by its coordinator, the upper half of the id: it is always set."""

    def refuse(body: Any, code: int, text: str) -> bytes:
        # A transaction that could not be begun has no id; its coordinator is the one that was
        # asked.
        most = body.tc_id if reply == "NEW_TXN_RESPONSE" else body.txnid_most_bits
        least = 0 if reply == "NEW_TXN_RESPONSE" else body.txnid_least_bits
        return command(
            reply,
            request_id=body.request_id,
            txnid_most_bits=most,
            txnid_least_bits=least,
            error=code,
            message=text,
        )

    return refuse


def _of_group(reply: str) -> _Refusal:
    """Refuse and say who coordinates the group: it may be refused for that alone."""

    def refuse(body: Any, code: int, text: str) -> bytes:
        return command(
            reply,
            request_id=body.request_id,
            tc_id=partition_of(body.application),
            error=code,
            message=text,
        )

    return refuse


_T = pb.BaseCommand
# By the reply that clients of each command wait for. A command that is not here is not answered
# (FLOW, REDELIVER): a client would take an ERROR for another request's.
_REFUSALS: Final[dict[int, _Refusal]] = {
    **dict.fromkeys(
        (
            _T.SUBSCRIBE,
            _T.PRODUCER,
            _T.UNSUBSCRIBE,
            _T.CLOSE_PRODUCER,
            _T.CLOSE_CONSUMER,
            _T.SEEK,
            _T.GET_LAST_MESSAGE_ID,
            _T.GET_TOPICS_OF_NAMESPACE,
            _T.WATCH_TOPIC_LIST,
            _T.WATCH_TOPIC_LIST_CLOSE,
            _T.SCALABLE_TOPIC_UNSUBSCRIBE,
        ),
        _plain,
    ),
    # Lookups say Failed in the response itself: clients look nowhere else.
    _T.PARTITIONED_METADATA: _failed_lookup(
        "PARTITIONED_METADATA_RESPONSE", pb.CommandPartitionedTopicMetadataResponse.Failed
    ),
    _T.LOOKUP: _failed_lookup("LOOKUP_RESPONSE", pb.CommandLookupTopicResponse.Failed),
    _T.CONSUMER_STATS: _with_error_code("CONSUMER_STATS_RESPONSE"),
    _T.GET_SCHEMA: _with_error_code("GET_SCHEMA_RESPONSE"),
    _T.GET_OR_CREATE_SCHEMA: _with_error_code("GET_OR_CREATE_SCHEMA_RESPONSE"),
    _T.ACK: _ack,
    # Watches and sessions are found by their own ids, not by a request id.
    _T.SCALABLE_TOPIC_LOOKUP: _by("session_id", "SCALABLE_TOPIC_UPDATE"),
    _T.SCALABLE_TOPIC_SUBSCRIBE: _by("request_id", "SCALABLE_TOPIC_SUBSCRIBE_RESPONSE"),
    _T.WATCH_SCALABLE_TOPICS: _by("watch_id", "WATCH_SCALABLE_TOPICS_UPDATE"),
    _T.WATCH_TC_ASSIGNMENTS: _by("watch_id", "WATCH_TC_ASSIGNMENTS_UPDATE"),
    _T.TC_CLIENT_CONNECT_REQUEST: _by("request_id", "TC_CLIENT_CONNECT_RESPONSE"),
    # Of both generations of clients; all are found by the coordinator's number.
    **{
        _T.Type.Value(name): _of_transaction(f"{name}_RESPONSE")
        for name in (
            "NEW_TXN",
            "ADD_PARTITION_TO_TXN",
            "ADD_SUBSCRIPTION_TO_TXN",
            "END_TXN",
            "END_TXN_ON_PARTITION",
            "END_TXN_ON_SUBSCRIPTION",
        )
    },
    **{
        _T.Type.Value(name): _of_group(f"{name}_RESPONSE")
        for name in ("OPEN_GROUP", "COMMIT_GROUP", "GROUP_STATUS")
    },
    **{
        number: _by("request_id", f"{name}_RESPONSE")
        for name, number in _T.Type.items()
        if name.startswith("RANGE_") and not name.endswith("_RESPONSE")
    },
}
