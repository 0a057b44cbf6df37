"""Schemas of the official client: stored, versioned, refused where they do not fit."""

from __future__ import annotations

from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest
from pulsar.schema import (  # type: ignore[import-untyped]
    Array,
    AvroSchema,
    BytesSchema,
    Integer,
    JsonSchema,
    Record,
    String,
    StringSchema,
)

from tests.interop.flows import EARLIEST, RECEIVE_MS, numbered, publish
from tests.interop.serving import ServerProcess


class Place(Record):  # type: ignore[misc]
    """The first version."""

    name = String()
    height = Integer()
    tags = Array(String())


class PlaceWithCountry(Record):  # type: ignore[misc]
    """The second, which can read the first."""

    name = String()
    height = Integer()
    tags = Array(String())
    country = String(default="nowhere", required=True, required_default=True)


class PlaceOnceMore(Record):  # type: ignore[misc]
    """The first version under another name."""

    _avro_namespace = "elsewhere"

    name = String()
    height = Integer()
    tags = Array(String())


class PlaceByText(Record):  # type: ignore[misc]
    """One that reads nothing of the first version, and is read by nobody."""

    name = String()
    height = String()
    tags = Array(String())


class PlaceWithMust(Record):  # type: ignore[misc]
    """One that has more than the first version, without a default."""

    name = String()
    height = Integer()
    tags = Array(String())
    mayor = String(required=True)


PLACE = {"name": "Zürich", "height": 408, "tags": ["lake", "town"]}


def test_strings(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub", schema=StringSchema())
    client.create_producer(topic, schema=StringSchema()).send("Grüezi")
    assert consumer.receive(RECEIVE_MS).value() == "Grüezi"


@pytest.mark.parametrize("kind", [JsonSchema, AvroSchema])
def test_records(client: Any, server: ServerProcess, topic: str, kind: Any) -> None:
    consumer = client.subscribe(topic, "sub", schema=kind(Place))
    client.create_producer(topic, schema=kind(Place)).send(Place(**PLACE))
    message = consumer.receive(RECEIVE_MS)
    found = message.value()
    assert (found.name, found.height, found.tags) == ("Zürich", 408, ["lake", "town"])
    assert _versions(server, topic) == [0]


@pytest.mark.parametrize("kind", [JsonSchema, AvroSchema])
def test_a_changed_record_is_a_new_version(
    client: Any, server: ServerProcess, topic: str, kind: Any
) -> None:
    """And consumers read both: each message names its version, which the client asks for."""
    consumer = client.subscribe(topic, "sub")
    client.create_producer(topic, schema=kind(Place)).send(Place(**PLACE))
    newer = client.create_producer(topic, schema=kind(PlaceWithCountry))
    newer.send(PlaceWithCountry(**PLACE, country="CH"))
    client.create_producer(topic, schema=kind(Place)).send(Place(**PLACE))
    versions = [
        int.from_bytes(consumer.receive(RECEIVE_MS).schema_version().encode("latin-1"), "big")
        for _ in range(3)
    ]
    assert versions == [0, 1, 0]
    assert _versions(server, topic) == [0, 1]
    consumer = client.subscribe(
        topic, "typed", schema=kind(PlaceWithCountry), initial_position=EARLIEST
    )
    countries = [consumer.receive(RECEIVE_MS).value().country for _ in range(3)]
    assert countries == ["nowhere", "CH", "nowhere"]


def test_another_type_is_refused(client: Any, topic: str) -> None:
    producer = client.create_producer(topic, schema=JsonSchema(Place))
    producer.send(Place(**PLACE))
    with pytest.raises(pulsar.IncompatibleSchema):
        client.create_producer(topic, schema=AvroSchema(Place))
    with pytest.raises(pulsar.IncompatibleSchema):
        client.subscribe(topic, "sub", schema=StringSchema())
    producer.send(Place(**PLACE))


@pytest.mark.parametrize("kind", [JsonSchema, AvroSchema])
def test_a_record_that_does_not_fit_is_refused(
    client: Any, server: ServerProcess, topic: str, kind: Any
) -> None:
    """By the default strategy, which is FULL: producers and consumers, and both hear why."""
    producer = client.create_producer(topic, schema=kind(Place))
    producer.send(Place(**PLACE))
    for other in (PlaceByText, PlaceWithMust):
        with pytest.raises(pulsar.IncompatibleSchema):
            client.create_producer(topic, schema=kind(other))
        with pytest.raises(pulsar.IncompatibleSchema):
            client.subscribe(topic, "sub", schema=kind(other))
    # Records go by their fields, and a name is not one.
    client.create_producer(topic, schema=kind(PlaceOnceMore))
    assert _versions(server, topic) == [0, 1]
    producer.send(Place(**PLACE))


def test_strategies_and_switches_are_followed_at_once(
    client: Any, server: ServerProcess, topic: str
) -> None:
    path = f"persistent/{topic.partition('://')[2]}"
    client.create_producer(topic, schema=AvroSchema(Place)).send(Place(**PLACE))
    server.admin("PUT", f"{path}/schemaCompatibilityStrategy", "FORWARD")
    client.create_producer(topic, schema=AvroSchema(PlaceWithMust))
    with pytest.raises(pulsar.IncompatibleSchema):
        client.create_producer(topic, schema=AvroSchema(PlaceByText))
    server.admin("PUT", f"{path}/schemaCompatibilityStrategy", "ALWAYS_COMPATIBLE")
    client.create_producer(topic, schema=AvroSchema(PlaceByText))
    server.admin("PUT", f"{path}/schemaCompatibilityStrategy", "ALWAYS_INCOMPATIBLE")
    client.create_producer(topic, schema=AvroSchema(Place))
    with pytest.raises(pulsar.IncompatibleSchema):
        client.create_producer(topic, schema=AvroSchema(PlaceWithCountry))
    assert _versions(server, topic) == [0, 1, 2]
    server.admin("POST", f"{path}/schemaValidationEnforced", True)
    with pytest.raises(pulsar.IncompatibleSchema):
        client.create_producer(topic)
    client.subscribe(topic, "plain").close()


def test_a_schema_that_was_deleted_no_longer_binds(
    client: Any, server: ServerProcess, topic: str
) -> None:
    path = f"schemas/{topic.partition('://')[2]}/schema"
    client.create_producer(topic, schema=AvroSchema(Place)).send(Place(**PLACE))
    assert server.admin("DELETE", path) == {"version": {"version": 1}}
    client.create_producer(topic, schema=AvroSchema(PlaceByText))
    assert _versions(server, topic) == [2]
    # The message still finds the version that it was written with.
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert reader.read_next(RECEIVE_MS).schema_version()
    assert server.admin("GET", f"{path}/0")["version"] == 0


def test_bytes_go_with_any_schema(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub", schema=BytesSchema())
    client.create_producer(topic, schema=StringSchema()).send("text")
    publish(client, topic, numbered(1))
    assert consumer.receive(RECEIVE_MS).value() == b"text"
    assert consumer.receive(RECEIVE_MS).value() == numbered(1)[0]


def test_a_schema_given_by_the_admin_interface_binds(
    client: Any, server: ServerProcess, topic: str
) -> None:
    path = f"schemas/{topic.partition('://')[2]}/schema"
    server.admin("POST", path, {"type": "STRING", "schema": "", "properties": {}})
    with pytest.raises(pulsar.IncompatibleSchema):
        client.create_producer(topic, schema=JsonSchema(Place))
    client.create_producer(topic, schema=StringSchema()).send("text")


def _versions(server: ServerProcess, topic: str) -> list[int]:
    found = server.admin("GET", f"schemas/{topic.partition('://')[2]}/schemas")
    return [each["version"] for each in found["getSchemaResponses"]]
