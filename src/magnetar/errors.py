"""The whole error tree, each error with its wire code and whether a retry can help.

Owns: every exception that leaves a package of Magnetar. Backends translate at their border, so
nothing above them ever sees an `OSError`, a `sqlite3.Error` or a gRPC status.

Invariants:
1. Every class below `MagnetarError` has a unique `name`, which is that of the class in lower case
   with hyphens and as much part of the contract, a `wire_code` and a `retryable` flag.
2. `retryable` means: the operation was **not** applied and the same call may succeed later.
   An operation whose outcome is unknown is never retryable; it says so in its own class.
3. A message says what happened and to what; `hint` says what to do next.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from magnetar.wire_codes import WireCode as WireCode

DISK_FULL_WORDS: Final = "the disk of the server is full"
"""Stand in every `ServerDiskFull`, by which clients know it."""

# Clients for Go put the name of the code before our text and look for these in the whole; those of
# version 5 for Java look for the two at the end. Each of them ends the way back to the topic.
CLIENT_WORDS: Final = (
    "TopicNotFound",
    "TopicTerminated",
    "ProducerBlockedQuotaExceededException",
    "ProducerFenced",
    "SubscriptionNotFound",
    "AuthorizationError",
    "ConsumerBusy",
    "InvalidTopicName",
    "IncompatibleSchema",
    "ConsumerAssignError",
    "NotAllowedError",
    "already terminated",
    "AlreadyClosed",
)
"""The words that clients look for in the text of any error, to judge it by them."""

_CLIENT_WORDS: Final = re.compile("|".join(CLIENT_WORDS))
_WORDS: Final = re.compile("[A-Z][a-z]*")
_BY_NAME: dict[str, type[MagnetarError]] = {}


def error_classes() -> dict[str, type[MagnetarError]]:
    """Every error class by its name (the documentation test walks this)."""
    return dict(_BY_NAME)


def without_client_words(text: str) -> str:
    """Spell a text so that no client takes it for another error: names in it are anybody's."""
    return _CLIENT_WORDS.sub(lambda found: f"{found[0][0]}~{found[0][1:]}", text)


class MagnetarError(Exception):
    """Base of everything Magnetar raises on purpose."""

    name: ClassVar[str] = "magnetar-error"
    """By which logs, documents and clients call it."""
    wire_code: ClassVar[WireCode] = WireCode.UNKNOWN
    retryable: ClassVar[bool] = False
    hint: str = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        if hint is not None:
            self.hint = hint

    def __init_subclass__(cls) -> None:
        # Derived from the class, so the two cannot drift apart (invariant 1).
        cls.name = "-".join(_WORDS.findall(cls.__name__)).lower()
        taken = _BY_NAME.get(cls.name)
        if taken is not None:
            # Logs, documents and clients go by the name: two classes
            # of one name could not be told apart.
            raise TypeError(f"{cls.__name__} repeats the name {cls.name!r} of {taken.__name__}")
        _BY_NAME[cls.name] = cls

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text} ({self.hint})" if self.hint else text


_BY_NAME[MagnetarError.name] = MagnetarError


# --- protocol: a peer broke the rules of the wire; the connection is closed ---


class ProtocolError(MagnetarError):
    """The bytes on a connection break the protocol."""


class LocalProtocolError(ProtocolError):
    """Our own side tried to send something that the protocol forbids in this state."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol forbids in this state."""


class FrameTooLarge(RemoteProtocolError):
    """A frame announces more bytes than the limit allows; refused before it is read."""


class ForeignProtocol(RemoteProtocolError):
    """The peer speaks another protocol, which its first bytes tell: HTTP, or TLS."""

    hint = "the binary protocol and the admin interface have a port each; see which one this is"


# Below ProtocolError, but answered with a SEND_ERROR: one damaged message closes no connection.
class ChecksumMismatch(RemoteProtocolError):
    """The CRC32C of a received message does not match its bytes."""

    wire_code = WireCode.CHECKSUM


# --- requests: an answerable refusal ---


class RequestError(MagnetarError):
    """A request that is refused with a code; the connection lives on."""


class InvalidTopicName(RequestError):
    """A topic, namespace or segment name that cannot be parsed."""

    wire_code = WireCode.INVALID_TOPIC_NAME


class NotAllowed(RequestError):
    """The request is well formed, but the rules of its target forbid it."""

    wire_code = WireCode.NOT_ALLOWED


class InvalidLayout(NotAllowed):
    """A split, merge or prune that the segment DAG does not permit."""


class Conflict(NotAllowed):
    """The thing exists already, or somebody who may not be disturbed uses it."""


class TopicNotFound(RequestError):
    """The topic does not exist and may not be created here."""

    wire_code = WireCode.TOPIC_NOT_FOUND


class SubscriptionNotFound(RequestError):
    """The subscription does not exist."""

    wire_code = WireCode.SUBSCRIPTION_NOT_FOUND


class TopicTerminated(RequestError):
    """The topic was terminated (a segment: sealed) and takes no more messages."""

    wire_code = WireCode.TOPIC_TERMINATED


class ConsumerBusy(RequestError):
    """The subscription has a consumer, or consumers of another kind, that exclude this one."""

    wire_code = WireCode.CONSUMER_BUSY


class ConsumerNotFound(RequestError):
    """The connection has no consumer of that id."""

    wire_code = WireCode.CONSUMER_NOT_FOUND


class ConsumerAssign(RequestError):
    """The hash ranges of a sticky consumer are missing or taken."""

    wire_code = WireCode.CONSUMER_ASSIGN


class ProducerBusy(RequestError):
    """The topic has a producer of that name, or one that excludes others."""

    wire_code = WireCode.PRODUCER_BUSY


class ProducerFenced(RequestError):
    """Another producer took the topic for itself; this one must not go on."""

    wire_code = WireCode.PRODUCER_FENCED


class IncompatibleSchema(RequestError):
    """The schema does not fit those that the topic has."""

    wire_code = WireCode.INCOMPATIBLE_SCHEMA


class InvalidSchema(IncompatibleSchema):
    """The definition of a schema is none of its type."""


# The usual answer while a topic changes its owner; every Pulsar client retries it by itself.
class ServiceNotReady(RequestError):
    """The topic is moving or recovering: nothing was applied, look it up again."""

    wire_code = WireCode.SERVICE_NOT_READY
    retryable = True
    hint = "look the topic up again and retry"


# Each of these limits has its name, unit and default in `runtime.limits`.
class TooManyRequests(RequestError):
    """A named limit on queued work is reached; nothing was applied."""

    wire_code = WireCode.TOO_MANY_REQUESTS
    retryable = True
    hint = "wait for earlier requests to finish, then retry"


# The code of a backlog quota, which is told apart by its words: clients of Pulsar fail what they
# have with it, go on trying with pauses, and keep their connection.
class ServerDiskFull(RequestError):
    """The disk of the server is full: it takes no messages and makes no topics now."""

    wire_code = WireCode.PRODUCER_BLOCKED_QUOTA_EXCEPTION
    retryable = True
    hint = (
        "free some space on it, or delete topics; publishing goes on by itself once there is room"
    )


# The code has clients of Pulsar keep what they have, and try again with pauses.
class BacklogHeld(RequestError):
    """The backlog of the topic has reached its quota: producers wait until it is smaller."""

    wire_code = WireCode.PRODUCER_BLOCKED_QUOTA_ERROR
    retryable = True
    hint = "consume and acknowledge, or raise backlogQuota; publishing goes on by itself then"


# And this one has them fail it, and go on trying all the same.
class BacklogFull(RequestError):
    """The backlog of the topic has reached its quota: producers are refused until it is smaller."""

    wire_code = WireCode.PRODUCER_BLOCKED_QUOTA_EXCEPTION
    retryable = True
    hint = "consume and acknowledge, or raise backlogQuota, then try again"


class TransactionCoordinatorNotFound(RequestError):
    """The broker that was asked does not coordinate the transaction, or nobody does now."""

    wire_code = WireCode.TRANSACTION_COORDINATOR_NOT_FOUND
    retryable = True
    hint = "look up the coordinators again"
    coordinator: int | None = None
    """The one that was meant, where the broker says so."""


# A commit that comes after the abort (mostly that of a timeout), or the other way round.
class InvalidTxnStatus(RequestError):
    """The transaction has come to another end than the one asked for."""

    wire_code = WireCode.INVALID_TXN_STATUS
    hint = "what was decided stays; begin a new transaction"


class TransactionConflict(RequestError):
    """Another transaction, or a plain acknowledgement, has the message already."""

    wire_code = WireCode.TRANSACTION_CONFLICT
    hint = "abort the transaction and begin a new one"


# Outcomes are kept for `txn_retention_seconds`: afterwards the two cannot be told apart.
class TransactionNotFound(RequestError):
    """There is no such transaction: it never was, or it ended long ago."""

    wire_code = WireCode.TRANSACTION_NOT_FOUND
    hint = "check the id, and that you began it; else begin a new transaction"


# Pulsar has no code for groups of transactions; this one makes a client stop, too.
class GroupFenced(RequestError):
    """A later run of the same application has taken the transaction group over."""

    wire_code = WireCode.PRODUCER_FENCED
    hint = "a later run writes for this application; stop this one"


class RangeLost(RequestError):
    """Messages of the range that was asked for are not there: trimmed, or of a deleted topic."""

    wire_code = WireCode.RANGE_LOST


class AuthenticationFailed(RequestError):
    """The server does not accept who the client says it is."""

    wire_code = WireCode.AUTHENTICATION
    hint = "check the token or certificate that the client was given"


class AuthorizationFailed(RequestError):
    """The server knows the client, and does not let it do this."""

    wire_code = WireCode.AUTHORIZATION


# --- the client: what it tells its application ---


class ClientError(MagnetarError):
    """The client could not do what it was asked, whatever the server says."""


class InvalidServiceUrl(ClientError):
    """The address that the client was given is not one of a broker."""

    hint = "use pulsar://host:port or pulsar+ssl://host:port; several hosts are separated by commas"


class InvalidSetting(ClientError):
    """An option of a client, producer or consumer has a value that it cannot have."""


# Retryable, unlike ConnectionLost: no byte of the request has left.
class NotConnected(ClientError):
    """No broker could be reached; nothing was sent."""

    retryable = True
    is_refusal: bool = False
    """The address itself says that nobody is there: a port without a listener, an unknown host."""
    is_final: bool = False
    """The client makes no other try of its own."""


class UntrustedBroker(ClientError):
    """The certificate of a broker is not one that the client trusts; nothing was sent."""

    hint = "give its authority as TlsSettings(trust_certs=...), and the host that it was made for"


# Not retryable by invariant 2: the broker may have applied the request before the line broke.
class ConnectionLost(ClientError):
    """The connection ended before the answer came: whether it was done is unknown."""


class AlreadyClosed(ClientError):
    """The client, producer or consumer was closed by its application."""


# Raised by a client that was to go on from a place, and on Spark's driver or tasks: nothing is
# skipped unless the application, or the query, says that it may be.
class DataLost(ClientError):
    """Messages behind the place of a checkpoint or a query, not read yet, are gone."""

    hint = (
        "set failOnDataLoss (of a client's consumer: fail_on_data_loss) to false to go on behind "
        "the gap; a `subscription`, or a longer retention, keeps messages until they are read"
    )


class ProducerQueueFull(ClientError):
    """Too many messages of a producer, or too many bytes of the client, wait for their receipt."""

    retryable = True
    hint = "await earlier sends, or raise the limit"


class MessageTooLarge(ClientError):
    """The message is larger than the broker takes."""

    hint = "turn chunking on, or compress it"


# Not retryable either: a second send is harmless only where the topic deduplicates.
class SendTimedOut(ClientError):
    """No receipt came in time: whether the message is stored is unknown."""


class TransactionAborted(ClientError):
    """The transaction was not committed: a part of it failed, or its time was over."""

    hint = "begin a new transaction and do its work again"


# Not TransactionAborted, whose hint is to do the work again: here that would double it.
class TransactionEnded(ClientError):
    """The transaction takes no more: it is committed, is being committed, or may be."""

    hint = "what is in it is not to be sent again; begin a new transaction for what is new"


class WriterConflict(ClientError):
    """Another query writes under this transactional id."""

    name = "writer-conflict"


class CheckpointMismatch(ClientError):
    """The checkpoint of a query and what the server has committed of it do not go together."""

    name = "checkpoint-mismatch"


class UnreadableMessage(ClientError):
    """The bytes of a received message are not what its metadata or its schema says."""

    hint = "its raw bytes are in `data`; acknowledge it to be rid of it"


class InvalidValue(ClientError):
    """A value, key or property cannot be sent: the schema of the producer does not take it."""


class EncryptionFailed(ClientError):
    """A key to encrypt with could not be read or used: the message was not sent."""

    hint = "correct what the key reader gives for the key that is named; then send again"


# --- storage ---


class StorageError(MagnetarError):
    """Ledgers, journal or disk could not do what was asked."""

    wire_code = WireCode.PERSISTENCE


class DiskFull(StorageError):
    """No space left; nothing was applied and nothing acknowledged was lost."""

    retryable = True
    hint = "free some space; the store goes on by itself once there is room"


class OutOfDescriptors(DiskFull):
    """The process may open no more files: as passing as a lack of space, and met the same way."""

    hint = "close connections, or raise `ulimit -n`; the store goes on by itself"


class DiskFailed(StorageError):
    """The disk reported an error other than a lack of space."""

    hint = "check the disk and the kernel log"


class StorageFenced(StorageError):
    """A sync failed: what of the last writes is durable is unknown, so nothing more is written.

    A failed fsync is never retried (the kernel may have dropped the dirty pages). Restarting
    re-reads what really reached the disk.
    """

    hint = "check the disk, then restart the process: it recovers from what is durable"


class StorageClosed(StorageError):
    """The store, ledger or managed ledger was closed by its owner."""


# Two processes on one journal would overwrite each other: a lock in the folder forbids it.
class FolderInUse(StorageError):
    """Another process has this data folder open."""

    hint = "stop the other process or choose another folder"


class FormatTooNew(StorageError):
    """A file was written by a newer version; it was left untouched."""

    hint = "run the version that wrote it, or a newer one"


class CorruptData(StorageError):
    """Stored bytes fail their checksum where the disk had promised them; nothing was deleted."""

    hint = "restore the named file from a copy; the rest of the store is untouched"


class CorruptEntry(CorruptData):
    """One entry of a ledger is damaged; the entries around it can still be read."""


# The new owner fences before it reads: then the end of the ledger is final (as in BookKeeper).
class LedgerFenced(StorageError):
    """Another owner took this ledger over; this writer must stop."""

    hint = "open the topic again: its owner has changed"


class LedgerClosed(StorageError):
    """The ledger has its end and takes no more entries."""


class LedgerMissing(StorageError):
    """No ledger has this id (never created, or deleted)."""


class EntryMissing(StorageError):
    """The position is not in the managed ledger (trimmed, or never written)."""


# Sealing a segment is Pulsar's terminating a topic, and producers are told the same code.
class ManagedLedgerSealed(StorageError):
    """The managed ledger was sealed and takes no more entries."""

    wire_code = WireCode.TOPIC_TERMINATED


class ManagedLedgerFenced(StorageError):
    """Another owner opened this managed ledger; this one must stop."""

    hint = "look the topic up again: its owner has changed"


# Outside of storage a cursor is a subscription.
class CursorMissing(StorageError):
    """The managed ledger has no cursor of that name."""

    wire_code = WireCode.SUBSCRIPTION_NOT_FOUND


# --- metadata ---


class MetadataError(MagnetarError):
    """The metadata store could not do what was asked."""

    wire_code = WireCode.METADATA


class BadVersion(MetadataError):
    """A compare-and-set lost: the record is not at the expected version."""

    hint = "read the record again and decide anew"

    def __init__(self, key: str, expected: int, actual: int | None) -> None:
        # A negative version is `metadata.api.ABSENT`: the record was to be created.
        wanted = "to be absent" if expected < 0 else f"at version {expected}"
        found = "absent" if actual is None else f"at version {actual}"
        super().__init__(f"{key}: expected {wanted}, found it {found}")
        self.key = key
        self.expected = expected
        self.actual = actual

    # Pickle would call the class with the message alone, and the class takes three values.
    def __reduce__(self) -> tuple[type[BadVersion], tuple[str, int, int | None]]:
        return BadVersion, (self.key, self.expected, self.actual)


class InvalidArgument(MetadataError):
    """A key, index or option that no backend accepts."""


class LimitExceeded(MetadataError):
    """A key, value or index key is longer than the store's limit."""


class SessionLost(MetadataError):
    """The session ended: every ephemeral record of this store object is gone."""

    hint = "open a new store object and take the leases again"


class Unavailable(MetadataError):
    """The store cannot serve this now; the operation was not applied."""

    retryable = True
    hint = "retry after a pause"


# Neither retryable nor failed for good: the answer to a write was lost on its way.
class OutcomeUnknown(MetadataError):
    """The operation may or may not have been applied."""

    hint = "read the record and compare before trying again"


class NotSupported(MetadataError):
    """The backend cannot do what was asked (see its capabilities)."""


class StoreClosed(MetadataError):
    """The store object was closed."""


class CorruptMetadata(MetadataError):
    """A stored record cannot be decoded; it was left untouched."""


# --- Spark ---


class SparkError(MagnetarError):
    """Source, sink or pipeline on Spark could not do what was asked."""


class JavaMissing(SparkError):
    """Spark runs on Java, and no Java that it can use was found."""

    hint = (
        "install one (Debian, Ubuntu: apt install openjdk-17-jre-headless; without root: "
        "pip install 'magnetar[java]'), or set JAVA_HOME"
    )


class WrongCheckpoint(SparkError):
    """The checkpoint of a query does not go with what the query reads."""

    hint = "start the query with a checkpoint folder of its own"


# --- the rest ---


class ConfigError(MagnetarError):
    """A setting has an unknown name or a value out of range."""


class DeadlineExceeded(MagnetarError):
    """A wait reached its deadline."""

    retryable = True


class InvariantBroken(MagnetarError):
    """A bug: the owner of the state stops. Never answered as retryable."""

    hint = "please report this with the lines around it in the log"
