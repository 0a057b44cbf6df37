"""Pure: values of the protocol as the broker knows them, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from magnetar.broker.api import SchemaData
from magnetar.model.ids import MessageId, Position
from magnetar.wire.pb import pulsar_pb2 as pb

# Ids are unsigned on the wire, but clients write -1 for earliest and "none".
_INT64_MAX: Final = 2**63 - 1
_UINT64_MASK: Final = 2**64 - 1


def properties_of(pairs: Iterable[pb.KeyValue]) -> dict[str, str]:
    """The last of a repeated key wins."""
    return {pair.key: pair.value for pair in pairs}


def pairs_of(properties: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in properties.items()]


def schema_of(schema: pb.Schema) -> SchemaData:
    return SchemaData(
        schema.type, schema.schema_data, schema.name, properties_of(schema.properties)
    )


def signed(number: int) -> int:
    """An id as it is meant: the wire has -1 as 2^64-1."""
    return number if number <= _INT64_MAX else number - 2**64


def position_of(data: pb.MessageIdData) -> Position:
    return Position(signed(data.ledgerId), signed(data.entryId))


def message_id_of(data: pb.MessageIdData) -> MessageId:
    return MessageId(
        signed(data.ledgerId),
        signed(data.entryId),
        data.partition,
        data.batch_index,
        data.batch_size,
    )


def id_fields(position: Position, partition: int) -> dict[str, object]:
    """The fields of a MessageIdData."""
    return {
        "ledgerId": position.ledger_id & _UINT64_MASK,
        "entryId": position.entry_id & _UINT64_MASK,
        "partition": partition,
    }
