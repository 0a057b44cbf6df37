"""Pure: values of the protocol as the broker knows them, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from magnetar.broker.api import SchemaData
from magnetar.errors import MetadataError, NotAllowed
from magnetar.model.ids import MessageId, Position
from magnetar.runtime.limits import Limits
from magnetar.wire.pb import pulsar_pb2 as pb

# Ids are unsigned on the wire, but clients write -1 for earliest and "none".
_INT64_MAX: Final = 2**63 - 1
_UINT64_MASK: Final = 2**64 - 1


def properties_of(pairs: Iterable[pb.KeyValue]) -> dict[str, str]:
    """The last of a repeated key wins."""
    return {pair.key: pair.value for pair in pairs}


def name_of(name: str, limits: Limits) -> str:
    """The name of a producer or consumer, which the broker keeps and shows as long as it is there.

    Judged before anything is made of it.
    """
    most = limits.client_name_bytes
    # Characters first: a name of megabytes need not be encoded to be refused.
    if len(name) > most or len(name.encode()) > most:
        raise NotAllowed(
            f"a name of {len(name)} characters; the limit is {most} bytes",
            hint="choose a shorter name, or raise client_name_bytes",
        )
    return name


def metadata_of(pairs: Iterable[pb.KeyValue], limits: Limits) -> dict[str, str]:
    """Properties that the broker keeps for a client, if they are few."""
    found = properties_of(pairs)
    most = limits.client_metadata_bytes
    if sum(len(key.encode()) + len(value.encode()) for key, value in found.items()) > most:
        raise MetadataError(
            f"more than {most} bytes of metadata",
            hint="say less of the client in it, or raise client_metadata_bytes",
        )
    return found


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
