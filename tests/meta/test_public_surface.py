"""The public classes show what applications may use, and nothing of the inside.

What is listed here is a promise: a name that is added, or that leaks, must be added here as well,
and each name has documentation.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from enum import Enum
from typing import Any, Final

import pytest

import magnetar
import magnetar.blocking
from tests.meta.public_surface import BLOCKING, SURFACE

_BUILTIN_TYPES: Final = tuple(each for each in vars(builtins).values() if isinstance(each, type))


def public_classes() -> dict[str, type[Any]]:
    """The classes that `magnetar` offers, and those of the values that it offers."""
    found = {name: getattr(magnetar, name) for name in magnetar.__all__}
    named = {name: each for name, each in found.items() if isinstance(each, type)}
    others = {type(each) for each in found.values()} - set(named.values()) - {type}
    return named | {each.__name__: each for each in others if each.__module__[:9] == "magnetar."}


def surface_of(kind: type[Any]) -> set[str]:
    """The names of a class without an underscore, its objects' attributes included."""
    names = set(dir(kind))
    for each in kind.__mro__:
        if each.__module__.startswith("magnetar."):
            names |= vars(each).keys() | _attributes(each).keys()
    return {each for each in names if not each.startswith("_")} - _from_python(kind)


def _from_python(kind: type[Any]) -> set[str]:
    """What an `IntEnum` has because it is an `int`: that is Python's to explain."""
    bases = [each for each in kind.__mro__ if each in _BUILTIN_TYPES or each.__module__ == "enum"]
    inherited = {name for each in bases for name in dir(each)}
    return inherited - set(vars(kind))


def _attributes(kind: type[Any]) -> dict[str, str | None]:
    """The fields of a class, and what its `__init__` sets; with the text below each."""
    source = ast.parse(inspect.getsource(kind).lstrip())
    (found,) = (node for node in source.body if isinstance(node, ast.ClassDef))
    bodies = [found.body]
    bodies += [
        node.body
        for node in found.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    attributes: dict[str, str | None] = {}
    for body in bodies:
        for node, following in zip(body, [*body[1:], None], strict=True):
            for target in _targets(node):
                prefix, _, name = target.rpartition(".")
                if prefix == ("" if body is found.body else "self"):
                    attributes[name] = _text(following)
    return attributes


def _targets(node: ast.stmt) -> list[str]:
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [ast.unparse(each) for each in targets]


def _text(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return None


def is_explained(kind: type[Any], name: str) -> bool:
    """By a docstring, by a text below the attribute, or by the docstring of its class."""
    member = inspect.getattr_static(kind, name, None)
    member = getattr(member, "__func__", member)
    if kind is not magnetar.Schema and _is_schema(kind) and name in SURFACE["Schema"]:
        return is_explained(magnetar.Schema, name)
    if inspect.isfunction(member) or isinstance(member, property):
        return bool(inspect.getdoc(member))
    for each in kind.__mro__:
        if not each.__module__.startswith("magnetar."):
            continue
        if _attributes(each).get(name) or re.search(rf"\b{name}\b", each.__doc__ or ""):
            return True
    return False


def _is_schema(kind: type[Any]) -> bool:
    """Whether it is one of the schemas, which the protocol explains for all of them."""
    return kind.__module__.startswith("magnetar.client.schema.")


@pytest.mark.parametrize("name", sorted(public_classes()))
def test_a_class_shows_what_is_listed(name: str) -> None:
    kind = public_classes()[name]
    assert sorted(surface_of(kind)) == sorted(SURFACE[name])
    assert [each for each in SURFACE[name] if not is_explained(kind, each)] == []


@pytest.mark.parametrize("name", magnetar.blocking.__all__)
def test_a_blocking_class_shows_what_is_listed(name: str) -> None:
    kind = getattr(magnetar.blocking, name)
    listed = {*SURFACE.get(name, ()), *BLOCKING.get(name, ())}
    assert surface_of(kind) == listed
    assert [each for each in listed if not is_explained(kind, each)] == []


def test_nothing_is_listed_that_does_not_exist() -> None:
    assert SURFACE.keys() == public_classes().keys()
    assert BLOCKING.keys() <= set(magnetar.blocking.__all__)


def test_a_name_that_leaks_is_found() -> None:
    class Leaking(magnetar.Producer[bytes]):
        def hurry(self) -> None:
            self.leaked = 1

    assert surface_of(Leaking) - surface_of(magnetar.Producer) == {"hurry"}
    assert not is_explained(Leaking, "hurry")


def test_the_names_of_enumerations_are_their_members_and_what_they_add() -> None:
    kinds = [each for each in public_classes().values() if issubclass(each, Enum)]
    assert kinds
    for kind in kinds:
        assert set(kind.__members__) <= surface_of(kind)
        assert "bit_length" not in surface_of(kind)
