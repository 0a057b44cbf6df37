"""Rooms and names: a newcomer finds a file by its folder and a thing by its name, with reasons.

The rules are simple on purpose: each can be checked by eye, and lists every offender.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from tests.meta.tree import ROOT, modules

MODULES_MAX = 15
LENGTH_P90_MAX = 420
LONG_FUNCTION = 25
COMMENT_SHARE_MIN = 0.04
ROOM_WITHOUT_SIGN = 5
"""A folder of more modules says what lives there, and in which order to read it."""

# A first sentence has a subject and names the thing. These begin one that leans on another.
ELLIPTIC = re.compile(
    r"(The same|Same|As|Of|It|Its|They|Them|Their|He|She|This|That|These|Those|And|But|Also|Or|Who|"
    r"Whoever|Whose|Nobody|Somebody|Everything|Something|So|Then|For|With|Without|By|To|From|In|On|"
    r"At|One of)\b"
)
# A module or a class is a thing; a function may answer a question ("Whether ...", "How many ...").
QUESTION = re.compile(r"(What|Which|Where|How|When|Whether|Why)\b")

# Two sides of one thing, or the thing and its model: the same name on purpose.
SAME_ON_PURPOSE = {
    "AccessMode": "the enum of the protocol, at the broker and at the client",
    "Chance": "a source of random numbers, as a pure module asks for it",
    "Connect": "opening a transport, for the client and for the driver of tests",
    "Consumer": "at the broker, and at the client",
    "DefaultSource": "Spark asks for this name in every module that has a data source",
    "Producer": "at the broker, and at the client",
    "RangePage": "as the broker reads it, and as the client gets it",
}
MODEL = "magnetar.txn.spec"
"""The model of transactions names what it is a model of."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _product() -> dict[Path, ast.Module]:
    """The modules of the package, parsed once for all rules."""
    return {each.path: ast.parse(each.text) for each in modules() if each.path.parts[0] == "src"}


def test_a_folder_has_few_modules() -> None:
    found = Counter(
        module.path.parent
        for module in modules()
        if module.path.parts[:2] == ("src", "magnetar") or module.path.parts[0] == "harness"
        if module.path.name != "__init__.py"
    )
    assert not [f"{folder}: {count}" for folder, count in found.items() if count > MODULES_MAX]


def test_most_modules_are_short() -> None:
    lengths = sorted(
        len(module.text.splitlines()) for module in modules() if module.path.parts[0] == "src"
    )
    assert lengths[int(len(lengths) * 0.9)] <= LENGTH_P90_MAX


def test_a_class_name_means_one_thing() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path, syntax in _product().items():
        if "blocking" in path.parts or ".".join(path.parts[1:]).startswith(MODEL):
            continue
        for node in ast.walk(syntax):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not twice.keys() - SAME_ON_PURPOSE.keys(), twice
    assert not SAME_ON_PURPOSE.keys() - twice.keys(), "it means one thing by now"


def test_first_sentences_have_a_subject() -> None:
    elliptic = []
    for path, syntax in _product().items():
        for node in ast.walk(syntax):
            if not isinstance(node, Documented):
                continue
            text = ast.get_docstring(node) or ""
            is_thing = isinstance(node, ast.Module | ast.ClassDef)
            if ELLIPTIC.match(text) or (is_thing and QUESTION.match(text)):
                line = getattr(node, "lineno", 1)
                elliptic.append(f"{path}:{line}: {text.partition(chr(10))[0]}")
    assert not elliptic, "\n".join(elliptic)


def test_long_functions_have_signposts() -> None:
    bare = []
    for path, syntax in _product().items():
        if "blocking" in path.parts:
            continue  # most of it is written from the asyncio classes
        lines = (ROOT / path).read_text("utf-8").splitlines()
        for node in ast.walk(syntax):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                body = lines[node.lineno - 1 : node.end_lineno]
                before = lines[max(node.lineno - 2, 0)].lstrip()
                code = _without_docstring(node)
                if code >= LONG_FUNCTION and not any("# " in each for each in [before, *body]):
                    bare.append(f"{path}:{node.lineno} {node.name}: {len(body)} lines")
    assert not bare, "\n".join(bare)


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines of a function are code, or comments on it."""
    assert node.end_lineno is not None
    first = node.body[0]
    text = ast.get_docstring(node)
    docstring = 0
    if text is not None and isinstance(first, ast.Expr):
        assert first.end_lineno is not None
        docstring = first.end_lineno - first.lineno + 1
    return node.end_lineno - node.lineno + 1 - docstring


def test_reasons_stand_beside_the_code() -> None:
    lines = [line for path in _product() for line in (ROOT / path).read_text("utf-8").splitlines()]
    comments = sum(line.lstrip().startswith("#") for line in lines)
    assert comments / len(lines) >= COMMENT_SHARE_MIN, f"{comments} of {len(lines)}"


def test_a_large_room_has_a_sign() -> None:
    found = Counter(
        module.path.parent
        for module in modules()
        if module.path.parts[0] in ("src", "harness") and module.path.name != "__init__.py"
    )
    unsigned = []
    for folder, count in found.items():
        has_page = (ROOT / folder / "README.md").exists()
        package = ROOT / folder / "__init__.py"
        has_docstring = package.exists() and bool(
            ast.get_docstring(ast.parse(package.read_text("utf-8")))
        )
        if count > ROOM_WITHOUT_SIGN and not has_page and not has_docstring:
            unsigned.append(f"{folder}: {count} modules, no README.md and no docstring")
    assert not unsigned, "\n".join(sorted(unsigned))


def test_a_sign_names_every_module_of_its_room() -> None:
    wrong = []
    for page in [*(ROOT / "src").rglob("README.md"), *(ROOT / "harness").rglob("README.md")]:
        present = {path.stem for path in page.parent.glob("*.py") if path.stem != "__init__"}
        named = re.findall(r"\[`(\w+)`\]\((\w+)\.py\)", page.read_text("utf-8"))
        listed = {name for name, file in named if name == file}
        if present and listed != present:
            wrong.append(f"{page.relative_to(ROOT)}: {sorted(listed ^ present)}")
    assert not wrong, "\n".join(wrong)
