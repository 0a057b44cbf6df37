"""The schema registry: versions, equal bytes, deletion, races."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from magnetar.broker.api import SchemaData
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.schemas import Schemas, is_schema, version_bytes, version_from
from magnetar.errors import CorruptMetadata, IncompatibleSchema, TooManyRequests
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.world import World

AVRO = 4
STRING = 1
ID = "public/default/orders"


def with_schemas(scenario: Callable[[Schemas], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(World().parts().schemas)

    run(main())


def test_equal_bytes_are_one_version() -> None:
    async def scenario(schemas: Schemas) -> None:
        assert await schemas.latest(ID) is None
        assert await schemas.register(ID, SchemaData(AVRO, b"a"), strategy="FULL") == 0
        assert await schemas.register(ID, SchemaData(AVRO, b"b"), strategy="FULL") == 1
        assert (
            await schemas.register(ID, SchemaData(AVRO, b"a", name="other"), strategy="FULL") == 0
        )
        latest = await schemas.latest(ID)
        assert latest is not None
        assert (latest.version, latest.data) == (1, b"b")
        assert await schemas.find(ID, SchemaData(AVRO, b"a")) == 0
        assert await schemas.find(ID, SchemaData(STRING, b"a")) is None
        stored = await schemas.version(ID, 0)
        assert stored is not None
        assert stored.as_schema() == SchemaData(AVRO, b"a")
        assert await schemas.version(ID, 7) is None

    with_schemas(scenario)


def test_a_topic_keeps_its_type() -> None:
    async def scenario(schemas: Schemas) -> None:
        await schemas.register(ID, SchemaData(AVRO, b"a"), strategy="FULL")
        with pytest.raises(IncompatibleSchema):
            await schemas.register(ID, SchemaData(STRING, b""), strategy="FULL")
        with pytest.raises(IncompatibleSchema):
            await schemas.register(ID, SchemaData(AVRO, b"b"), strategy="ALWAYS_INCOMPATIBLE")
        with pytest.raises(IncompatibleSchema):
            await schemas.register(ID, SchemaData(AVRO, b"b"), strategy="FULL", may_add=False)
        assert (
            await schemas.register(ID, SchemaData(STRING, b""), strategy="ALWAYS_COMPATIBLE") == 1
        )

    with_schemas(scenario)


def test_the_check_sees_what_is_in_force() -> None:
    async def main() -> None:
        seen: list[list[bytes]] = []

        def check(schema: SchemaData, in_force: Sequence[SchemaData], strategy: str) -> None:
            seen.append([each.data for each in in_force])

        parts = World().parts()
        schemas = Schemas(parts.metadata, parts.clock, check)
        for data in (b"a", b"b", b"c"):
            await schemas.register(ID, SchemaData(AVRO, data), strategy="FULL")
        assert seen == [[], [b"a"], [b"b"]]
        await schemas.register(ID, SchemaData(AVRO, b"d"), strategy="FULL_TRANSITIVE")
        assert seen[3:] == [[b"a", b"b", b"c"]]

    run(main())


def test_a_deletion_is_a_version() -> None:
    async def scenario(schemas: Schemas) -> None:
        assert await schemas.delete(ID) is None
        await schemas.register(ID, SchemaData(AVRO, b"a"), strategy="FULL")
        assert await schemas.delete(ID) == 1
        assert await schemas.latest(ID) is None
        assert await schemas.version(ID, 1) is None
        assert await schemas.version(ID, 0) is not None
        assert await schemas.register(ID, SchemaData(STRING, b"s"), strategy="FULL") == 2
        await schemas.forget(ID)
        assert await schemas.version(ID, 0) is None
        assert await schemas.register(ID, SchemaData(STRING, b"s"), strategy="FULL") == 0

    with_schemas(scenario)


def test_racing_registrations_get_versions_of_their_own() -> None:
    async def main() -> None:
        world = World()
        several = [world.parts().schemas for _ in range(5)]
        versions = await asyncio.gather(
            *(
                schemas.register(ID, SchemaData(AVRO, b"%d" % (number % 3)), strategy="FULL")
                for number, schemas in enumerate(several)
            )
        )
        assert sorted(set(versions)) == [0, 1, 2]
        assert versions[0] == versions[3]
        assert versions[1] == versions[4]

    run(main())


def test_producers_and_consumers() -> None:
    async def scenario(schemas: Schemas) -> None:
        policies = TopicPolicies()
        assert await schemas.for_producer(ID, None, policies) is None
        await schemas.for_consumer(ID, None, policies, idle=False)
        with pytest.raises(IncompatibleSchema):
            await schemas.for_consumer(ID, SchemaData(AVRO, b"a"), policies, idle=False)
        await schemas.for_consumer(ID, SchemaData(AVRO, b"a"), policies, idle=True)
        assert await schemas.for_producer(ID, SchemaData(AVRO, b"a"), policies) == 0
        await schemas.for_consumer(ID, SchemaData(AVRO, b"b"), policies, idle=False)
        assert await schemas.find(ID, SchemaData(AVRO, b"b")) is None, "a check stores nothing"
        with pytest.raises(IncompatibleSchema):
            await schemas.for_consumer(ID, SchemaData(STRING, b"b"), policies, idle=True)
        required = TopicPolicies(schema_required=True)
        with pytest.raises(IncompatibleSchema):
            await schemas.for_producer(ID, SchemaData(0, b""), required)

    with_schemas(scenario)


def test_versions_as_bytes() -> None:
    assert version_bytes(None) == b""
    assert version_bytes(258) == b"\x00\x00\x00\x00\x00\x00\x01\x02"
    assert version_from(version_bytes(258)) == 258
    with pytest.raises(IncompatibleSchema):
        version_from(b"")
    assert not is_schema(None)
    assert not is_schema(SchemaData(21, b""))
    assert is_schema(SchemaData(STRING, b""))


def test_a_record_that_is_not_ours_is_reported() -> None:
    async def main() -> None:
        parts = World().parts()
        await parts.schemas.register(ID, SchemaData(AVRO, b"a"), strategy="FULL")
        (key,) = await parts.metadata.scan_keys("/broker/schemas/public%2Fdefault%2Forders")
        await parts.metadata.put(key, b"\xc1 nonsense")
        with pytest.raises(CorruptMetadata):
            await parts.schemas.latest(ID)

    run(main())


def test_registering_reads_what_is_compared_and_not_all_versions() -> None:
    async def main() -> None:
        parts = World().parts()
        schemas = parts.schemas
        for number in range(100):
            await schemas.register(ID, SchemaData(AVRO, b"%d" % number), strategy="FULL")
        read: list[str] = []
        get, scan = parts.metadata.get, parts.metadata.scan

        async def counted(key: str) -> Any:
            read.append(key)
            return await get(key)

        def scanned(*args: Any, **fields: Any) -> Any:
            read.extend(["scan"] * 100)
            return scan(*args, **fields)

        # As twenty producers that come at once.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts.metadata, "get", counted)
            patch.setattr(parts.metadata, "scan", scanned)
            known = SchemaData(AVRO, b"7")
            found = await asyncio.gather(
                *(schemas.register(ID, known, strategy="FULL") for _ in range(20))
            )
            assert found == [7] * 20
            assert len(read) <= 3 * 20
            read.clear()
            assert await schemas.register(ID, SchemaData(AVRO, b"new"), strategy="FULL") == 100
            assert len(read) <= 4

    run(main())


def test_what_another_broker_stored_or_removed_is_seen() -> None:
    async def main() -> None:
        world = World()
        one, other = world.parts().schemas, world.parts().schemas
        for number in range(3):
            await one.register(ID, SchemaData(AVRO, b"%d" % number), strategy="FULL")
        assert await other.find(ID, SchemaData(AVRO, b"2")) == 2
        assert await other.register(ID, SchemaData(AVRO, b"3"), strategy="FULL") == 3
        assert await one.find(ID, SchemaData(AVRO, b"3")) == 3
        # The topic is deleted and made anew, with as many versions as it had.
        await other.forget(ID)
        assert await one.latest(ID) is None
        assert await other.register(ID, SchemaData(STRING, b"s"), strategy="FULL") == 0
        assert await one.find(ID, SchemaData(STRING, b"s")) == 0
        await other.forget(ID)
        assert await other.register(ID, SchemaData(STRING, b"t"), strategy="FULL") == 0
        assert await one.find(ID, SchemaData(STRING, b"s")) is None

    run(main())


def test_all_versions_of_a_schema_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magnetar.broker.policy.schemas.VERSIONS_BYTES_MAX", 1500)

    async def scenario(schemas: Schemas) -> None:
        for number in range(3):
            await schemas.register(ID, SchemaData(AVRO, b"%300d" % number), strategy="FULL")
        with pytest.raises(TooManyRequests):
            await schemas.register(ID, SchemaData(AVRO, b"%300d" % 3), strategy="FULL")
        assert await schemas.register(ID, SchemaData(AVRO, b"small"), strategy="FULL") == 3

    with_schemas(scenario)
