"""Schemas of topics: GET_SCHEMA and GET_OR_CREATE_SCHEMA."""

from __future__ import annotations

from magnetar.broker.policy.schemas import StoredSchema, version_bytes, version_from
from magnetar.errors import IncompatibleSchema, TopicNotFound
from magnetar.model.names import TopicName
from magnetar.server.authority import Action
from magnetar.server.handlers.values import pairs_of, schema_of
from magnetar.server.session import Session
from magnetar.wire.frames import command
from magnetar.wire.pb import pulsar_pb2 as pb


async def get_schema(session: Session, body: pb.CommandGetSchema) -> None:
    name = TopicName.parse(body.topic)
    session.authorise(Action.LOOK_UP, name)
    found = await _find(session, name, body)
    if found is None:
        raise TopicNotFound(f"{name} has no such schema")
    session.write(
        command(
            "GET_SCHEMA_RESPONSE",
            request_id=body.request_id,
            schema={
                # Schemas of older clients have no name; Java expects one.
                "name": found.name or name.local_name,
                "schema_data": found.data,
                "type": found.type,
                "properties": pairs_of(found.properties),
            },
            schema_version=version_bytes(found.version),
        )
    )


async def get_or_create_schema(session: Session, body: pb.CommandGetOrCreateSchema) -> None:
    name = TopicName.parse(body.topic)
    session.authorise(Action.PRODUCE, name)
    # Not created by this: PRODUCER follows, and creates it if that is allowed.
    topic = await session.context.topics.get(name, create=False)
    schema = schema_of(body.schema)
    version = await session.context.schemas.for_producer(name.schema_id, schema, topic.policies)
    # Plain bytes have no version. One that is there and empty would be written into messages by the
    # client for Go, and asked for by those who read them.
    fields = {} if version is None else {"schema_version": version_bytes(version)}
    session.write(command("GET_OR_CREATE_SCHEMA_RESPONSE", request_id=body.request_id, **fields))


async def _find(
    session: Session, name: TopicName, body: pb.CommandGetSchema
) -> StoredSchema | None:
    schemas = session.context.schemas
    if not body.HasField("schema_version"):
        return await schemas.latest(name.schema_id)
    # As ServerCnx: a version of no bytes is an error, not the latest one.
    if not body.schema_version:
        raise IncompatibleSchema("an empty schema version")
    return await schemas.version(name.schema_id, version_from(body.schema_version))
