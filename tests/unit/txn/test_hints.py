"""Whoever is refused something about a transaction is told what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import magnetar
from magnetar import errors
from magnetar.errors import MagnetarError, RequestError

_ROOT = Path(magnetar.__file__).parent
_MODULES = sorted(
    path
    for folder, pattern in (("txn", "**/*.py"), ("broker", "*txn*.py"), ("broker", "legacy*.py"))
    for path in (_ROOT / folder).glob(pattern)
    if "spec" not in path.parts
)


def _told_nothing(tree: ast.AST) -> Iterator[str]:
    """Errors of requests that are made without a hint, and whose kind has none."""
    kinds = {
        name.name: getattr(errors, name.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == errors.__name__
        for name in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        kind = kinds.get(node.func.id, MagnetarError)
        has_hint = kind.hint or any(each.arg == "hint" for each in node.keywords)
        if issubclass(kind, RequestError) and not has_hint:
            yield f"line {node.lineno}: {kind.__name__}"


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: path.stem)
def test_every_refusal_has_a_hint(path: Path) -> None:
    assert list(_told_nothing(ast.parse(path.read_text("utf-8")))) == []
