"""Purity, module by module, and the gaps that the import contracts in pyproject.toml leave.

A module is pure if it stands in `model` or `wire`, or if the first line of its docstring has the
word "pure". Pure code decides; it does no I/O and knows no clock, no chance and no thread. It may
rely on pure modules and on the contracts (`api.py`) of others, never on what implements them.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Container, Iterator

from tests.meta.tree import ROOT, Module, modules

FORBIDDEN = frozenset({"asyncio", "os", "random", "socket", "sqlite3", "threading", "time"})
PURE = re.compile(r"\bpure\b", re.IGNORECASE)
PURE_PACKAGES = ("magnetar.model", "magnetar.wire")


def test_pure_modules_stay_pure() -> None:
    known = {module.name: module for module in modules()}
    pure = {name for name, module in known.items() if _is_pure(module)}
    assert "magnetar.model.ids" in pure
    assert not [
        f"{known[name].path}:{line} imports {imported}"
        for name in sorted(pure)
        for line, imported in _imports(known[name], known.keys())
        if not _is_allowed(imported, pure)
    ], "what a pure module imports is pure too: does its docstring say so?"


def test_contracts_name_every_package_that_exists() -> None:
    """`magnetar.x.**` matches the modules of x, not x itself: fine only while there is no x."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    names = {module.name for module in modules()}
    missing = []
    for contract in config["tool"]["importlinter"]["contracts"]:
        for field in ("source_modules", "forbidden_modules"):
            listed = contract.get(field, [])
            plain = {name.removesuffix(".**") for name in listed if name.endswith(".**")}
            missing += [f"{contract['id']}: {name}" for name in plain & names - set(listed)]
    assert not missing, "add the plain name to pyproject.toml"


def _is_pure(module: Module) -> bool:
    first_line = module.docstring.partition("\n")[0]
    return module.name.startswith(PURE_PACKAGES) or bool(PURE.search(first_line))


def _is_allowed(imported: str, pure: set[str]) -> bool:
    top = imported.split(".")[0]
    if top != "magnetar":
        return top not in FORBIDDEN
    return imported in pure or imported == "magnetar.errors" or imported.endswith(".api")


def _imports(module: Module, known: Container[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each module imported."""
    for node in module.imports:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        else:
            base = _absolute(module, node)
            inner = {f"{base}.{alias.name}" for alias in node.names}
            for name in sorted({name if name in known else base for name in inner}):
                yield node.lineno, name


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = module.path.name == "__init__.py"
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])
