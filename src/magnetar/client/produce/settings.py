"""The options that an application gives a producer.

Owns: `ProducerSettings` and `AccessMode`.

Invariant: values are checked when they are given; a wrong one raises `InvalidSetting`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from magnetar.client.encryption.encryptor import EncryptionFailure
from magnetar.client.encryption.keys import KeyReader, check_key_names, check_reader
from magnetar.client.message.batch import BATCH_BYTES_MAX, BATCH_DELAY_S, BATCH_MESSAGES_MAX
from magnetar.client.message.options import check_kinds, check_numbers, check_switches, check_texts
from magnetar.client.message.routing import Routing
from magnetar.errors import InvalidSetting
from magnetar.wire.compression import Compression

# Ten full batches: enough to keep a connection busy while receipts are on their way.
MAX_PENDING: Final = 10_000
SEND_TIMEOUT_S: Final = 30.0

_POSITIVE: Final = ("max_pending", "batch_messages", "batch_bytes")
_NOT_NEGATIVE: Final = ("send_timeout", "batch_delay")
_SWITCHES: Final = ("batching", "batch_by_key", "chunking")


class AccessMode(IntEnum):
    """The right of other producers to a topic; the numbers are those of the protocol."""

    SHARED = 0
    """Anybody."""
    EXCLUSIVE = 1
    """Nobody; refused if somebody does."""
    WAIT_FOR_EXCLUSIVE = 2
    """Nobody; waits until nobody does."""
    EXCLUSIVE_WITH_FENCING = 3
    """Nobody; whoever does is put out."""

    @property
    def may_wait(self) -> bool:
        """Whether opening takes as long as others produce."""
        return self is AccessMode.WAIT_FOR_EXCLUSIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """Options of a producer; times are in seconds."""

    access_mode: AccessMode = AccessMode.SHARED
    send_timeout: float = SEND_TIMEOUT_S
    """After so long without a receipt a send fails; 0: never."""
    max_pending: int = MAX_PENDING
    """Messages that wait for their receipt."""
    batching: bool = True
    batch_messages: int = BATCH_MESSAGES_MAX
    batch_bytes: int = BATCH_BYTES_MAX
    batch_delay: float = BATCH_DELAY_S
    """How long a message may wait for others, while earlier ones are under way."""
    batch_by_key: bool = False
    """Regular topics: no batch has two keys, as consumers of Key_Shared subscriptions need it."""
    compression: Compression = Compression.NONE
    chunking: bool = False
    """Cut messages that are larger than the broker takes."""
    initial_sequence_id: int | None = None
    """The first sequence id, unless the broker has seen a higher one of this producer's name."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Shown to whoever lists the producers of a topic."""
    routing: Routing = Routing.RING
    encryption_keys: Sequence[str] = ()
    """The names of keys: who has the private one of any of them can read what is sent."""
    key_reader: KeyReader | None = None
    """Where the public keys come from."""
    on_encryption_failure: EncryptionFailure = EncryptionFailure.FAIL

    def __post_init__(self) -> None:
        check_numbers(self, _POSITIVE, _NOT_NEGATIVE)
        check_kinds(
            self,
            {
                "compression": Compression,
                "routing": Routing,
                "access_mode": AccessMode,
                "on_encryption_failure": EncryptionFailure,
            },
        )
        check_reader(self.key_reader)
        check_key_names(self.encryption_keys)
        # Either without the other would send in plain what was meant to be secret.
        if bool(self.encryption_keys) != (self.key_reader is not None):
            hint = "encryption_keys names them, key_reader reads them"
            raise InvalidSetting("encryption needs keys and their reader", hint=hint)
        check_switches(self, _SWITCHES)
        check_texts("properties", self.properties)
        if self.initial_sequence_id is not None and self.initial_sequence_id < 0:
            raise InvalidSetting(f"initial_sequence_id is negative: {self.initial_sequence_id}")
