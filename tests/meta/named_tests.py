"""Pages that name tests, `path::name`: their rows, and what there is of the tests they name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache

from tests.meta.tree import ROOT

ROW = re.compile(r"^\| (?P<name>[^|]+) \|.*\|$", re.MULTILINE)
TEST_ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def missing(text: str) -> list[str]:
    """Tests that a page names and nobody wrote."""
    named = TEST_ID.findall(text)
    return [f"{path}::{name}" for path, name in named if name not in functions_in(path)]


def is_soak(path: str, name: str) -> bool:
    """Whether `make test` leaves a test out."""
    return _is_marked(_module(path).body) or _is_marked(functions_in(path)[name].decorator_list)


@cache
def functions_in(path: str) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in _module(path).body if isinstance(each, ast.FunctionDef)}


@cache
def _module(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"))


def _is_marked(nodes: Iterable[ast.AST]) -> bool:
    """By a decorator, or by the `pytestmark` of a module."""
    marks = [each for each in nodes if isinstance(each, ast.expr) or _assigns_marks(each)]
    return any("pytest.mark.soak" in ast.unparse(each) for each in marks)


def _assigns_marks(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
