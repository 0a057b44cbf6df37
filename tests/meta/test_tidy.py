"""The limits on size, the rules on names, and what may not stand in any file of the tree.

Relies on `tree.py` for the files. Each test lists every offender, so that one run shows all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from harness.limits import PATIENCE_S
from tests.meta.tree import GENERATED_FOLDERS, files, modules, text_of, tracked_files

MODULE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100

# Names that say nothing about what a thing is.
BANNED = ("Manager", "Helper", "Util", "Impl")
BANNED_CLASS = re.compile(rf"(?:{'|'.join(BANNED)})s?$")
BANNED_MODULE = re.compile(rf"(?:^|_)(?:{'|'.join(BANNED).lower()})s?$")

# Limits of processes, answers and tests; `TEST_SECONDS` is that of the configuration.
TEST_SECONDS = 600
TEST_LIMIT = re.compile(r"mark\.timeout\((\d+)")
WAIT_LIMIT = re.compile(r"(?:subprocess\.run|communicate|urlopen)\([^()]*\btimeout=(\d+)")

# A letter in brackets here and there, so that a rule does not find itself.
UNNUMBERED_NOTE = re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X)\b(?! ?\(#\d+\))")
REGISTRIES = "pypi|pythonhosted|npmjs|yarnpkg|maven|rubygems|crates\\.io|proxy\\.golang"
REGISTRY_ADDRESS = re.compile(
    rf"https?://[^\s\"'<>]*(?:{REGISTRIES})"
    r"|(?:--|^)(?:extra-)?index-url[ =]\S|(?:--|^)find-links[ =]\S",
    re.MULTILINE,
)
# Absolute only: `docs/work/` is a folder of ours, with a name before its first slash.
MACHINE_PATH = re.compile(r"(?<![\w.~*)}\]])/(?:home|root|work|Users)/\w")
CODE_SUFFIXES = {".py", ".sh", ".toml"}


def test_modules_are_short() -> None:
    assert not [
        f"{module.path}: {lines} lines, at most {MODULE_LINES_MAX}"
        for module in modules()
        if (lines := len(module.text.splitlines())) > MODULE_LINES_MAX
    ]


def test_functions_are_short() -> None:
    assert not [
        f"{module.path}:{each.line} {each.name}: {each.lines} lines, at most {FUNCTION_LINES_MAX}"
        for module in modules()
        for each in module.functions
        if each.lines > FUNCTION_LINES_MAX
    ]


def test_limits_on_real_time_are_long() -> None:
    assert not [
        f"{module.path}: {found[0]!r} is below {least:g} s, which a busy machine may need"
        for module in modules()
        if module.path.parts[0] in ("tests", "harness")
        for limit, least in ((TEST_LIMIT, TEST_SECONDS), (WAIT_LIMIT, PATIENCE_S))
        for found in limit.finditer(module.text)
        if int(found[1]) < least
    ]


def test_lines_are_short() -> None:
    assert not [
        f"{module.path}:{number}: {len(line)} columns, at most {COLUMNS_MAX}"
        for module in modules()
        for number, line in enumerate(module.text.splitlines(), start=1)
        if len(line) > COLUMNS_MAX
    ]


def test_every_module_says_what_it_owns() -> None:
    # An empty __init__.py only makes a folder a package; there is nothing in it to describe.
    assert not [
        f"{module.path}: no docstring"
        for module in modules()
        if module.text.strip() and not module.docstring
    ]


def test_names_say_what_a_thing_is() -> None:
    classes = [
        f"{module.path}:{each.line} class {each.name}"
        for module in modules()
        for each in module.classes
        if BANNED_CLASS.search(each.name)
    ]
    paths = [
        str(module.path)
        for module in modules()
        if any(BANNED_MODULE.search(part) for part in module.name.split("."))
    ]
    assert not classes + paths


def test_open_ends_have_an_issue() -> None:
    """An open end is written with its issue's number in parentheses: (#12)."""
    code = [p for p in files() if p.suffix in CODE_SUFFIXES or p.name in ("Makefile", "run")]
    assert not _found(UNNUMBERED_NOTE, code)


def test_no_registry_address_stands_in_the_tree() -> None:
    assert not _found(REGISTRY_ADDRESS, files())
    assert not [path for path in files() if path.name == "uv.lock"], "it lists addresses"


def test_no_path_of_a_machine_stands_in_the_tree() -> None:
    assert not _found(MACHINE_PATH, files())


def test_nothing_generated_is_tracked() -> None:
    tracked = {path.parts[0] for path in tracked_files() if GENERATED_FOLDERS & {*path.parts}}
    assert not tracked, "run: git rm -r --cached, then commit"


def test_the_patterns_find_what_they_are_for() -> None:
    """A rule that cannot fail is none. The examples are put together, or they would be found."""
    note = "TO" + "DO"
    assert REGISTRY_ADDRESS.search("https:/" + "/pypi.org/simple")
    assert REGISTRY_ADDRESS.search("--extra-index-url" + " x")
    assert MACHINE_PATH.search("open('/home" + "/someone/file')")
    assert not MACHINE_PATH.search("docs/work/plan.md")
    assert UNNUMBERED_NOTE.search(f"# {note}: later")
    assert not UNNUMBERED_NOTE.search(f"# {note}(#12): later")
    assert BANNED_CLASS.search("TopicManager")
    assert not BANNED_CLASS.search("ManagedLedger")
    assert BANNED_MODULE.search("topic_utils")
    assert not BANNED_MODULE.search("utility_lines")


def _found(pattern: re.Pattern[str], paths: Iterable[Path]) -> list[str]:
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for path in paths
        if (text := text_of(path))
        for match in pattern.finditer(text)
    ]
