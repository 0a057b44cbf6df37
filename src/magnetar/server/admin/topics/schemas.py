"""`/admin/v2/schemas`: the schemas of a topic and their versions."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web

from magnetar.broker.api import SchemaData
from magnetar.broker.policy.effective import effective
from magnetar.broker.policy.schemas import NO_SCHEMA_TYPE, StoredSchema
from magnetar.errors import IncompatibleSchema, InvalidArgument, NotSupported, TopicNotFound
from magnetar.model.names import TopicName
from magnetar.server.admin.exchange import (
    needed_body_of,
    part_of,
    schemas_of,
    shown,
    topic_of,
    topics_of,
    whole_number,
)
from magnetar.wire.pb import pulsar_pb2 as pb

# As tools write them: upper case, with words apart in some.
_SPELLED: Final = {
    "NoSchema": "NONE",
    "KeyValue": "KEY_VALUE",
    "LocalDate": "LOCAL_DATE",
    "LocalTime": "LOCAL_TIME",
    "LocalDateTime": "LOCAL_DATE_TIME",
    "ProtobufNative": "PROTOBUF_NATIVE",
    "AutoConsume": "AUTO_CONSUME",
    "Bool": "BOOLEAN",
}
_TYPE_NAMES: Final = {
    number: _SPELLED.get(name, name.upper()) for name, number in pb.Schema.Type.items()
}
# Read in more spellings than are written: those of the protocol, and BYTES for no schema.
_TYPES: Final = {
    **{name.upper(): number for name, number in pb.Schema.Type.items()},
    **{name: number for number, name in _TYPE_NAMES.items()},
    "BYTES": NO_SCHEMA_TYPE,
}


class SchemaBody(msgspec.Struct, frozen=True):
    """A schema as tools send it."""

    type: str
    schema: str = ""
    properties: dict[str, str] = {}

    def as_schema(self, name: str) -> SchemaData:
        number = _TYPES.get(self.type.upper())
        if number is None:
            raise InvalidArgument(f"there is no schema type {self.type!r}")
        return SchemaData(number, self.schema.encode(), name, self.properties)


async def latest(request: web.Request) -> web.Response:
    name = topic_of(request)
    found = await schemas_of(request).latest(name.schema_id)
    if found is None:
        raise _missing(str(name))
    return shown(_as_json(found))


async def version(request: web.Request) -> web.Response:
    name = topic_of(request)
    number = whole_number(part_of(request, "version"), "a schema version")
    found = await schemas_of(request).version(name.schema_id, number)
    if found is None:
        raise _missing(f"{name}, version {number}")
    return shown(_as_json(found))


async def versions(request: web.Request) -> web.Response:
    name = topic_of(request)
    found = await schemas_of(request).versions(name.schema_id)
    if not found:
        raise _missing(str(name))
    return shown({"getSchemaResponses": [_as_json(each) for each in found]})


async def add(request: web.Request) -> web.Response:
    name = topic_of(request)
    body = await needed_body_of(request, SchemaBody)
    schema = body.as_schema(name.local_name)
    # As producers do it: the same check, by the same strategy.
    strategy = await _strategy(request, name)
    added = await schemas_of(request).register(name.schema_id, schema, strategy=strategy)
    return shown({"version": {"version": added}})


async def delete(request: web.Request) -> web.Response:
    name = topic_of(request)
    deleted = await schemas_of(request).delete(name.schema_id)
    if deleted is None:
        raise _missing(str(name))
    return shown({"version": {"version": deleted}})


async def compatibility(request: web.Request) -> web.Response:
    name = topic_of(request)
    body = await needed_body_of(request, SchemaBody)
    schema = body.as_schema(name.local_name)
    strategy = await _strategy(request, name)
    # Incompatible is an answer here, not an error.
    compatible = True
    try:
        await schemas_of(request).check(name.schema_id, schema, strategy=strategy)
    except IncompatibleSchema:
        compatible = False
    # Nothing is claimed that was not looked at: Pulsar's answer has no word for "not checked".
    if compatible and not await schemas_of(request).is_judged(
        name.schema_id, schema, strategy=strategy
    ):
        raise NotSupported(
            f"the rules of {strategy} are not checked by this server: it knows only that the type "
            "of the schema stays the same",
            hint="compare the definitions before you use it",
        )
    return shown({"compatibility": compatible, "schemaCompatibilityStrategy": strategy})


async def version_of(request: web.Request) -> web.Response:
    """Which version a given schema has."""
    name = topic_of(request)
    body = await needed_body_of(request, SchemaBody)
    schema = body.as_schema(name.local_name)
    found = await schemas_of(request).find(name.schema_id, schema)
    if found is None:
        raise _missing(f"{name}: the given one")
    return shown({"version": found})


async def _strategy(request: web.Request, name: TopicName) -> str:
    """How schemas of this topic must fit together, whether it exists yet or not."""
    topics = topics_of(request)
    namespace = await topics.namespaces.policies(name.namespace)
    try:
        own = await topics.topic_policies(name)
    # Tools upload schemas before the first producer comes.
    except TopicNotFound:
        own = None
    return effective(namespace, own, topics.namespaces.broker).schema_strategy


def _as_json(found: StoredSchema) -> dict[str, Any]:
    return {
        "version": found.version,
        "type": _TYPE_NAMES.get(found.type, str(found.type)),
        "timestamp": found.created_ms,
        # Avro and JSON are text; Protobuf's descriptor is not, and is shown as far as it goes.
        "data": found.data.decode("utf-8", "replace"),
        "properties": found.properties,
    }


def _missing(what: str) -> TopicNotFound:
    return TopicNotFound(f"there is no schema of {what}")


_TOPIC: Final = "/admin/v2/schemas/{tenant}/{namespace}/{topic}"

ROUTES: Final = (
    web.get(f"{_TOPIC}/schema", latest),
    web.get(f"{_TOPIC}/schema/{{version}}", version),
    web.post(f"{_TOPIC}/schema", add),
    web.delete(f"{_TOPIC}/schema", delete),
    web.get(f"{_TOPIC}/schemas", versions),
    web.post(f"{_TOPIC}/compatibility", compatibility),
    web.post(f"{_TOPIC}/version", version_of),
)
