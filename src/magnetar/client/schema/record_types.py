"""Pure: classes of records, and the Avro definition that says what they hold.

Owns: `definition_of`, from a dataclass, a msgspec Struct, a pydantic model or a TypedDict;
`RecordType`, how values of such a class become plain values and back. JSON topics are described
in Avro's terms too, so both schemas use this.

Invariants:
1. The definition of a class is always the same text, field for field in the order of the class, and
   with the names that fields have in payloads: those that msgspec or pydantic give them.
2. A field with a default has one in the definition wherever Avro can express it, so that the class
   can grow such a field and still read what was written before.
3. A type that Avro has no word for raises `InvalidSetting` and names the field.

Relies on: msgspec for all classes but pydantic's, which bring their own conversions.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    Protocol,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)
from typing import get_type_hints as hints_of
from uuid import UUID

import msgspec

from magnetar.errors import InvalidSetting, InvalidValue, UnreadableMessage

T = TypeVar("T")

Definition = dict[str, Any] | list[Any] | str
"""An Avro schema as JSON has it."""

# What Avro allows as a symbol of an enum.
_SYMBOL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN: Final[dict[object, Definition]] = {
    bool: "boolean",
    int: "long",
    float: "double",
    str: "string",
    bytes: "bytes",
    type(None): "null",
    # As JSON writes them.
    datetime: "string",
    date: "string",
    time: "string",
    UUID: "string",
    Decimal: "string",
}
_NO_DEFAULT: Final = object()
# A class that refers to itself is named the second time; this bounds types inside of types.
_DEPTH_MAX: Final = 32


class _ModelField(Protocol):
    alias: str | None
    serialization_alias: str | None

    def is_required(self) -> bool: ...

    def get_default(self) -> Any: ...


class _Model(Protocol):
    """The part of pydantic that this module uses, and does not import."""

    model_fields: ClassVar[Mapping[str, _ModelField]]

    @classmethod
    def model_validate(cls, value: object) -> Any: ...

    @classmethod
    def model_validate_json(cls, data: bytes) -> Any: ...

    def model_dump(self, *, mode: str, by_alias: bool) -> Any: ...

    def model_dump_json(self, *, by_alias: bool) -> str: ...


class RecordType(Generic[T]):
    """The conversions of one class of records."""

    def __init__(self, of: type[T]) -> None:
        self.of = of
        self.definition = definition_of(of)
        # Two ways through all methods: pydantic's own conversions, or msgspec's.
        self._model = of if _is_model(of) else None
        try:
            self._decoder = None if self._model else msgspec.json.Decoder(of)
        except TypeError as error:
            raise InvalidSetting(f"{of.__name__} cannot be a schema: {error}") from error

    def check(self, value: T) -> None:
        """Raise `InvalidValue` unless it is of the class (a TypedDict's are dicts)."""
        # A TypedDict cannot be asked for with `isinstance`; its fields are checked when it is read.
        wanted: type = dict if _is_typed_dict(self.of) else self.of
        if not isinstance(value, wanted):
            raise InvalidValue(
                f"the schema takes a {self.of.__name__}, not a {type(value).__name__}"
            )

    def to_json(self, value: T) -> bytes:
        self.check(value)
        try:
            if self._model is not None:
                return cast("_Model", value).model_dump_json(by_alias=True).encode()
            return msgspec.json.encode(value)
        except (TypeError, ValueError) as error:
            raise InvalidValue(f"{self.of.__name__} cannot be written: {error}") from error

    def from_json(self, data: bytes) -> T:
        try:
            if self._decoder is not None:
                return self._decoder.decode(data)
            assert self._model is not None, "either msgspec or pydantic reads it"
            return cast("T", self._model.model_validate_json(data))
        except ValueError as error:
            raise UnreadableMessage(f"a payload is no {self.of.__name__}: {error}") from error

    def to_plain(self, value: T) -> Any:
        """Dicts, lists, text, numbers and bytes."""
        self.check(value)
        try:
            if self._model is not None:
                # Bytes stay bytes in Python's mode; what JSON writes as text becomes text here.
                dumped = cast("_Model", value).model_dump(mode="python", by_alias=True)
                return msgspec.to_builtins(dumped, builtin_types=(bytes,))
            return msgspec.to_builtins(value, builtin_types=(bytes,))
        except (TypeError, ValueError) as error:
            raise InvalidValue(f"{self.of.__name__} cannot be written: {error}") from error

    def from_plain(self, plain: object) -> T:
        try:
            if self._model is not None:
                return cast("T", self._model.model_validate(plain))
            return msgspec.convert(plain, self.of, builtin_types=(bytes,))
        except ValueError as error:
            raise UnreadableMessage(f"a payload is no {self.of.__name__}: {error}") from error


def definition_of(record: object) -> dict[str, Any]:
    """The Avro record of a class."""
    if not isinstance(record, type) or not _is_record(record):
        raise InvalidSetting(
            f"{record!r} cannot be a schema",
            hint="use a dataclass, a msgspec Struct, a pydantic model or a TypedDict",
        )
    return _record(record, set(), 0)


def _record(record: type, known: set[str], depth: int) -> dict[str, Any]:
    # Before its fields: one of them may be of this very class.
    known.add(record.__name__)
    fields = []
    # In the order of the class, with the names of payloads (invariant 1).
    for name, annotation in _hints(record).items():
        where = f"{record.__name__}.{name}"
        written = _written_name(record, name)
        made: dict[str, Any] = {"name": written, "type": _type(annotation, where, known, depth)}
        default = _plain_default(_default(record, name), made["type"])
        if default is not _NO_DEFAULT:
            made["default"] = default
            if isinstance(made["type"], list) and default is not None:
                # The default of a union is of its first type.
                made["type"] = sorted(made["type"], key=lambda each: each == "null")
        fields.append(made)
    return {"type": "record", "name": record.__name__, "fields": fields}


def _type(annotation: Any, where: str, known: set[str], depth: int) -> Definition:
    if depth > _DEPTH_MAX:
        raise InvalidSetting(f"{where}: its type is nested deeper than {_DEPTH_MAX}")
    # From the outside in: a union, something `Annotated`, lists, maps, plain types, enums, and last
    # records: one that was defined above is named, a new one is defined here.
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _union(arguments, where, known, depth)
    if hasattr(annotation, "__metadata__"):
        return _type(arguments[0], where, known, depth)
    if origin in (list, set, frozenset, Sequence) or (
        origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis
    ):
        return {"type": "array", "items": _type(arguments[0], where, known, depth + 1)}
    if origin in (dict, Mapping) and arguments[0] is str:
        return {"type": "map", "values": _type(arguments[1], where, known, depth + 1)}
    plain = _PLAIN.get(annotation)
    if plain is not None:
        return plain
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _enum(annotation, where, known)
    if isinstance(annotation, type) and annotation.__name__ in known:
        return annotation.__name__
    if isinstance(annotation, type) and _is_record(annotation):
        return _record(annotation, known, depth + 1)
    # Such as a tuple of several types, or a map whose keys are no text.
    raise InvalidSetting(f"{where}: Avro has no type for {annotation!r}")


def _union(arguments: tuple[Any, ...], where: str, known: set[str], depth: int) -> Definition:
    members = [_type(each, where, known, depth + 1) for each in arguments]
    flat: list[Any] = []
    for member in members:
        flat += member if isinstance(member, list) else [member]
    # Avro allows a type once in a union; definitions are dicts, which a set does not take.
    unique = [each for number, each in enumerate(flat) if each not in flat[:number]]
    # Null first, as the default of most unions is null.
    return sorted(unique, key=lambda each: each != "null")


def _enum(enum: type[Enum], where: str, known: set[str]) -> Definition:
    values = [member.value for member in enum]
    # Numbers as numbers; text as Avro's enum if its values may be symbols, else as text.
    if values and all(isinstance(value, int) for value in values):
        return "long"
    if not values or not all(isinstance(value, str) for value in values):
        raise InvalidSetting(f"{where}: the values of {enum.__name__} are neither text nor numbers")
    if not all(_SYMBOL.fullmatch(value) for value in values):
        return "string"
    if enum.__name__ in known:
        return enum.__name__
    known.add(enum.__name__)
    return {"type": "enum", "name": enum.__name__, "symbols": values}


def _hints(record: type) -> dict[str, Any]:
    try:
        hints = hints_of(record, include_extras=True)
    except NameError as error:
        raise InvalidSetting(
            f"{record.__name__}: an annotation cannot be found: {error}"
        ) from error
    # Hints have class variables too; fields are what the class itself says.
    names: Sequence[str] | None = None
    if dataclasses.is_dataclass(record):
        names = [each.name for each in dataclasses.fields(record)]
    elif _is_struct(record):
        names = [each.name for each in msgspec.structs.fields(record)]
    elif _is_model(record):
        names = list(record.model_fields)
    return hints if names is None else {name: hints[name] for name in names}


def _written_name(record: type, name: str) -> str:
    """The name that a field has in a payload."""
    if _is_struct(record):
        fields = msgspec.structs.fields(record)
        return next(each.encode_name for each in fields if each.name == name)
    if _is_model(record):
        model_field = record.model_fields[name]
        return model_field.serialization_alias or model_field.alias or name
    return name


def _default(record: type, name: str) -> object:
    """The default of a field; `_NO_DEFAULT` if it has none, or one that is made each time."""
    # Empty collections have factories, since Python shares defaults; they are the ones that Avro
    # can write down. Any other factory may give something else each time.
    if dataclasses.is_dataclass(record):
        field = next(each for each in dataclasses.fields(record) if each.name == name)
        if field.default is not dataclasses.MISSING:
            return field.default
        made = field.default_factory
        return made() if made in (list, dict, set) else _NO_DEFAULT
    if _is_struct(record):
        found = next(each for each in msgspec.structs.fields(record) if each.name == name)
        if found.default is not msgspec.NODEFAULT:
            return found.default
        made = found.default_factory
        return made() if made in (list, dict, set) else _NO_DEFAULT
    if _is_model(record):
        model_field = record.model_fields[name]
        return _NO_DEFAULT if model_field.is_required() else model_field.get_default()
    return _NO_DEFAULT


def _plain_default(default: object, definition: Definition) -> object:
    """The default as JSON writes it; `_NO_DEFAULT` where Avro has no way to say it."""
    if default is _NO_DEFAULT:
        return default
    # Sorted, so that the definition is always the same text (invariant 1).
    if isinstance(default, set | frozenset):
        default = sorted(default)
    # Avro writes bytes in JSON as the code points 0 to 255.
    if isinstance(default, bytes):
        return default.decode("latin-1")
    try:
        plain = msgspec.to_builtins(default)
    except (TypeError, ValueError):
        return _NO_DEFAULT
    # NULL as the default of a field that may not be NULL is a Python habit, and no default in Avro.
    accepts = definition if isinstance(definition, list) else [definition]
    kinds = {each["type"] if isinstance(each, dict) else each for each in accepts}
    return plain if plain is not None or "null" in kinds else _NO_DEFAULT


def _is_record(annotation: type) -> bool:
    return (
        dataclasses.is_dataclass(annotation)
        or _is_struct(annotation)
        or _is_model(annotation)
        or _is_typed_dict(annotation)
    )


def _is_struct(record: type) -> TypeGuard[type[msgspec.Struct]]:
    return issubclass(record, msgspec.Struct)


def _is_model(record: type) -> TypeGuard[type[_Model]]:
    return hasattr(record, "model_validate_json") and hasattr(record, "model_fields")


def _is_typed_dict(record: type) -> bool:
    return issubclass(record, dict) and hasattr(record, "__total__")
