"""Avro schemas for tests: records in a few words, strategies that make them, and work run whole."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st

from magnetar.broker.policy.avro import AvroType, Steps, parsed

Result = TypeVar("Result")


def whole(steps: Steps[Result]) -> Result:
    """All slices of some work, one behind the other."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: Result = done.value
            return result


def slices_of(steps: Steps[Any]) -> int:
    return sum(1 for _ in steps) + 1


def avro(schema: object) -> AvroType:
    return whole(parsed(msgspec.json.encode(schema)))


def record(*fields: dict[str, Any], name: str = "Order", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: object, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


_PRIMITIVES = st.sampled_from(
    ["null", "boolean", "int", "long", "float", "double", "bytes", "string"]
)


@st.composite
def schemas(draw: st.DrawFn) -> Any:
    """A schema of any shape, whose named types have names of their own."""
    taken: list[str] = []

    def fresh() -> str:
        taken.append(f"T{len(taken)}")
        return taken[-1]

    def of(depth: int, *, in_union: bool = False) -> Any:
        simple = ["primitive", "primitive", "enum", "fixed"]
        kinds = simple if depth == 0 else [*simple, "record", "record", "array", "map", "union"]
        kind = draw(st.sampled_from(kinds))
        if kind == "union" and not in_union:
            branches = [of(depth - 1, in_union=True) for _ in range(draw(st.integers(1, 3)))]
            labels = {
                each if isinstance(each, str) else each.get("name", each["type"]): each
                for each in branches
            }
            return list(labels.values())
        if kind == "enum":
            symbols = draw(st.lists(st.sampled_from("ABCD"), min_size=1, unique=True))
            return {"type": "enum", "name": fresh(), "symbols": symbols}
        if kind == "fixed":
            return {"type": "fixed", "name": fresh(), "size": draw(st.integers(0, 9))}
        if kind == "record":
            name = fresh()
            names = draw(st.lists(st.sampled_from("abcd"), unique=True))
            return record(*(field(each, of(depth - 1)) for each in names), name=name)
        if kind == "array":
            return {"type": "array", "items": of(depth - 1)}
        if kind == "map":
            return {"type": "map", "values": of(depth - 1)}
        return draw(_PRIMITIVES)

    return of(3)
