"""`/admin/v2/schemas`: the schemas of a topic and their versions."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web

from magnetar.broker.api import SchemaData
from magnetar.broker.policy.effective import effective
from magnetar.broker.policy.schema_rules import (
    KEY_VALUE_TYPE,
    TYPE_NAMES,
    TYPES,
    key_value_bytes,
    key_value_parts,
)
from magnetar.broker.policy.schemas import StoredSchema
from magnetar.errors import IncompatibleSchema, InvalidArgument, InvalidSchema, TopicNotFound
from magnetar.model.names import TopicName
from magnetar.server.admin import endpoints
from magnetar.server.admin.exchange import (
    flag_of,
    needed_body_of,
    part_of,
    schemas_of,
    shown,
    topic_of,
    topics_of,
    whole_number,
)
from magnetar.server.admin.policies.verbs import targets_of

ACCEPTED: Final = 202
"""As Pulsar answers whether a schema is compatible."""
UNKNOWN_VERSION: Final = -1


class SchemaBody(msgspec.Struct, frozen=True):
    """A schema as tools send it."""

    type: str
    schema: str = ""
    properties: dict[str, str] = {}

    def as_schema(self, name: str) -> SchemaData:
        number = TYPES.get(self.type.upper())
        if number is None:
            raise InvalidArgument(f"there is no schema type {self.type!r}")
        is_pair = number == KEY_VALUE_TYPE
        data = _bytes_of_pair(self.schema) if is_pair else self.schema.encode()
        return SchemaData(number, data, name, self.properties)


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
    schemas = schemas_of(request)
    deleted = await schemas.delete(name.schema_id)
    if deleted is None:
        raise _missing(str(name))
    # Then nothing stays, and numbers begin anew; else older versions can still be read.
    if flag_of(request, "force"):
        await schemas.forget(name.schema_id)
    return shown({"version": {"version": deleted}})


async def compatibility(request: web.Request) -> web.Response:
    name = topic_of(request)
    body = await needed_body_of(request, SchemaBody)
    schema = body.as_schema(name.local_name)
    strategy = await _strategy(request, name)
    # Incompatible is an answer here, not an error; what is no schema at all is one.
    compatible = True
    try:
        await schemas_of(request).check(name.schema_id, schema, strategy=strategy)
    except InvalidSchema:
        raise
    except IncompatibleSchema:
        compatible = False
    answer = {"compatibility": compatible, "schemaCompatibilityStrategy": strategy}
    return shown(answer, status=ACCEPTED)


async def version_of(request: web.Request) -> web.Response:
    """Which version a given schema has."""
    name = topic_of(request)
    body = await needed_body_of(request, SchemaBody)
    schema = body.as_schema(name.local_name)
    found = await schemas_of(request).find(name.schema_id, schema)
    return shown({"version": UNKNOWN_VERSION if found is None else found})


async def _strategy(request: web.Request, name: TopicName) -> str:
    """How schemas of this topic must fit together, whether it exists yet or not."""
    topics = topics_of(request)
    namespace = await topics.namespaces.policies(name.namespace)
    try:
        own = await topics.topic_policies((await targets_of(request, name))[0])
    # Tools upload schemas before the first producer comes.
    except TopicNotFound:
        own = None
    return effective(namespace, own, topics.namespaces.broker).schema_strategy


def _as_json(found: StoredSchema) -> dict[str, Any]:
    is_pair = found.type == KEY_VALUE_TYPE
    return {
        "version": found.version,
        "type": TYPE_NAMES.get(found.type, str(found.type)),
        "timestamp": found.created_ms,
        # All others are text.
        "data": _text_of_pair(found.data) if is_pair else found.data.decode("utf-8", "replace"),
        "properties": found.properties,
    }


# --- KEY_VALUE: an object of two definitions, where a part without one is an empty text


def _bytes_of_pair(text: str) -> bytes:
    try:
        pair = msgspec.json.decode(text, type=_Pair)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidSchema(f"a schema of KEY_VALUE has a key and a value: {error}") from error
    key, value = (b"" if bytes(each) == b'""' else bytes(each) for each in (pair.key, pair.value))
    return key_value_bytes(key, value)


def _text_of_pair(data: bytes) -> str:
    try:
        parts = [msgspec.Raw(each or b'""') for each in key_value_parts(data)]
        return msgspec.json.encode(_Pair(*parts)).decode("utf-8", "replace")
    # Stored before schemas were looked at: shown as far as it goes.
    except InvalidSchema:
        return data.decode("utf-8", "replace")


class _Pair(msgspec.Struct, frozen=True):
    """The definition of KEY_VALUE, as tools write it."""

    key: msgspec.Raw
    value: msgspec.Raw


def _missing(what: str) -> TopicNotFound:
    return TopicNotFound(f"there is no schema of {what}")


_TOPIC: Final = "/admin/v2/schemas/{tenant}/{namespace}/{topic}"

ROUTES: Final = (
    endpoints.get(f"{_TOPIC}/schema", latest),
    endpoints.get(f"{_TOPIC}/schema/{{version}}", version),
    endpoints.post(f"{_TOPIC}/schema", add),
    endpoints.delete(f"{_TOPIC}/schema", delete),
    endpoints.get(f"{_TOPIC}/schemas", versions),
    endpoints.post(f"{_TOPIC}/compatibility", compatibility),
    endpoints.post(f"{_TOPIC}/version", version_of),
)
