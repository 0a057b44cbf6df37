"""Pure: a server's refusals as errors of the client, and which of them pass by themselves.

Owns: `refusal` (code and text to an error), `is_passing` (whether the same request may succeed
after a while, whatever the application does), `may_open` (the one rule of what is kept open:
whether a producer, consumer, watch or session tries again), `raise_refusal` for replies.

Invariants:
1. Every code becomes the class of the error tree that has it, if one has; else a `RequestError`
   with that code as its `wire_code`. But a `ServerDiskFull` is known by its words: its code is
   that of Pulsar's backlog quotas.
2. What an application has to change (a name, a permission, a schema) is never called passing.
"""

from __future__ import annotations

from typing import Any, Final

from magnetar.errors import (
    DISK_FULL_WORDS,
    AuthenticationFailed,
    AuthorizationFailed,
    BacklogFull,
    BacklogHeld,
    ConnectionLost,
    ConsumerAssign,
    ConsumerBusy,
    ConsumerNotFound,
    DeadlineExceeded,
    IncompatibleSchema,
    InvalidTopicName,
    InvalidTxnStatus,
    MagnetarError,
    NotAllowed,
    NotConnected,
    ProducerBusy,
    ProducerFenced,
    ProtocolError,
    RangeLost,
    RequestError,
    ServerDiskFull,
    ServiceNotReady,
    SubscriptionNotFound,
    TooManyRequests,
    TopicNotFound,
    TopicTerminated,
    TransactionConflict,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
    WireCode,
)

_CLASSES: Final[dict[WireCode, type[RequestError]]] = {
    each.wire_code: each
    for each in (
        AuthenticationFailed,
        AuthorizationFailed,
        BacklogFull,
        BacklogHeld,
        ConsumerAssign,
        ConsumerBusy,
        ConsumerNotFound,
        IncompatibleSchema,
        InvalidTopicName,
        InvalidTxnStatus,
        NotAllowed,
        ProducerBusy,
        ProducerFenced,
        RangeLost,
        ServiceNotReady,
        SubscriptionNotFound,
        TooManyRequests,
        TopicNotFound,
        TopicTerminated,
        TransactionConflict,
        TransactionCoordinatorNotFound,
        TransactionNotFound,
    )
}

# Trouble of the broker, not of the request.
_PASSING_CODES: Final = frozenset(
    {
        WireCode.METADATA,
        WireCode.PERSISTENCE,
        WireCode.SERVICE_NOT_READY,
        WireCode.TOO_MANY_REQUESTS,
        WireCode.PRODUCER_BLOCKED_QUOTA_ERROR,
        WireCode.TRANSACTION_COORDINATOR_NOT_FOUND,
    }
)

# Passing only for who was there before: the place is taken by what is left of its own last
# connection. At a first try somebody else has it.
_TAKEN_CODES: Final = frozenset(
    {
        WireCode.CONSUMER_ASSIGN,
        WireCode.CONSUMER_BUSY,
        WireCode.PRODUCER_BLOCKED_QUOTA_EXCEPTION,
        WireCode.PRODUCER_BUSY,
    }
)

_PASSING_CLASSES: Final = (NotConnected, ConnectionLost, DeadlineExceeded, ProtocolError)

# Where replies have their error: field of the code, field of the text.
_ERROR_FIELDS: Final = (("error", "message"), ("error_code", "error_message"))


def refusal(what: str, code: int, text: str) -> RequestError:
    """What a server said, as an error: `what` was refused with this code and text."""
    # A newer broker may have codes that this client does not know.
    known = code if code in WireCode.__members__.values() else WireCode.UNKNOWN
    wire_code = WireCode(known)
    found = _CLASSES.get(wire_code, RequestError)
    if wire_code is ServerDiskFull.wire_code and DISK_FULL_WORDS in text:
        found = ServerDiskFull
    # A text that ends with a hint, as those of our own servers do, needs no second one.
    hint = "" if text.endswith(")") else None
    error = found(f"{what}: {text or wire_code.name.lower()}", hint=hint)
    if error.wire_code is not wire_code:
        # The code is that of this answer, not of a class of errors.
        vars(error)["wire_code"] = wire_code
    return error


def raise_refusal(what: str, reply: Any) -> None:
    """Raise the error that a reply carries, if it carries one."""
    names = reply.DESCRIPTOR.fields_by_name
    for code, text in _ERROR_FIELDS:
        if code in names and reply.HasField(code):
            error = refusal(what, getattr(reply, code), getattr(reply, text))
            # Which coordinator has moved: only that one is looked up again.
            if isinstance(error, TransactionCoordinatorNotFound) and "tc_id" in names:
                error.coordinator = reply.tc_id if reply.HasField("tc_id") else None
            raise error


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed after a while."""
    # What a broker said is judged by its code; what happened on the way, by its class.
    if isinstance(error, RequestError):
        return error.wire_code in _PASSING_CODES
    if isinstance(error, NotConnected) and error.is_final:
        return False
    return isinstance(error, (*_PASSING_CLASSES, OSError))


def may_open(error: Exception, *, was_open: bool) -> bool:
    """Whether what could not be opened, or was ended, is opened again after a while.

    A broker that does not say what its trouble is may be well soon; so may one on which something
    else stands in the place of what was open before: mostly what is left of its last connection.
    """
    if is_passing(error):
        return True
    if not isinstance(error, RequestError):
        return False
    return error.wire_code is WireCode.UNKNOWN or (was_open and error.wire_code in _TAKEN_CODES)


def is_other_type(error: Exception) -> bool:
    """Whether a subscription is refused for its type, which does not pass as a taken place does."""
    # One code stands for both, so the words tell. Apache Pulsar has the same words for a segment
    # that stream consumers are only about to share, which passes: its refusals are waited out.
    return isinstance(error, ConsumerBusy) and "of another type" in str(error)


def is_lost(error: MagnetarError) -> bool:
    """Whether a request went unanswered, so that nobody knows if it was carried out."""
    return isinstance(error, ConnectionLost | DeadlineExceeded | ProtocolError)
