"""The repository as the meta tests see it: its files and its parsed modules.

Everything is relative to the tree that this file stands in, so that a copy of the tree checks
itself (`test_planted.py` relies on that).
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
CODE_FOLDERS = ("src", "tests", "bench", "examples")
GENERATED_FOLDERS = frozenset(
    {
        ".git",
        ".hypothesis",
        ".import_linter_cache",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".venv",
        "__pycache__",
        "build",
        "dist",
    }
)
# Made by scripts/protoc.sh; nobody reads it.
GENERATED_CODE = "_pb2"


class Definition(NamedTuple):
    """A class or function: where it begins, and how many lines it has."""

    name: str
    line: int
    lines: int


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file: `path` is relative to the root, `name` its dotted name.

    What is asked of it is taken down and its syntax dropped: all trees at once are a million
    objects, which every collection of garbage after them would walk.
    """

    path: Path
    text: str
    docstring: str
    classes: tuple[Definition, ...]
    functions: tuple[Definition, ...]
    imports: tuple[ast.Import | ast.ImportFrom, ...]
    """Those inside functions and type checks, too."""

    @property
    def name(self) -> str:
        parts = self.path.with_suffix("").parts
        parts = parts[1:] if parts[0] == "src" else parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> tuple[Module, ...]:
    """Every Python module of the code folders, in the order of their paths."""
    return tuple(
        _parsed(path.relative_to(ROOT))
        for folder in CODE_FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "__pycache__" not in path.parts and not path.stem.endswith(GENERATED_CODE)
    )


def _parsed(path: Path) -> Module:
    text = (ROOT / path).read_text("utf-8")
    syntax = ast.parse(text, str(path))
    nodes = list(_statements(syntax))
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return Module(
        path,
        text,
        ast.get_docstring(syntax) or "",
        tuple(_definition(node) for node in nodes if isinstance(node, ast.ClassDef)),
        tuple(_definition(node) for node in nodes if isinstance(node, functions)),
        tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)),
    )


def _statements(parent: ast.AST) -> Iterator[ast.AST]:
    """All below it, without their expressions: those are most of a tree, and nobody asks."""
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        below = getattr(parent, name, ())
        for node in below if isinstance(below, list) else ():
            yield node
            yield from _statements(node)


def _definition(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Definition:
    assert node.end_lineno is not None
    return Definition(node.name, node.lineno, node.end_lineno - node.lineno + 1)


@cache
def files() -> tuple[Path, ...]:
    """Every file that is tracked or would be, relative to the root, but what tools generate."""
    found = _git_files("--cached", "--others", "--exclude-standard")
    if found is None:
        found = list(_walked())
    return tuple(
        path
        for path in sorted(found)
        if not GENERATED_FOLDERS.intersection(path.parts) and (ROOT / path).is_file()
    )


def _walked() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in GENERATED_FOLDERS]
        yield from ((Path(folder) / name).relative_to(ROOT) for name in names)


def tracked_files() -> list[Path]:
    """What git tracks; nothing outside a repository."""
    return _git_files("--cached") or []


def _git_files(*options: str) -> list[Path] | None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "ls-files", "-z", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in done.stdout.split("\0") if name]


def text_of(path: Path) -> str:
    """The text of a file; a binary one has none."""
    try:
        return (ROOT / path).read_text("utf-8")
    except UnicodeDecodeError:
        return ""
