"""Writes the API reference of the client as HTML into build/docs: `make docs`.

The pages are made by pdoc from the docstrings. Examples there stand without a mark of their own;
they are shown as code because they are code: whatever paragraph behind the first can be compiled.
"""

from __future__ import annotations

import ast
import inspect
import sys
from importlib import import_module
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, Final

import pdoc
import pdoc.render

import magnetar

ROOT: Final = Path(__file__).resolve().parent.parent
TARGET: Final = ROOT / "build" / "docs"
MODULES: Final = ("magnetar", "magnetar.blocking", "magnetar.errors")


def main(target: Path = TARGET) -> int:
    for name in magnetar.__all__:
        getattr(magnetar, name)  # they are loaded when they are asked for, and pdoc does not ask
    for module in map(import_module, MODULES):
        for value in _public(module):
            value.__doc__ = _marked(inspect.cleandoc(value.__doc__ or ""))
    pdoc.render.configure(docformat="markdown", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=target)
    sys.stdout.write(f"{target / 'index.html'}\n")
    return 0


def _public(module: ModuleType) -> list[type[Any]]:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]
    found = [getattr(module, name) for name in names]
    ours = [each for each in found if isinstance(each, type) and each.__module__[:9] == "magnetar."]
    return list(dict.fromkeys(ours))


def _marked(text: str) -> str:
    """With four spaces before each paragraph that is code."""
    first, *others = text.split("\n\n")
    return "\n\n".join(
        [first, *(indent(each, "    ") if _is_code(each) else each for each in others)]
    )


def _is_code(paragraph: str) -> bool:
    if paragraph.startswith("    "):
        return False  # it has them
    try:
        ast.parse(paragraph)
    except SyntaxError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
