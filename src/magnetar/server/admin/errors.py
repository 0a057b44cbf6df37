"""Errors of Magnetar as statuses of HTTP, in one place.

Owns: the table, and the middleware through which every answer goes.

Invariants:
1. Every error answer is JSON with a `reason`.
2. Only what is not an error of `magnetar.errors` (a bug) is logged with its trace.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from magnetar.errors import (
    Conflict,
    ConsumerNotFound,
    CursorMissing,
    DeadlineExceeded,
    DiskFull,
    EntryMissing,
    IncompatibleSchema,
    InvalidArgument,
    InvalidSchema,
    InvalidTxnStatus,
    LimitExceeded,
    MagnetarError,
    NotSupported,
    RequestError,
    ServerDiskFull,
    ServiceNotReady,
    SubscriptionNotFound,
    TooManyRequests,
    TopicNotFound,
    TransactionConflict,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
    Unavailable,
)
from magnetar.runtime.logs import logger
from magnetar.server.admin.exchange import Refusal, refused

# Statuses that Pulsar's tools tell apart; 412 is its answer to an argument that makes no sense.
NOT_FOUND: Final = 404
CONFLICT: Final = 409
BAD_ARGUMENT: Final = 412
NOT_BUILT: Final = 501

_BUG: Final = 500

_log = logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The first that fits counts: a class stands before those that it derives from.
_STATUSES: Final[tuple[tuple[type[MagnetarError], int], ...]] = (
    (TopicNotFound, NOT_FOUND),
    (SubscriptionNotFound, NOT_FOUND),
    (ConsumerNotFound, NOT_FOUND),
    (CursorMissing, NOT_FOUND),
    (EntryMissing, NOT_FOUND),
    (TransactionNotFound, NOT_FOUND),
    (TransactionCoordinatorNotFound, NOT_FOUND),
    (InvalidTxnStatus, CONFLICT),
    (TransactionConflict, CONFLICT),
    (InvalidSchema, 422),
    (IncompatibleSchema, CONFLICT),
    (Conflict, CONFLICT),
    (TooManyRequests, 429),
    (ServiceNotReady, 503),
    (Unavailable, 503),
    (DiskFull, 503),
    (ServerDiskFull, 503),
    (DeadlineExceeded, 504),
    (NotSupported, NOT_BUILT),
    (InvalidArgument, BAD_ARGUMENT),
    (LimitExceeded, BAD_ARGUMENT),
    (RequestError, BAD_ARGUMENT),
)


def status_of(error: MagnetarError) -> int:
    # A table of classes, not of names: a new error has the status of its family.
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return status
    return _BUG


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except MagnetarError as error:
        status = status_of(error)
        # No row fits: an error that no endpoint should let through.
        if status == _BUG:
            _log.error("admin-request-failed", error, method=request.method, path=request.path)
        return refused(status, str(error))
    except web.HTTPException as error:
        # A redirect is an answer.
        if error.status < 400:
            raise
        return refused(error.status, _reason_of(request, error))
    # Invariant 2: whoever asked learns that it happened, the log has the trace.
    except Exception as error:  # noqa: BLE001  answered, and logged as the bug that it is
        _log.error("admin-request-failed", error, method=request.method, path=request.path)
        return refused(_BUG, "the server met an unexpected error; its log has the details")


def _reason_of(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, Refusal):
        return error.reason_given
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.path} does not take {request.method}"
    if isinstance(error, web.HTTPNotFound):
        return f"there is no {request.path}"
    return error.reason
