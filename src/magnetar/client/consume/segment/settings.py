"""The options that an application gives a consumer.

Owns: `ConsumerSettings`, which all kinds of consumers share, and `DeadLetterPolicy`.

Invariant: values are checked when they are given; a wrong one raises `InvalidSetting`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from magnetar.client.consume.segment.nacks import RedeliveryDelay
from magnetar.client.encryption.decryptor import DecryptionFailure
from magnetar.client.encryption.keys import KeyReader, check_key_names, check_reader
from magnetar.client.message.chunks import EXPIRE_S, PENDING_MESSAGES_MAX
from magnetar.client.message.options import check_kinds, check_numbers, check_switches, check_texts
from magnetar.errors import InvalidSetting
from magnetar.model.subscriptions import InitialPosition

# As Pulsar's clients have it (receiverQueueSize).
QUEUE_SIZE: Final = 1000
# Entries; as Pulsar's brokers limit a consumer (maxUnackedMessagesPerConsumer).
UNACKED_MAX: Final = 50_000
QUEUE_BYTES: Final = 64 * 1024 * 1024
RELEASE_TIMEOUT_S: Final = 30.0

_POSITIVE: Final = ("queue_size", "queue_bytes", "unacked_max", "chunked_messages_max")
_NOT_NEGATIVE: Final = ("processing_timeout", "release_timeout", "chunk_timeout", "priority_level")
_SWITCHES: Final = ("retries", "read_compacted", "fail_on_data_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterPolicy:
    """A policy for messages that fail again and again: how often, and then where to.

    DeadLetterPolicy(max_redeliveries=3, topic="topic://public/default/orders-DLQ")
    """

    max_redeliveries: int
    """A message is delivered at most this many times more after its first delivery."""
    topic: str | None = None
    """Without one: `<topic>-DLQ` of a scalable topic, `<topic>-<subscription>-DLQ` of a regular."""
    retry_topic: str | None = None
    """Where `reconsume_later` puts messages; without one, as above, with `-RETRY`."""
    encryption_keys: Sequence[str] | None = None
    """Names of keys that letters are encrypted for, read by the consumer's `key_reader`; empty:
    letters are in plain. A consumer with a reader has to say which."""

    def __post_init__(self) -> None:
        if self.max_redeliveries < 0:
            raise InvalidSetting(f"max_redeliveries is negative: {self.max_redeliveries}")
        if self.encryption_keys is not None:
            check_key_names(self.encryption_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """Options of a consumer; times are in seconds."""

    initial_position: InitialPosition = InitialPosition.LATEST
    """Where a subscription begins that does not exist yet."""
    queue_size: int = QUEUE_SIZE
    """Messages of each segment that are fetched before the application asks for them."""
    queue_bytes: int = QUEUE_BYTES
    """Bytes that wait for the application, unpacked; what comes beyond them waits as it came."""
    unacked_max: int = UNACKED_MAX
    """No more is fetched of a segment while the application has not settled so many entries."""
    nack_delay: RedeliveryDelay = field(default_factory=RedeliveryDelay)
    processing_timeout: float = 0.0
    """What is not settled so long after it was received is delivered again; 0: never."""
    processing_delay: RedeliveryDelay | None = None
    """With it, the timeout grows from delivery to delivery: this is added to it."""
    dead_letter: DeadLetterPolicy | None = None
    retries: bool = False
    """Consume the retry topic of `dead_letter` as well, so that `reconsume_later` may be used."""
    priority_level: int = 0
    """Of Shared consumers, those with the lowest number get messages first."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Shown to whoever lists the consumers of a topic."""
    subscription_properties: Mapping[str, str] = field(default_factory=dict)
    read_compacted: bool = False
    chunked_messages_max: int = PENDING_MESSAGES_MAX
    """Messages in chunks that may be incomplete, per segment."""
    chunk_timeout: float = EXPIRE_S
    fail_on_data_loss: bool = True
    """What a checkpoint has not read is gone: fail, or warn and go on behind the gap."""
    key_reader: KeyReader | None = None
    """Where the private keys come from; without it, what is encrypted cannot be read."""
    on_decryption_failure: DecryptionFailure = DecryptionFailure.FAIL
    release_timeout: float = RELEASE_TIMEOUT_S
    """How long a segment that goes to another consumer waits for the last acknowledgements."""

    def __post_init__(self) -> None:
        check_numbers(self, _POSITIVE, _NOT_NEGATIVE)
        check_kinds(
            self,
            {
                "initial_position": InitialPosition,
                "on_decryption_failure": DecryptionFailure,
            },
        )
        check_reader(self.key_reader)
        self._check_letters()
        check_switches(self, _SWITCHES)
        check_texts("properties", self.properties)
        check_texts("subscription_properties", self.subscription_properties)
        if self.retries and self.dead_letter is None:
            raise InvalidSetting(
                "retries need a dead_letter policy", hint="it says how often a message is retried"
            )

    def _check_letters(self) -> None:
        if self.dead_letter is None:
            return
        named = self.dead_letter.encryption_keys
        # What was decrypted here must not be stored in plain without anybody having said so.
        if self.key_reader is not None and named is None:
            raise InvalidSetting(
                "dead letters of what is decrypted need keys of their own",
                hint="give DeadLetterPolicy encryption_keys; an empty list: letters in plain",
            )
        if self.key_reader is None and named:
            raise InvalidSetting("encrypted dead letters need a key_reader")
