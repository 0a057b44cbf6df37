"""The schema registry: versions, what is one, strategies, deletion, races, bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from magnetar.broker.api import SchemaData
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.schema_rules import AUTO_CONSUME_TYPE
from magnetar.broker.policy.schemas import (
    Schemas,
    StoredSchema,
    is_schema,
    version_bytes,
    version_from,
)
from magnetar.errors import CorruptMetadata, IncompatibleSchema, InvalidSchema, TooManyRequests
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.policy.avro_samples import field, record
from tests.unit.broker.world import World

AVRO = 4
STRING = 1
EXTERNAL = 22
ID = "public/default/orders"


def with_schemas(scenario: Callable[[Schemas], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(World().parts().schemas)

    run(main())


def order(*fields: dict[str, Any]) -> SchemaData:
    return SchemaData(AVRO, msgspec.json.encode(record(*fields)))


A, B = field("a", "int"), field("b", "int", default=1)
OLD, NEW = order(A), order(A, B)
STRICT = order(A, field("c", "int"))
"""It can be read with the old one, and reads nothing of it."""


async def passes(asked: Awaitable[object]) -> bool:
    try:
        await asked
    except IncompatibleSchema:
        return False
    return True


def versioned(number: int) -> SchemaData:
    """One of many that go with each other."""
    return order(A, *([field(f"f{number}", "int", default=1)] if number else []))


def test_what_says_the_same_is_one_version() -> None:
    async def scenario(schemas: Schemas) -> None:
        assert await schemas.latest(ID) is None
        assert await schemas.register(ID, OLD, strategy="FULL") == 0
        assert await schemas.register(ID, NEW, strategy="FULL") == 1
        spaced = SchemaData(AVRO, msgspec.json.format(OLD.data, indent=2), "other")
        # Whatever the strategy, and whether anything may be added.
        for strategy in ("FULL", "ALWAYS_INCOMPATIBLE"):
            for schema in (OLD, spaced):
                found = await schemas.register(ID, schema, strategy=strategy, may_add=False)
                assert found == 0
        latest = await schemas.latest(ID)
        assert latest is not None
        assert (latest.version, latest.data) == (1, NEW.data)
        assert await schemas.find(ID, spaced) == 0
        assert await schemas.find(ID, SchemaData(STRING, b"")) is None
        stored = await schemas.version(ID, 0)
        assert stored is not None
        assert stored.as_schema() == OLD
        assert await schemas.version(ID, 7) is None

    with_schemas(scenario)


def test_versions_of_another_broker_are_known_by_what_they_say() -> None:
    async def main() -> None:
        world = World()
        await world.parts().schemas.register(ID, OLD, strategy="FULL")
        spaced = SchemaData(AVRO, OLD.data + b" ")
        assert await world.parts().schemas.register(ID, spaced, strategy="FULL") == 0

    run(main())


STRATEGIES = {
    # Whether NEW, STRICT and another type may follow OLD.
    "BACKWARD": (True, False, False),
    "FORWARD": (True, True, False),
    "FULL": (True, False, False),
    "BACKWARD_TRANSITIVE": (True, False, False),
    "FORWARD_TRANSITIVE": (True, True, False),
    "FULL_TRANSITIVE": (True, False, False),
    "ALWAYS_COMPATIBLE": (True, True, True),
    "ALWAYS_INCOMPATIBLE": (False, False, False),
}


@pytest.mark.parametrize(("strategy", "allowed"), STRATEGIES.items(), ids=STRATEGIES.keys())
def test_strategies(strategy: str, allowed: tuple[bool, bool, bool]) -> None:
    async def scenario(schemas: Schemas) -> None:
        # The first one is an update of nothing.
        await schemas.register(ID, OLD, strategy=strategy)
        for schema, may in zip((NEW, STRICT, SchemaData(STRING, b"")), allowed, strict=True):
            assert await passes(schemas.check(ID, schema, strategy=strategy)) is may
            if not may:
                assert not await passes(schemas.register(ID, schema, strategy=strategy))

    with_schemas(scenario)


def test_a_transitive_strategy_looks_at_all_in_force() -> None:
    text = order(A, field("b", "string", default="x"))

    async def scenario(schemas: Schemas) -> None:
        for schema in (NEW, OLD):
            await schemas.register(ID, schema, strategy="FULL")
        with pytest.raises(IncompatibleSchema, match=r"version 0, by FULL_TRANSITIVE: .*'b'"):
            await schemas.register(ID, text, strategy="FULL_TRANSITIVE")
        assert await schemas.register(ID, text, strategy="FULL") == 2
        # What was deleted is not in force.
        await schemas.delete(ID)
        await schemas.register(ID, OLD, strategy="FULL")
        assert await schemas.register(ID, NEW, strategy="FULL_TRANSITIVE") == 5

    with_schemas(scenario)


def test_what_is_no_schema_is_not_stored() -> None:
    async def scenario(schemas: Schemas) -> None:
        for schema in (SchemaData(AVRO, b"{}"), SchemaData(AUTO_CONSUME_TYPE, b"")):
            with pytest.raises(InvalidSchema):
                await schemas.register(ID, schema, strategy="ALWAYS_COMPATIBLE")
        assert await schemas.latest(ID) is None

    with_schemas(scenario)


def test_unsound_schemas_of_earlier_releases_can_be_used_and_left() -> None:
    async def main() -> None:
        parts = World().parts()
        stored = StoredSchema(schema_id=ID, version=0, type=AVRO, data=b"{}", created_ms=1)
        key = "/broker/schemas/public%2Fdefault%2Forders/" + "0" * 20
        await parts.metadata.put(key, msgspec.msgpack.encode(stored))
        schemas = parts.schemas
        # Those who have it go on; nothing can be compared with it.
        assert await schemas.register(ID, SchemaData(AVRO, b"{}"), strategy="FULL") == 0
        with pytest.raises(IncompatibleSchema, match="no sound AVRO"):
            await schemas.register(ID, OLD, strategy="FULL")
        assert await schemas.register(ID, OLD, strategy="ALWAYS_COMPATIBLE") == 1
        assert await schemas.register(ID, NEW, strategy="FULL") == 2

    run(main())


def test_a_deletion_is_a_version() -> None:
    async def scenario(schemas: Schemas) -> None:
        assert await schemas.delete(ID) is None
        await schemas.register(ID, OLD, strategy="FULL")
        assert await schemas.delete(ID) == 1
        # Once more says nothing new.
        assert await schemas.delete(ID) == 1
        assert await schemas.latest(ID) is None
        assert await schemas.version(ID, 1) is None
        assert await schemas.version(ID, 0) is not None
        assert await schemas.register(ID, SchemaData(STRING, b""), strategy="FULL") == 2
        await schemas.forget(ID)
        assert await schemas.version(ID, 0) is None
        assert await schemas.register(ID, SchemaData(STRING, b""), strategy="FULL") == 0

    with_schemas(scenario)


def test_racing_registrations_get_versions_of_their_own() -> None:
    async def main() -> None:
        world = World()
        several = [world.parts().schemas for _ in range(5)]
        versions = await asyncio.gather(
            *(
                schemas.register(ID, versioned(number % 3), strategy="FULL")
                for number, schemas in enumerate(several)
            )
        )
        assert sorted(set(versions)) == [0, 1, 2]
        assert versions[0] == versions[3]
        assert versions[1] == versions[4]

    run(main())


def test_producers() -> None:
    async def scenario(schemas: Schemas) -> None:
        policies, closed = TopicPolicies(), TopicPolicies(schema_updates=False)
        required = TopicPolicies(schema_required=True)
        assert await schemas.for_producer(ID, None, policies) is None
        assert await schemas.for_producer(ID, None, required) is None
        # Not even the first one comes from a producer.
        with pytest.raises(IncompatibleSchema):
            await schemas.for_producer(ID, OLD, closed)
        assert await schemas.for_producer(ID, OLD, policies) == 0
        assert await schemas.for_producer(ID, OLD, closed) == 0
        with pytest.raises(IncompatibleSchema):
            await schemas.for_producer(ID, NEW, closed)
        for none in (None, SchemaData(0, b"")):
            assert await schemas.for_producer(ID, none, policies) is None
            with pytest.raises(IncompatibleSchema):
                await schemas.for_producer(ID, none, required)
        with pytest.raises(InvalidSchema):
            await schemas.for_producer(ID, SchemaData(AUTO_CONSUME_TYPE, b""), policies)

    with_schemas(scenario)


def test_a_consumer_brings_the_first_schema_of_an_idle_topic() -> None:
    async def scenario(schemas: Schemas) -> None:
        policies = TopicPolicies()
        for none in (None, SchemaData(0, b""), SchemaData(AUTO_CONSUME_TYPE, b"")):
            await schemas.for_consumer(ID, none, policies, idle=False)
        with pytest.raises(IncompatibleSchema):
            await schemas.for_consumer(ID, OLD, policies, idle=False)
        with pytest.raises(IncompatibleSchema):
            await schemas.for_consumer(ID, OLD, TopicPolicies(schema_updates=False), idle=True)
        await schemas.for_consumer(ID, OLD, policies, idle=True)
        assert await schemas.find(ID, OLD) == 0
        await schemas.for_consumer(ID, NEW, policies, idle=True)
        assert await schemas.find(ID, NEW) is None, "a check stores nothing"

    with_schemas(scenario)


READERS = {
    # Whether a consumer with the old schema, the strict one and another type may read a topic
    # whose versions are the old one and, as the latest, the new one.
    "BACKWARD": (True, False, False),
    "FORWARD": (True, False, False),
    "FORWARD_TRANSITIVE": (True, False, False),
    "FULL": (True, False, False),
    "BACKWARD_TRANSITIVE": (True, False, False),
    "FULL_TRANSITIVE": (True, False, False),
    "ALWAYS_COMPATIBLE": (True, True, True),
    "ALWAYS_INCOMPATIBLE": (True, False, False),
}


@pytest.mark.parametrize(("strategy", "allowed"), READERS.items(), ids=READERS.keys())
def test_consumers_are_checked_by_what_they_read(
    strategy: str, allowed: tuple[bool, bool, bool]
) -> None:
    async def scenario(schemas: Schemas) -> None:
        for schema in (OLD, NEW):
            await schemas.register(ID, schema, strategy="FULL")
        policies = TopicPolicies(schema_strategy=strategy)
        for schema, may in zip((OLD, STRICT, SchemaData(STRING, b"")), allowed, strict=True):
            assert await passes(schemas.for_consumer(ID, schema, policies, idle=True)) is may

    with_schemas(scenario)


def test_a_consumer_that_cannot_read_the_latest_is_refused_though_its_schema_is_in_force() -> None:
    async def scenario(schemas: Schemas) -> None:
        for schema in (STRICT, OLD):
            await schemas.register(ID, schema, strategy="BACKWARD")
        policies = TopicPolicies(schema_strategy="BACKWARD")
        await schemas.for_consumer(ID, OLD, policies, idle=False)
        with pytest.raises(IncompatibleSchema, match="'c'"):
            await schemas.for_consumer(ID, STRICT, policies, idle=False)
        # A producer with it is welcome: it is a version in force.
        assert await schemas.for_producer(ID, STRICT, policies) == 0

    with_schemas(scenario)


def test_versions_as_bytes() -> None:
    assert version_bytes(None) == b""
    assert version_bytes(258) == b"\x00\x00\x00\x00\x00\x00\x01\x02"
    assert version_from(version_bytes(258)) == 258
    with pytest.raises(IncompatibleSchema):
        version_from(b"")
    assert not is_schema(None)
    assert not is_schema(SchemaData(0, b""))
    assert is_schema(SchemaData(STRING, b""))


def test_a_record_that_is_not_ours_is_reported() -> None:
    async def main() -> None:
        parts = World().parts()
        await parts.schemas.register(ID, OLD, strategy="FULL")
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
            await schemas.register(ID, versioned(number), strategy="FULL")
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
            known = versioned(7)
            found = await asyncio.gather(
                *(schemas.register(ID, known, strategy="FULL") for _ in range(20))
            )
            assert found == [7] * 20
            assert len(read) <= 3 * 20
            read.clear()
            assert await schemas.register(ID, versioned(100), strategy="FULL") == 100
            assert len(read) <= 4

    run(main())


def test_what_another_broker_stored_or_removed_is_seen() -> None:
    async def main() -> None:
        world = World()
        one, other = world.parts().schemas, world.parts().schemas
        for number in range(3):
            await one.register(ID, versioned(number), strategy="FULL")
        assert await other.find(ID, versioned(2)) == 2
        assert await other.register(ID, versioned(3), strategy="FULL") == 3
        assert await one.find(ID, versioned(3)) == 3
        # The topic is deleted and made anew, with as many versions as it had.
        await other.forget(ID)
        assert await one.latest(ID) is None
        assert await other.register(ID, SchemaData(EXTERNAL, b"s"), strategy="FULL") == 0
        assert await one.find(ID, SchemaData(EXTERNAL, b"s")) == 0
        await other.forget(ID)
        assert await other.register(ID, SchemaData(EXTERNAL, b"t"), strategy="FULL") == 0
        assert await one.find(ID, SchemaData(EXTERNAL, b"s")) is None

    run(main())


def test_all_versions_of_a_schema_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magnetar.broker.policy.schemas.VERSIONS_BYTES_MAX", 1500)

    async def scenario(schemas: Schemas) -> None:
        for number in range(3):
            await schemas.register(ID, SchemaData(EXTERNAL, b"%300d" % number), strategy="FULL")
        with pytest.raises(TooManyRequests):
            await schemas.register(ID, SchemaData(EXTERNAL, b"%300d" % 3), strategy="FULL")
        assert await schemas.register(ID, SchemaData(EXTERNAL, b"small"), strategy="FULL") == 3

    with_schemas(scenario)


# --- bounds of the work


def _wide(name: str, count: int = 6000) -> SchemaData:
    return order(*(field(f"{name}{each}", "int", default=1) for each in range(count)))


async def _turns_until(done: asyncio.Task[int]) -> int:
    turns = 0
    while not done.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


def test_large_schemas_leave_turns_to_others() -> None:
    async def scenario(schemas: Schemas) -> None:
        for name in ("a", "b"):
            adding = asyncio.create_task(schemas.register(ID, _wide(name), strategy="FULL"))
            assert await _turns_until(adding) > 20

    with_schemas(scenario)


def test_large_schemas_are_looked_at_one_at_a_time_and_small_ones_do_not_wait() -> None:
    async def scenario(schemas: Schemas) -> None:
        large = [
            asyncio.create_task(schemas.register(f"{ID}{each}", _wide("a"), strategy="FULL"))
            for each in range(3)
        ]
        await asyncio.sleep(0)
        alone = await _turns_until(asyncio.create_task(schemas.register(ID, OLD, strategy="FULL")))
        together = [await _turns_until(each) for each in large]
        # All would end in the same turn if each had a slice of every turn.
        assert alone < 20
        assert all(turns > 20 for turns in together)

    with_schemas(scenario)


def test_many_versions_leave_turns_to_others() -> None:
    async def main() -> None:
        world = World()
        first = world.parts().schemas
        for number in range(200):
            await first.register(ID, versioned(number), strategy="FULL")
        # Another broker, which has to read all of them; by either question.
        for strategy, name in (("FULL", "one"), ("FULL_TRANSITIVE", "other")):
            added = order(A, field(name, "int", default=1))
            other = world.parts().schemas
            adding = asyncio.create_task(other.register(ID, added, strategy=strategy))
            assert await _turns_until(adding) > 10
            assert adding.result() >= 200

    run(main())


def test_a_comparison_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magnetar.broker.policy.avro_resolution.STEPS_MAX", 1000)

    async def scenario(schemas: Schemas) -> None:
        await schemas.register(ID, _wide("a", 600), strategy="FULL")
        with pytest.raises(IncompatibleSchema, match="too large to be compared"):
            await schemas.register(ID, _wide("b", 600), strategy="FULL")

    with_schemas(scenario)


def test_a_deletion_is_possible_behind_the_last_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magnetar.broker.policy.schemas.VERSIONS_MAX", 3)

    async def scenario(schemas: Schemas) -> None:
        for number in range(3):
            await schemas.register(ID, versioned(number), strategy="FULL")
        with pytest.raises(TooManyRequests):
            await schemas.register(ID, versioned(3), strategy="FULL")
        assert await schemas.delete(ID) == 3
        with pytest.raises(TooManyRequests):
            await schemas.register(ID, versioned(3), strategy="FULL")
        await schemas.forget(ID)
        assert await schemas.register(ID, versioned(3), strategy="FULL") == 0

    with_schemas(scenario)
