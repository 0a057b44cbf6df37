"""Documents against code: what the reference must list, and the commands that the README shows."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterable

import pytest
from click.testing import CliRunner

import magnetar
from magnetar.cli.main import main
from tests.meta.tree import ROOT

REFERENCE = ROOT / "docs" / "reference"
SHELL_BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MAKE_TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
# `make`, then settings such as SEED=4 or -j2, then the target.
MAKE_CALL = re.compile(r"^(?:\$ )?make((?: +\S+)*)", re.MULTILINE)
MAGNETAR_CALL = re.compile(r"^(?:\$ )?\.venv/bin/magnetar((?: +[^#\s]+)*)", re.MULTILINE)
WORD = re.compile(r"[a-z][a-z-]*")


def test_every_error_is_documented() -> None:
    from magnetar.errors import error_classes

    _assert_documented("errors.md", error_classes())


def test_every_limit_is_documented() -> None:
    from magnetar.runtime.limits import all_limits

    _assert_documented("limits.md", (limit.name for limit in all_limits()))


def test_every_metric_is_documented() -> None:
    from magnetar.runtime.metrics import all_metrics

    # A metric exists once the module that defines it is loaded.
    for found in pkgutil.walk_packages(magnetar.__path__, "magnetar."):
        importlib.import_module(found.name)
    _assert_documented("metrics.md", (metric.name for metric in all_metrics()))


MOVES = {"inc", "dec", "set", "observe", "set_function", "time"}


@pytest.mark.slow
def test_every_metric_is_moved_by_the_product() -> None:
    defined: dict[str, str] = {}
    moved: set[str] = set()
    aliases: list[tuple[str, set[str]]] = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=kind))) if (
                    kind in ("counter", "gauge", "histogram")
                ):
                    defined[_name_of(target)] = path.name
                case ast.Assign(targets=[target], value=value):
                    aliases.append((_name_of(target), _names_in(value)))
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    aliases.append((_name_of(target), _names_in(value)))
                case ast.Attribute(value=value, attr=attr) if attr in MOVES:
                    moved |= _names_in(value)
    # What is moved under another name, such as `_CAS_OK = TXN_HEADER_CAS.labels("ok")`.
    for _ in range(2):
        for name, of in aliases:
            if name in moved:
                moved |= of
    assert len(defined) > 50
    assert not defined.keys() - moved, sorted(defined.keys() - moved)


def _name_of(target: ast.expr) -> str:
    return target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")


def _names_in(value: ast.expr) -> set[str]:
    return {_name_of(each) for each in ast.walk(value) if isinstance(each, ast.expr)} - {""}


def test_every_setting_is_documented() -> None:
    from magnetar.server.config import all_settings

    _assert_documented("settings.md", (setting.name for setting in all_settings()))


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(MAKE_TARGET.findall((ROOT / "Makefile").read_text("utf-8")))
    shown = {
        word
        for arguments in MAKE_CALL.findall(_shell_lines())
        for word in arguments.partition("#")[0].split()
        if WORD.fullmatch(word)
    }
    assert {"run", "test"} <= shown, "the README shows its two commands"
    assert shown <= targets


def test_verbs_in_the_readme_exist() -> None:
    calls = MAGNETAR_CALL.findall(_shell_lines())
    verbs = {words[0] for call in calls if (words := call.split()) and WORD.fullmatch(words[0])}
    for verb in sorted(verbs):
        done = CliRunner().invoke(main, [verb, "--help"])
        assert done.exit_code == 0, f"magnetar {verb}: {done.output}"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = [
        line
        for line in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
        if line and not line.startswith(("#", "set ", "cd "))
    ]
    assert len(commands) == 1
    assert re.search(rf"^(?:\$ )?{commands[0]}\s*(?:#.*)?$", _shell_lines(), re.MULTILINE)


def _shell_lines() -> str:
    return "\n".join(SHELL_BLOCK.findall((ROOT / "README.md").read_text("utf-8")))


def _assert_documented(page: str, names: Iterable[str]) -> None:
    expected = sorted(names)
    assert expected, "nothing to document: the list itself is broken"
    text = (REFERENCE / page).read_text("utf-8")
    assert not [name for name in expected if f"`{name}`" not in text]


# --- paths that pages name

FILE_NAMED = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.py)`")


def test_every_row_of_the_glossary_names_a_file_that_exists() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    rows = [row for row in rows if not row.startswith("| here |")]
    assert len(rows) > 40
    for row in rows:
        named = FILE_NAMED.findall(row)
        assert named, f"no file: {row}"
        for file in named:
            assert (ROOT / "src" / "magnetar" / file).exists(), row
    for word in ("maxReadPosition", "last stable offset"):
        assert word in text


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    named = set(FILE_NAMED.findall(text))
    assert len(named) > 60
    homes = (ROOT / "src" / "magnetar", ROOT)
    assert not [file for file in named if not any((home / file).exists() for home in homes)]


def test_the_architecture_has_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    folders = [each for each in (ROOT / "src" / "magnetar").iterdir() if each.is_dir()]
    packages = [each.name for each in folders if (each / "__init__.py").exists()]
    assert not [name for name in packages if f"\n| `{name}` |" not in text]


@pytest.mark.slow  # it reads every test
def test_the_page_of_tests_by_module_is_up_to_date() -> None:
    from scripts.make_test_map import PAGE, page

    text = page()
    assert "| none |" not in text, "a module that nothing tests"
    assert PAGE.read_text("utf-8") == text, "run: make test-map"
