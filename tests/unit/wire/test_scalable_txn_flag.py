"""The flag with which commands of v5 clients name the kind of a transaction."""

from __future__ import annotations

import pytest

from magnetar.wire.pb import pulsar_pb2 as pb

FLAGS = {
    pb.CommandTcClientConnectRequest: 3,
    pb.CommandNewTxn: 4,
    pb.CommandAddPartitionToTxn: 5,
    pb.CommandAddSubscriptionToTxn: 5,
    pb.CommandEndTxn: 5,
}


@pytest.mark.parametrize("kind", FLAGS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_commands_scalable_txn_flag(kind: type) -> None:
    """53: CommandsScalableTxnFlagTest: where it stands, and that v4 commands do not have it."""
    field = kind.DESCRIPTOR.fields_by_name["scalable"]  # type: ignore[attr-defined]
    assert field.number == FLAGS[kind]
    assert not kind().scalable
    assert kind(scalable=True).SerializePartialToString() == bytes([field.number << 3, 1])
