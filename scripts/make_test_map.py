"""Writes docs/reference/tests-by-module.md: which tests belong to which module. `make test-map`.

A test file belongs to a module that it imports, itself or through the support files of its folder
(stages, worlds); a module that no test imports belongs to those of the modules that use it, which
the page names. `--check` only tells whether the page is up to date.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "reference" / "tests-by-module.md"
SHOWN_MAX: Final = 6
"""Test files that are named for one module: those nearest to it by name come first."""

BY_NAME: Final = {
    "magnetar.cli.": "tests/unit/cli",
    "magnetar.cli.quickstart.": "tests/integration/spark/test_quickstart.py",
    "magnetar.server.admin.": "tests/unit/server/admin",
    "magnetar.spark.pipeline.": "tests/integration/spark/test_pipeline_run.py",
    "pyspark_": "tests/integration/spark",
}
"""What is loaded by its name, or in another process: no import leads there."""

HEAD: Final = """# Which tests belong to which module

Written by `make test-map`; a test compares. A test belongs to a module that it imports, itself or
through the support files of its folder; *through* names the modules whose tests reach one that no
test imports. At most {most} are named, the nearest by name first; the whole flows are in
`tests/integration`, `tests/interop`, `tests/simulation` and `tests/recovery`.

| module | tests |
|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = page()
    if parser.parse_args().check:
        if PAGE.exists() and PAGE.read_text("utf-8") == text:
            return 0
        sys.stderr.write(f"{PAGE.name} is not up to date; run `make test-map`\n")
        return 1
    PAGE.write_text(text, "utf-8")
    return 0


def page() -> str:
    """The page, from the imports of the tree."""
    product = _modules(ROOT / "src")
    tests = _modules(ROOT / "tests", prefix="tests")
    imports = {name: _imports(path, product) for name, path in product.items()}
    reached = _reached(tests, product)
    rows = []
    for name, path in sorted(product.items()):
        if path.name in ("__init__.py", "__main__.py") or "_pb2" in path.name:
            continue
        found, through = set(reached.get(name, ())), ""
        if not found:
            users = _users(name, imports, reached)
            found = {test for user in users for test in reached[user]}
            through = ", ".join(f"`{_short(user)}`" for user in users[:3])
        if not found:
            found = {tests for start, tests in BY_NAME.items() if name.startswith(start)}
        shown = _nearest(name, found)
        cells = "<br>".join(f"`{each}`" for each in shown) or "none"
        rows.append(f"| `{_short(name)}` | {cells}{f' (through {through})' if through else ''} |")
    return HEAD.format(most=SHOWN_MAX) + "\n".join(rows) + "\n"


def _users(
    module: str, imports: Mapping[str, set[str]], reached: Mapping[str, set[str]]
) -> list[str]:
    """The nearest modules that use this one, perhaps through others, and that tests import."""
    level, seen = {module}, {module}
    while level:
        level = {user for user, used in imports.items() if used & level} - seen
        seen |= level
        found = sorted(user for user in level if reached.get(user))
        if found:
            return found
    return []


def _modules(folder: Path, prefix: str = "") -> dict[str, Path]:
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [*filter(None, [prefix]), *path.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Modules of `known` that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known.keys()


def _reached(tests: Mapping[str, Path], product: Mapping[str, Path]) -> dict[str, set[str]]:
    """The test files of each module: direct imports, and those of support files."""
    own = {name: _imports(path, product) for name, path in tests.items()}
    support = {name: _imports(path, tests) for name, path in tests.items()}
    reached: dict[str, set[str]] = defaultdict(set)
    for name, path in tests.items():
        if not path.name.startswith("test_"):
            continue
        near = [each for each in support[name] if not tests[each].name.startswith("test_")]
        for module in {*own[name], *(each for helper in near for each in own[helper])}:
            reached[module].add(str(path.relative_to(ROOT)))
    return reached


def _nearest(module: str, tests: Iterable[str]) -> list[str]:
    """First the test of the module's name, then those of its folder, then unit tests."""
    name = module.rpartition(".")[2]
    folder = "/".join(module.split(".")[1:-1])

    def distance(test: str) -> tuple[bool, bool, bool, str]:
        is_namesake = Path(test).stem.removeprefix("test_") == name
        is_beside = str(Path(test).parent) == f"tests/unit/{folder}"
        return not (is_namesake and is_beside), not is_beside, "tests/unit" not in test, test

    return sorted(tests, key=distance)[:SHOWN_MAX]


def _short(module: str) -> str:
    return module.removeprefix("magnetar.").replace(".", "/") + ".py"


if __name__ == "__main__":
    sys.exit(main())
