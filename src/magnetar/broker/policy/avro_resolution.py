"""Pure: whether what was written with one Avro schema can be read with another.

Owns: `problem`, which answers as Apache Avro 1.12's resolution for Java does, as brokers of Pulsar
ask it: what is wrong, or None.

Invariants:
1. All that a writer may write is looked at: every branch of its unions, every item, every field
   that the reader has too. What the reader has alone needs a default that fits its type.
2. As Avro for Java, and unlike its specification: records go by their fields and not their names;
   enums and fixed go by names without namespaces; a symbol that the reader lacks is no obstacle.
3. A pair of types is looked at once, so recursion ends; all comparisons of one `Effort` take
   `STEPS_MAX` steps at most, and beyond them schemas count as incompatible. Slices are those of
   `avro`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from magnetar.broker.policy.avro import SLICE_STEPS, AvroField, AvroType, Steps

STEPS_MAX: Final = 1_000_000
"""Types, fields and branches looked at for one schema: seconds of work at most, in slices."""
MATCH_DEPTH_MAX: Final = 50
"""Records in unions in records that are tried out, to find the branch of a union that fits."""

_PROMOTED: Final = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}

_Path: TypeAlias = "tuple[_Path, str] | None"
"""Where a type stands: what it is in, and its own name there."""


class _Pair(NamedTuple):
    """Two types that meet, and where."""

    writer: AvroType
    reader: AvroType
    path: _Path


class _TooMuch(Exception):
    """The comparison reached its limit."""


class Effort:
    """The work that goes into one schema, with all that it is compared with."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps = 0

    def step(self, steps: int = 1) -> bool:
        """Count; whether a slice ended."""
        before = self._steps // SLICE_STEPS
        self._steps += steps
        if self._steps > STEPS_MAX:
            raise _TooMuch
        return self._steps // SLICE_STEPS != before


def problem(writer: AvroType, reader: AvroType, effort: Effort) -> Steps[str | None]:
    """Why what `writer` wrote cannot be read with `reader`; None: it can be."""
    try:
        return (yield from _Resolution(effort).problem(writer, reader))
    except _TooMuch:
        return "the two schemas are too large to be compared"


class _Resolution:
    """One comparison."""

    def __init__(self, effort: Effort) -> None:
        self._step = effort.step
        # The reader's aliases, by which the writer's names are read.
        self._names: dict[str, str] = {}
        self._field_names: dict[str, dict[str, str]] = {}
        # The writer's fields by the names that the reader knows them by.
        self._fields: dict[int, dict[str, int]] = {}
        self._matches: dict[tuple[int, int], str | None] = {}

    def problem(self, writer: AvroType, reader: AvroType) -> Steps[str | None]:
        yield from self._take_aliases(reader)
        pending = [_Pair(writer, reader, None)]
        seen: set[tuple[int, int]] = set()
        while pending:
            pair = pending.pop()
            ids = (id(pair.writer), id(pair.reader))
            if ids in seen:
                continue
            seen.add(ids)
            if self._step():
                yield
            found = yield from self._mismatch(pair.writer, pair.reader, 0)
            if found is not None:
                return f"{_shown(pair.path)}{found}"
            yield from self._go_on(pair, pending)
        return None

    def _take_aliases(self, root: AvroType) -> Steps[None]:
        pending, seen = [root], {id(root)}
        while pending:
            each = pending.pop()
            if self._step(1 + len(each.parts)):
                yield
            for alias in each.aliases:
                self._names[alias] = each.name
            own = {alias: about.name for about in each.fields for alias in about.aliases}
            if own:
                for name in (each.name, *each.aliases):
                    self._field_names[name] = own
            for part in each.parts:
                if id(part) not in seen:
                    seen.add(id(part))
                    pending.append(part)

    # --- the writer, by the reader's names

    def _name(self, writer: AvroType) -> str:
        return self._names.get(writer.name, writer.name)

    def _short_name(self, writer: AvroType) -> str:
        return self._name(writer).rpartition(".")[2]

    def _fields_of(self, writer: AvroType) -> dict[str, int] | None:
        """Where its fields stand, by the reader's names; None: two of them would be one."""
        known = self._field_names.get(self._name(writer))
        if known is None:
            return writer.by_name
        fields = self._fields.get(id(writer))
        if fields is None:
            fields = {known.get(name, name): index for name, index in writer.by_name.items()}
            self._fields[id(writer)] = fields
        return fields if len(fields) == len(writer.by_name) else None

    # --- one pair

    def _mismatch(self, writer: AvroType, reader: AvroType, depth: int) -> Steps[str | None]:
        """What is wrong with the two types themselves, whatever they hold."""
        # A writer's union is as good as its branches, which come as pairs of their own.
        if writer.kind == "union":
            return None
        if writer.kind == reader.kind:
            if writer.kind in ("enum", "fixed"):
                return self._named_mismatch(writer, reader)
            if writer.kind == "record":
                return (yield from self._record_mismatch(writer, reader))
            return None
        if reader.kind == "union":
            if (yield from self._branch(writer, reader, depth)) is None:
                return f"{_label(writer)} fits no branch of the reader's {_label(reader)}"
            return None
        if reader.kind in _PROMOTED.get(writer.kind, ()):
            return None
        return f"{_label(writer)} cannot be read as {_label(reader)}"

    def _named_mismatch(self, writer: AvroType, reader: AvroType) -> str | None:
        if self._short_name(writer) != reader.short_name or writer.size != reader.size:
            return f"{_label(writer)} cannot be read as {_label(reader)}"
        return None

    def _record_mismatch(self, writer: AvroType, reader: AvroType) -> Steps[str | None]:
        # Fields of the reader that nobody wrote: each needs a default, and one that can be used.
        fields = self._fields_of(writer)
        if fields is None:
            return f"aliases of {_label(reader)} give two fields of {_label(writer)} one name"
        for index, about in enumerate(reader.fields):
            if self._step():
                yield
            if about.name in fields:
                continue
            part = reader.parts[index]
            if not about.has_default:
                return (
                    f"field {_quoted(about.name)} ({_label(part)}) of {_label(reader)} has no"
                    f" default, and {_label(writer)} lacks it"
                )
            if not (yield from self._fits(part, about)):
                return (
                    f"the default of field {_quoted(about.name)} of {_label(reader)} is no"
                    f" {_label(part)}"
                )
        return None

    def _go_on(self, pair: _Pair, pending: list[_Pair]) -> Steps[None]:
        """Which pairs follow from this one."""
        writer, reader, path = pair
        if writer.kind == "union":
            # Unions of one structure go branch by branch, and everything in them fits.
            if not (yield from self._is_same(writer, reader)):
                self._step(len(writer.parts))
                pending += [_Pair(each, reader, path) for each in writer.parts]
        elif writer.kind == reader.kind == "record":
            fields = self._fields_of(writer) or {}
            for index, about in enumerate(reader.fields):
                if self._step():
                    yield
                at = fields.get(about.name)
                if at is not None:
                    place = (path, about.name)
                    pending.append(_Pair(writer.parts[at], reader.parts[index], place))
        elif writer.kind == reader.kind:
            pending += [
                _Pair(one, other, (path, f"{writer.kind} of"))
                for one, other in zip(writer.parts, reader.parts, strict=True)
            ]
        elif reader.kind == "union":
            branch = yield from self._branch(writer, reader, 0)
            if branch is not None:
                pending.append(_Pair(writer, branch, path))

    # --- unions

    def _branch(self, writer: AvroType, reader: AvroType, depth: int) -> Steps[AvroType | None]:
        """The branch of the reader's union that reads what is no union; None: there is none."""
        # In Avro's order: the type itself (records, enums and fixed by their whole name), a record
        # with fitting fields, best one of the same name, and at last a promotion.
        fitting = None
        for each in reader.parts:
            if self._step():
                yield
            if each.kind != writer.kind:
                continue
            if not writer.name or self._name(writer) == each.name:
                return each
            # Only records are tried out; of several that fit, one of the same name goes first.
            is_better = fitting is None or self._short_name(writer) == each.short_name
            if writer.kind == "record" and is_better:
                fails = yield from self._fails_to_match(writer, each, depth)
                fitting = fitting if fails else each
        if fitting is not None:
            return fitting
        promoted = _PROMOTED.get(writer.kind, ())
        return next((each for each in reader.parts if each.kind in promoted), None)

    def _fails_to_match(self, writer: AvroType, reader: AvroType, depth: int) -> Steps[bool]:
        """Whether two records differ in a field itself; what is deeper in it does not count."""
        ids = (id(writer), id(reader))
        if ids in self._matches or depth >= MATCH_DEPTH_MAX:
            return self._matches.get(ids) is not None
        self._matches[ids] = None  # records that hold themselves
        found = yield from self._record_mismatch(writer, reader)
        fields = self._fields_of(writer) or {}
        for index, about in enumerate(reader.fields):
            at = fields.get(about.name)
            if found is not None:
                break
            if at is not None:
                part = writer.parts[at]
                found = yield from self._mismatch(part, reader.parts[index], depth + 1)
        self._matches[ids] = found
        return found is not None

    def _is_same(self, writer: AvroType, reader: AvroType) -> Steps[bool]:
        """Whether two types have one structure, with the same names but for namespaces."""
        pending, seen = [(writer, reader)], {(id(writer), id(reader))}
        while pending:
            one, other = pending.pop()
            if self._step(1 + len(one.parts)):
                yield
            if one.kind != other.kind or self._short_name(one) != other.short_name:
                return False
            if (one.size, one.symbols) != (other.size, other.symbols):
                return False
            if len(one.parts) != len(other.parts):
                return False
            fields = self._fields_of(one)
            if fields is None or list(fields) != list(other.by_name):
                return False
            for pair in zip(one.parts, other.parts, strict=True):
                ids = (id(pair[0]), id(pair[1]))
                if ids not in seen:
                    seen.add(ids)
                    pending.append(pair)
        return True

    # --- defaults

    def _fits(self, kind: AvroType, about: AvroField) -> Steps[bool]:
        """Whether a field's default is a value of its type."""
        pending: list[tuple[AvroType, object]] = [(kind, about.default)]
        # Defaults of fields that a default leaves out: looked at once, or records that hold each
        # other twice would take for ever.
        used: set[int] = set()
        while pending:
            each, value = pending.pop()
            if self._step():
                yield
            if each.kind == "union":
                fitting = next((part for part in each.parts if _is_value(part, value)), None)
                if fitting is None:
                    return False
                self._step(len(each.parts))
                pending.append((fitting, value))
                continue
            if not _is_value(each, value):
                return False
            if isinstance(value, list):
                self._step(len(value))
                pending += [(each.parts[0], item) for item in value]
            elif isinstance(value, dict) and each.kind == "map":
                self._step(len(value))
                pending += [(each.parts[0], item) for item in value.values()]
            elif isinstance(value, dict):
                self._step(len(each.parts))
                for inner, part in zip(each.fields, each.parts, strict=True):
                    if inner.name in value:
                        pending.append((part, value[inner.name]))
                    elif not inner.has_default:
                        return False
                    elif id(inner) not in used:
                        used.add(id(inner))
                        pending.append((part, inner.default))
        return True


_VALUES: Final[dict[str, tuple[type, ...]]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "int": (int, float),
    "long": (int, float),
    "float": (int, float),
    "double": (int, float),
    "bytes": (str,),
    "string": (str,),
    "fixed": (str,),
    "array": (list,),
    "map": (dict,),
    "record": (dict,),
}


def _is_value(kind: AvroType, value: object) -> bool:
    """Whether JSON is a value of a type, as far as can be seen from outside."""
    if kind.kind == "enum":
        return value in kind.symbols
    # In Python, true is a number.
    if isinstance(value, bool):
        return kind.kind == "boolean"
    return isinstance(value, _VALUES.get(kind.kind, ()))


# --- words

_SHOWN_MAX: Final = 80


def _shown(path: _Path) -> str:
    names: list[str] = []
    while path is not None and len(names) < 10:
        path, name = path
        names.append(name)
    return f"at {_quoted('.'.join(reversed(names)))}: " if names else ""


def _label(kind: AvroType) -> str:
    if kind.name:
        size = f" of {kind.size} bytes" if kind.kind == "fixed" else ""
        return f"{kind.kind} {_quoted(kind.name)}{size}"
    if kind.kind == "union":
        return f"union of {', '.join(each.name or each.kind for each in kind.parts[:5])}"
    return kind.kind


def _quoted(name: str) -> str:
    return repr(name if len(name) <= _SHOWN_MAX else f"{name[:_SHOWN_MAX]}...")
