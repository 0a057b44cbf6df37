"""Strategies for messages on their way out."""

from __future__ import annotations

from hypothesis import strategies as st

from magnetar.client.message.batch import Outgoing, Stamp
from magnetar.wire.compression import Compression
from magnetar.wire.messages import TxnId

_TEXT = st.text(st.characters(codec="utf-8"), max_size=12)

STAMPS = st.builds(
    Stamp, _TEXT, st.integers(0, 2**62), compression=st.sampled_from(list(Compression))
)

MESSAGES = st.builds(
    Outgoing,
    payload=st.binary(max_size=200),
    sequence_id=st.integers(0, 2**63 - 1),
    key=st.none() | _TEXT | st.binary(max_size=12),
    ordering_key=st.none() | st.binary(max_size=8),
    properties=st.dictionaries(_TEXT, _TEXT, max_size=3),
    event_time_ms=st.just(0) | st.integers(1, 2**62),
    null_value=st.booleans(),
)

WITH_CONTEXT = st.builds(
    Outgoing,
    payload=st.binary(max_size=40),
    sequence_id=st.just(0),
    key=st.none() | _TEXT,
    deliver_at_ms=st.sampled_from([0, 0, 0, 5]),
    schema_version=st.sampled_from([b"", b"\0" * 7 + b"\1"]),
    txn=st.sampled_from([None, None, TxnId(1, 2), TxnId(1, 3)]),
)
