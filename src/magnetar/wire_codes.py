"""Pure: the codes by which the protocol tells errors apart.

Owns: the enum alone. `magnetar.errors`, which gives each error its code, offers it too.
"""

from __future__ import annotations

from enum import IntEnum


class WireCode(IntEnum):
    """The `ServerError` values of the Pulsar protocol (their numbers are the contract)."""

    UNKNOWN = 0
    METADATA = 1
    PERSISTENCE = 2
    AUTHENTICATION = 3
    AUTHORIZATION = 4
    CONSUMER_BUSY = 5
    SERVICE_NOT_READY = 6
    PRODUCER_BLOCKED_QUOTA_ERROR = 7
    PRODUCER_BLOCKED_QUOTA_EXCEPTION = 8
    CHECKSUM = 9
    UNSUPPORTED_VERSION = 10
    TOPIC_NOT_FOUND = 11
    SUBSCRIPTION_NOT_FOUND = 12
    CONSUMER_NOT_FOUND = 13
    TOO_MANY_REQUESTS = 14
    TOPIC_TERMINATED = 15
    PRODUCER_BUSY = 16
    INVALID_TOPIC_NAME = 17
    INCOMPATIBLE_SCHEMA = 18
    CONSUMER_ASSIGN = 19
    TRANSACTION_COORDINATOR_NOT_FOUND = 20
    INVALID_TXN_STATUS = 21
    NOT_ALLOWED = 22
    TRANSACTION_CONFLICT = 23
    TRANSACTION_NOT_FOUND = 24
    PRODUCER_FENCED = 25
    # Far above those of Pulsar, which may add more.
    RANGE_LOST = 1000
    """Magnetar's own; said only in answers to commands of ranges."""
