"""Pure: Avro schemas, read from their JSON: what they say, and when two of them say the same.

Owns: `AvroType` and its fields, `parsed`, and `meaning`, a digest of what a schema says.

Invariants:
1. What Apache Avro 1.12 takes as a schema is taken, with names that may hold `$` and defaults that
   are not looked at, as Pulsar's broker has it; and nothing else, but for comments in JSON.
2. Two schemas have one meaning if Avro calls them equal: spacing, the order of members, `doc`,
   aliases and the way in which a name is spelled do not matter; properties and defaults do.
3. Nothing here recurses in Python, and nothing runs longer than a slice: functions are generators
   that yield after `SLICE_STEPS` types or fields.

Relies on: the caller, which bounds the bytes of a schema.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]
"""Work in slices: it yields after each, and returns what it came to."""

SLICE_STEPS: Final = 250

PRIMITIVES: Final = frozenset(
    ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
)
_NAMED: Final = {"record": "record", "error": "record", "enum": "enum", "fixed": "fixed"}
_ORDERS: Final = frozenset(("ascending", "descending", "ignore"))
_SIZE_MAX: Final = 2**31 - 1

# `\w` without a digit in front; Avro itself has no `$`, which Java's nested classes have.
_NAME: Final = re.compile(r"(?:[^\W\d]|\$)[\w$]*")
_NAMES: Final = re.compile(rf"(?:{_NAME.pattern}\n)*")

# Members with a meaning of their own; the others are properties.
_OF_TYPES: Final = frozenset(
    ("type", "name", "namespace", "doc", "aliases", "fields", "symbols", "size", "items", "values")
)
_OF_ENUMS: Final = _OF_TYPES | {"default"}
_OF_FIELDS: Final = frozenset(("name", "type", "doc", "default", "order", "aliases"))


class NotAvro(ValueError):
    """A schema is not one; the message says where, and never leaves the package as this."""


@dataclass(slots=True, eq=False)
class AvroField:
    """One field of a record; its type stands in the record's `parts`."""

    name: str
    aliases: list[str]
    order: str
    properties: dict[str, Any]
    has_default: bool
    default: Any = None


@dataclass(slots=True, eq=False)
class AvroType:
    """One type. A named one is a single object, wherever it is used."""

    kind: str
    """As in JSON; empty: somebody used the name, and nobody has defined it so far."""
    name: str = ""
    """With its namespace."""
    aliases: list[str] = field(default_factory=list)
    parts: list[AvroType] = field(default_factory=list)
    """Types of fields, branches of a union, or the one that an array or map holds."""
    fields: list[AvroField] = field(default_factory=list)
    by_name: dict[str, int] = field(default_factory=dict)
    """Where a field stands, by its name."""
    symbols: list[str] = field(default_factory=list)
    size: int = 0
    properties: dict[str, Any] = field(default_factory=dict)

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]


_SIMPLE: Final = {kind: AvroType(kind) for kind in PRIMITIVES}
"""Those without properties; nothing changes them."""


def parsed(data: bytes) -> Steps[AvroType]:
    """The schema that these bytes are; raises `NotAvro`."""
    try:
        found = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise NotAvro(f"it is no JSON that could be read: {error}") from error
    return (yield from _Parser().parse(found))


class _Parser:
    """One schema, while it is read."""

    def __init__(self) -> None:
        self._named: dict[str, AvroType] = {}
        self._definitions: dict[str, tuple[str, dict[str, Any]]] = {}
        self._unread: list[AvroType] = []
        """Records whose fields are still to be read."""
        self._unions: list[AvroType] = []
        # What is still to be read: where it goes, what it is, and the namespace around it.
        self._open: list[tuple[list[AvroType], int, object, str]] = []

    def parse(self, found: object) -> Steps[AvroType]:
        root = [_SIMPLE["null"]]
        self._open.append((root, 0, found, ""))
        steps = 0
        while self._open:
            parts, index, data, space = self._open.pop()
            made = parts[index] = self._type(data, space)
            while self._unread:
                yield from self._read_fields(self._unread.pop())
            steps += 1 + len(made.parts)
            if steps >= SLICE_STEPS:
                steps = 0
                yield
        missing = next((name for name, named in self._named.items() if not named.kind), None)
        if missing is not None:
            raise NotAvro(f"there is no type {missing!r}")
        # Last: of a branch that is a name, only now is it known what it is.
        for union in self._unions:
            yield from _check_branches(union)
        return root[0]

    def _type(self, data: object, space: str) -> AvroType:
        # A name, a union, or an object whose `type` says more.
        if isinstance(data, str):
            return _SIMPLE.get(data) or self._reference(data, space)
        if isinstance(data, list):
            union = AvroType("union")
            self._unions.append(union)
            self._read_parts(union, data, space)
            return union
        if not isinstance(data, dict):
            raise NotAvro(f"a type is a name, a list or an object, not {_brief(data)}")
        kind = data.get("type")
        if not isinstance(kind, str):
            raise NotAvro(f"`type` is a name here, not {_brief(kind)}")
        if kind in _NAMED:
            return self._definition(_NAMED[kind], data, space)
        properties = _properties(data, _OF_TYPES)
        if kind in PRIMITIVES:
            return AvroType(kind, properties=properties) if properties else _SIMPLE[kind]
        if kind in ("array", "map"):
            holds = "items" if kind == "array" else "values"
            if holds not in data:
                raise NotAvro(f"this {kind} has no {holds}")
            container = AvroType(kind, properties=properties)
            self._read_parts(container, [data[holds]], space)
            return container
        return self._reference(kind, space)

    def _read_parts(self, owner: AvroType, parts: list[object], space: str) -> None:
        owner.parts = [_SIMPLE["null"]] * len(parts)
        # Backwards onto the stack: names are met in the order in which they stand in the text.
        for index in range(len(parts) - 1, -1, -1):
            self._open.append((owner.parts, index, parts[index], space))

    def _reference(self, name: str, space: str) -> AvroType:
        full = f"{space}.{name}" if space and "." not in name else name
        # As Avro does it: the namespace around it goes first, then the name as it is. What is not
        # there yet may come behind.
        found = self._named.get(full) or self._named.get(name)
        if found is None:
            found = self._named[full] = AvroType("", full)
        return found

    def _definition(self, kind: str, data: dict[str, Any], space: str) -> AvroType:
        name, space = _full_name(data, space)
        known = self._definitions.get(name)
        if known is not None:
            # Tools that know no names write a type out wherever it is used.
            if known != (space, data):
                raise NotAvro(f"{name!r} is defined twice, and differently")
            return self._named[name]
        self._definitions[name] = (space, data)
        made = self._named.setdefault(name, AvroType("", name))
        made.kind = kind
        made.aliases = [
            each if "." in each or not space else f"{space}.{each}" for each in _aliases(data)
        ]
        made.properties = _properties(data, _OF_ENUMS if kind == "enum" else _OF_TYPES)
        if kind == "record":
            self._unread.append(made)
        elif kind == "enum":
            made.symbols = _symbols(name, data)
        else:
            made.size = _size(name, data.get("size"))
        return made

    def _read_fields(self, record: AvroType) -> Steps[None]:
        space, data = self._definitions[record.name]
        fields = data.get("fields")
        if not isinstance(fields, list):
            raise NotAvro(f"record {record.name!r} has no list of fields")
        for index, each in enumerate(fields):
            if index % SLICE_STEPS == SLICE_STEPS - 1:
                yield
            if not isinstance(each, dict) or "type" not in each:
                raise NotAvro(f"a field of {record.name!r} is {_brief(each)}, without a type")
            name = _checked_name(each.get("name"), f"a field of {record.name!r}")
            if record.by_name.setdefault(name, index) != index:
                raise NotAvro(f"record {record.name!r} has two fields {name!r}")
            record.fields.append(_field(name, each))
        self._read_parts(record, [each["type"] for each in fields], space)


def _field(name: str, data: dict[str, Any]) -> AvroField:
    order = data.get("order", "ascending")
    if not isinstance(order, str) or order.lower() not in _ORDERS:
        raise NotAvro(f"field {name!r} has the order {_brief(order)}")
    properties = _properties(data, _OF_FIELDS)
    return AvroField(
        name, _aliases(data), order.lower(), properties, "default" in data, data.get("default")
    )


def _check_branches(union: AvroType) -> Steps[None]:
    seen = set()
    for index, each in enumerate(union.parts):
        if index % SLICE_STEPS == SLICE_STEPS - 1:
            yield
        if each.kind == "union":
            raise NotAvro("a union stands in a union")
        label = each.name or each.kind
        if label in seen:
            raise NotAvro(f"a union has {label!r} twice")
        seen.add(label)


def _full_name(data: dict[str, Any], space: str) -> tuple[str, str]:
    """The name of a type, and its namespace."""
    name, own = data.get("name"), data.get("namespace")
    if not isinstance(name, str):
        raise NotAvro(f"a {data['type']} has no name, but {_brief(name)}")
    if isinstance(own, str):
        space = own
    if "." in name:
        space, _, name = name.rpartition(".")
    if space:
        for part in space.split("."):
            _checked_name(part, f"the namespace of {name!r}")
    _checked_name(name, f"a {data['type']}")
    if not space and name in PRIMITIVES:
        raise NotAvro(f"a {data['type']} has the name of the type {name!r}")
    return (f"{space}.{name}" if space else name), space


def _checked_name(name: object, whose: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise NotAvro(f"{whose} has the name {_brief(name)}")
    return name


def _aliases(data: dict[str, Any]) -> list[str]:
    found = data.get("aliases", [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise NotAvro(f"aliases are a list of names, not {_brief(found)}")
    return found


def _symbols(name: str, data: dict[str, Any]) -> list[str]:
    symbols = data.get("symbols")
    if not isinstance(symbols, list):
        raise NotAvro(f"enum {name!r} has no list of symbols")
    # All at once: there may be a hundred thousand.
    try:
        lines = "\n".join([*symbols, ""])
    except TypeError as error:
        raise NotAvro(f"enum {name!r} has a symbol that is no name: {error}") from error
    if not _NAMES.fullmatch(lines) or lines.count("\n") != len(symbols):
        raise NotAvro(f"enum {name!r} has a symbol that is no name")
    if len(set(symbols)) != len(symbols):
        raise NotAvro(f"enum {name!r} has a symbol twice")
    default = data.get("default")
    if default is not None and default not in symbols:
        raise NotAvro(f"enum {name!r} has the default {_brief(default)}, no symbol of it")
    return symbols


def _size(name: str, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= _SIZE_MAX:
        raise NotAvro(f"fixed {name!r} has the size {_brief(size)}")
    return size


def _properties(data: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    # Seldom any: most members are known.
    return {key: value for key, value in data.items() if key not in known}


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def meaning(root: AvroType) -> Steps[bytes]:
    """The digest of what a schema says: equal for schemas that are equal (invariant 2)."""
    said = sha256()
    defined: set[int] = set()
    pending: list[AvroType | AvroField] = [root]
    steps = 0
    while pending:
        each = pending.pop()
        steps += 1
        if steps >= SLICE_STEPS:
            steps = 0
            yield
        if isinstance(each, AvroField):
            default = [each.default] if each.has_default else []
            said.update(_said(each.name, each.order, each.properties, default))
            continue
        # A named type is said once; behind that its name stands for it, so recursion ends.
        if each.name and id(each) in defined:
            said.update(_said(each.name))
            continue
        defined.add(id(each))
        about = (each.kind, each.name, each.symbols, each.size, each.properties, len(each.parts))
        said.update(_said(*about))
        for index in range(len(each.parts) - 1, -1, -1):
            pending.append(each.parts[index])
            if each.fields:
                pending.append(each.fields[index])
    return said.digest()


def _said(*values: object) -> bytes:
    # As a list in JSON: where one value ends and the next begins can't be mistaken.
    return msgspec.json.encode(values, order="sorted")
