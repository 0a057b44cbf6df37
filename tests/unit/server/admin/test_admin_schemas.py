"""Schemas by REST: versions, deletion, what is refused, and the policies that decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from magnetar.errors import RequestError
from tests.unit.server.admin.world import World, run

NAMESPACE = "namespaces/public/default"
TOPIC = "persistent/public/default/t"


def order(*more: str) -> dict[str, Any]:
    fields: list[dict[str, Any]] = [{"name": "id", "type": "int"}]
    fields += [{"name": name, "type": "int", "default": 1} for name in more]
    definition = {"type": "record", "name": "Order", "fields": fields}
    return {"type": "JSON", "schema": json.dumps(definition), "properties": {}}


def test_schemas(tmp_path: Path) -> None:
    path = "schemas/public/default/t"
    one, two = {**order(), "properties": {"a": "b"}}, order("cost")

    async def scenario(world: World) -> None:
        await world.refuse(404, "GET", f"{path}/schema")
        added = await world.ask("POST", f"{path}/schema", one)
        assert (added.status, added.body) == (200, {"version": {"version": 0}})
        again = await world.ask("POST", f"{path}/schema", {**one, "schema": f" {one['schema']}"})
        assert again.body == added.body
        await world.ask("POST", f"{path}/schema", two)
        found = await world.get(f"{path}/schema")
        assert (found["version"], found["type"], found["data"]) == (1, "JSON", two["schema"])
        first = await world.get(f"{path}/schema/0")
        assert (first["data"], first["properties"]) == (one["schema"], one["properties"])
        assert first["timestamp"] > 0
        listed = await world.get(f"{path}/schemas")
        assert [each["version"] for each in listed["getSchemaResponses"]] == [0, 1]
        asked = await world.ask("POST", f"{path}/version", one)
        assert (asked.status, asked.body) == (200, {"version": 0})
        asked = await world.ask("POST", f"{path}/version", order("new"))
        assert asked.body == {"version": -1}
        await world.refuse(409, "POST", f"{path}/schema", {"type": "STRING"})
        await world.refuse(422, "POST", f"{path}/schema", {"type": "STRING", "schema": "x"})
        await world.refuse(422, "POST", f"{path}/schema", {"type": "NONE"})
        await world.refuse(412, "POST", f"{path}/schema", {"type": "POEM"})
        await world.refuse(412, "POST", f"{path}/schema", {})
        await world.refuse(404, "GET", f"{path}/schema/7")
        await world.refuse(412, "GET", f"{path}/schema/x")
        await world.refuse(422, "POST", f"{path}/version", {**two, "schema": "?"})
        await world.refuse(404, "POST", "schemas/public/none/t/schema", one)
        gone = await world.ask("DELETE", f"{path}/schema")
        assert (gone.status, gone.body) == (200, {"version": {"version": 2}})
        await world.refuse(404, "GET", f"{path}/schema")
        gone = await world.ask("DELETE", f"{path}/schema")
        assert (gone.status, gone.body) == (200, {"version": {"version": 2}})
        # What is read by its number is there still, until it is removed by force.
        assert (await world.get(f"{path}/schema/1"))["data"] == two["schema"]
        gone = await world.ask("DELETE", f"{path}/schema?force=true")
        assert (gone.status, gone.body) == (200, {"version": {"version": 2}})
        await world.refuse(404, "GET", f"{path}/schema/1")
        await world.refuse(404, "DELETE", f"{path}/schema")
        added = await world.ask("POST", f"{path}/schema", two)
        assert added.body == {"version": {"version": 0}}

    run(tmp_path, scenario)


def test_whether_a_schema_is_compatible(tmp_path: Path) -> None:
    path = "schemas/public/default/t/compatibility"

    async def scenario(world: World) -> None:
        async def fits(body: object) -> bool:
            answer = await world.ask("POST", path, body)
            assert answer.status == 202
            assert answer.body["schemaCompatibilityStrategy"] == "FULL"
            assert answer.body.keys() == {"compatibility", "schemaCompatibilityStrategy"}
            return bool(answer.body["compatibility"])

        assert await fits(order())
        await world.ask("POST", "schemas/public/default/t/schema", order())
        assert await fits(order())
        assert await fits(order("cost"))
        text = order()["schema"].replace("int", "string")
        assert not await fits({**order(), "schema": text})
        assert not await fits({"type": "STRING"})
        await world.refuse(422, "POST", path, {"type": "JSON", "schema": "{}"})
        # A look stores nothing.
        found = await world.get("schemas/public/default/t/schemas")
        assert len(found["getSchemaResponses"]) == 1

    run(tmp_path, scenario)


def test_a_schema_of_two_parts_is_shown_as_both(tmp_path: Path) -> None:
    path = "schemas/public/default/t/schema"
    properties = {"key.schema.type": "STRING", "value.schema.type": "JSON"}
    value = json.loads(order()["schema"])

    async def scenario(world: World) -> None:
        body = {"type": "KEY_VALUE", "properties": properties}
        text = json.dumps({"key": "", "value": value})
        added = await world.ask("POST", path, {**body, "schema": text})
        assert added.body == {"version": {"version": 0}}
        found = await world.get(path)
        assert (found["type"], found["properties"]) == ("KEY_VALUE", properties)
        assert json.loads(found["data"]) == {"key": "", "value": value}
        for wrong in ("", "{}", '{"key": ""}', '{"key": "", "value": 5}', "[" * 2000):
            await world.refuse(422, "POST", path, {**body, "schema": wrong})

    run(tmp_path, scenario)

    run(tmp_path, scenario)


# --- policies


def _as_sent(body: dict[str, Any]) -> dict[str, Any]:
    return {"name": "s", "schema_data": body["schema"].encode(), "type": 2}


STRICT = {**order(), "schema": order("cost")["schema"].replace(', "default": 1', "")}
"""It has a field more than `order()`, and no default for it."""


async def produces(world: World, schema: dict[str, Any] | None, topic: str = "t") -> bool:
    """Whether a producer with this schema is admitted."""
    fields = {} if schema is None else {"schema": _as_sent(schema)}
    async with world.link() as link:
        try:
            await link.request("PRODUCER", topic=topic, producer_id=1, **fields)
        except RequestError as error:
            if "schema" not in str(error):
                raise
            return False
    return True


def test_the_strategy_of_the_topic_goes_before_those_of_its_namespace(tmp_path: Path) -> None:
    compatibility = "schemas/public/default/t/compatibility"

    async def scenario(world: World) -> None:
        async def holds(strategy: str, *, strict: bool) -> None:
            answer = await world.ask("POST", compatibility, STRICT)
            found = answer.body["schemaCompatibilityStrategy"], answer.body["compatibility"]
            assert found == (strategy, strict)

        assert await produces(world, order())
        await holds("FULL", strict=False)
        assert not await produces(world, STRICT)
        # The older policy of a namespace, its newer one, and that of the topic; each at once.
        path = f"{NAMESPACE}/schemaAutoUpdateCompatibilityStrategy"
        await world.change("PUT", path, "AutoUpdateDisabled")
        await holds("ALWAYS_INCOMPATIBLE", strict=False)
        assert not await produces(world, order("cost"))
        await world.change("PUT", path, "Backward")
        await holds("BACKWARD", strict=False)
        await world.change("PUT", f"{NAMESPACE}/schemaCompatibilityStrategy", "FORWARD")
        await holds("FORWARD", strict=True)
        await world.change("PUT", f"{TOPIC}/schemaCompatibilityStrategy", "FULL_TRANSITIVE")
        await holds("FULL_TRANSITIVE", strict=False)
        assert not await produces(world, STRICT)
        # UNDEFINED is none.
        await world.change("PUT", f"{TOPIC}/schemaCompatibilityStrategy", "UNDEFINED")
        await holds("FORWARD", strict=True)
        assert await produces(world, STRICT)

    run(tmp_path, scenario)


def test_a_partitioned_topic_has_the_strategy_of_its_partitions(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", f"{TOPIC}/partitions", 2)
        await world.change("PUT", f"{TOPIC}/schemaCompatibilityStrategy", "FORWARD")
        for schema in (order(), STRICT):
            answer = await world.ask("POST", "schemas/public/default/t/schema", schema)
            assert answer.status == 200, answer
        # One registry for all of them.
        assert await produces(world, STRICT, "t-partition-1")
        found = await world.get("schemas/public/default/t-partition-0/schemas")
        assert len(found["getSchemaResponses"]) == 2

    run(tmp_path, scenario)


def test_updates_by_clients_can_be_switched_off(tmp_path: Path) -> None:
    path = "schemas/public/default/t/schema"

    async def scenario(world: World) -> None:
        await world.change("POST", f"{NAMESPACE}/isAllowAutoUpdateSchema", False)
        assert not await produces(world, order())
        # Tools may add what clients may not.
        assert (await world.ask("POST", path, order())).status == 200
        assert await produces(world, order())
        assert not await produces(world, order("cost"))
        assert (await world.ask("POST", path, order("cost"))).status == 200
        assert await produces(world, order("cost"))
        await world.change("POST", f"{NAMESPACE}/isAllowAutoUpdateSchema", True)
        assert await produces(world, order("cost", "more"))

    run(tmp_path, scenario)


@pytest.mark.parametrize("path", [NAMESPACE, TOPIC])
def test_a_schema_can_be_demanded(tmp_path: Path, path: str) -> None:
    async def scenario(world: World) -> None:
        assert await produces(world, None)
        await world.change("POST", f"{path}/schemaValidationEnforced", True)
        # There is none so far.
        assert await produces(world, None)
        assert await produces(world, order())
        assert not await produces(world, None)
        # Consumers are not asked for one.
        async with world.link() as link:
            await world.subscribe(link, "t", "s", 1)
        await world.change("POST", f"{path}/schemaValidationEnforced", False)
        assert await produces(world, None)

    run(tmp_path, scenario)


def test_unsound_schemas_are_told_where_they_are_wrong(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        wrong = {**order(), "schema": order()["schema"].replace('"int"', '"integer"')}
        reason = await world.refuse(422, "POST", "schemas/public/default/t/schema", wrong)
        assert "there is no type 'integer'" in reason
        async with world.link() as link:
            with pytest.raises(RequestError, match="'integer'"):
                await link.request("PRODUCER", topic="t", producer_id=1, schema=_as_sent(wrong))

    run(tmp_path, scenario)
