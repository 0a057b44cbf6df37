"""Pure: what tells of a legacy transaction in the stream of a topic.

Owns: markers, the entries that end a transaction, and how entries of transactions are told.

A marker is a message without a payload: its type says how the transaction of its id ended. No
client sends it, and none gets it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from magnetar.errors import RemoteProtocolError
from magnetar.txn.ids import is_metadata
from magnetar.txn.records import State
from magnetar.wire.messages import TxnId, encode_entry, metadata_of
from magnetar.wire.pb import pulsar_pb2 as pb

MARKER_PRODUCER: Final = "pulsar.txn.marker"
# Pulsar's MarkerType: TXN_COMMIT and TXN_ABORT.
COMMIT_MARKER: Final = 21
ABORT_MARKER: Final = 22

_TXN_TAG: Final = b"\xb0\x01"
"""The bytes with which field 22 (txnid_least_bits, a number) begins in MessageMetadata."""

_ENDS: Final[dict[int, State]] = {COMMIT_MARKER: "COMMITTED", ABORT_MARKER: "ABORTED"}
_TYPES: Final = {state: number for number, state in _ENDS.items()}


class Trace(NamedTuple):
    """The trace that a transaction leaves in an entry: a message of it, or its marker."""

    txn: TxnId
    end: State | None
    """How it ended; None: the entry is a message of it."""


def marker(txn: TxnId, state: State, now_ms: int) -> bytes:
    """The entry that ends a transaction in a stream."""
    metadata = pb.MessageMetadata(
        producer_name=MARKER_PRODUCER,
        sequence_id=0,
        publish_time=now_ms,
        marker_type=_TYPES[state],
        txnid_most_bits=txn.most,
        txnid_least_bits=txn.least,
    )
    return encode_entry(metadata, b"")


def is_txn_marker(payload: bytes) -> bool:
    """Whether an entry is for nobody at all: it ends a legacy transaction."""
    trace = trace_of(payload)
    return trace is not None and trace.end is not None and not is_metadata(trace.txn)


def trace_of(payload: bytes) -> Trace | None:
    """What an entry has to do with a transaction; those that cannot are not parsed."""
    # A recovery scans whole streams: most entries are ruled out without parsing their metadata.
    # Bytes of a payload may look like the tag; those are parsed for nothing.
    if payload.find(_TXN_TAG) < 0:
        return None
    try:
        metadata = metadata_of(payload)
    except RemoteProtocolError:
        return None  # clients get it as it is, and report it
    if not (metadata.HasField("txnid_most_bits") and metadata.HasField("txnid_least_bits")):
        return None
    txn = TxnId(metadata.txnid_most_bits, metadata.txnid_least_bits)
    return Trace(txn, _ENDS.get(metadata.marker_type))
