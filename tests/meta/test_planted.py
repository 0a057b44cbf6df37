"""Violations planted into a copy of the tree must make the checks of `make check` fail.

The copy runs the very commands that the Makefile runs, and the failure must name what was planted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.meta.tree import GENERATED_FOLDERS, ROOT

pytestmark = pytest.mark.slow  # each copies the tree and runs a checker on it

BIN = Path(sys.executable).parent
IMPORT_CONTRACTS = (str(BIN / "lint-imports"), "--no-logo", "--no-cache")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
PURITY = (*PYTEST, "tests/meta/test_imports.py", "-k", "pure")
SIZES = (*PYTEST, "tests/meta/test_tidy.py", "-k", "modules_are_short")

LEAKING_TESTS = '''"""Planted."""
import os, threading
release = threading.Event()
def test_thread() -> None:
    threading.Thread(target=release.wait, name="planted", daemon=True).start()
def test_descriptor() -> None:
    os.open(os.devnull, os.O_RDONLY)
def test_tidy() -> None:
    worker = threading.Thread(target=release.wait)
    worker.start()
    release.set()
'''


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The tree without what tools generate (and without git, so all files count)."""
    target = tmp_path / "tree"
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*GENERATED_FOLDERS))
    return target


def test_make_check_runs_these_commands() -> None:
    printed = subprocess.run(
        ["make", "--dry-run", "check"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "lint-imports" in printed
    assert "tests/meta" in printed


def test_wire_may_not_import_broker(copy: Path) -> None:
    package = copy / "src" / "magnetar" / "broker"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "planted.py").write_text('"""Planted."""\n')
    _plant(copy / "src" / "magnetar" / "wire" / "planted.py", "import magnetar.broker.planted\n")
    assert "magnetar.wire.planted -> magnetar.broker.planted" in _failure(copy, IMPORT_CONTRACTS)


def test_model_may_not_import_asyncio(copy: Path) -> None:
    _plant(copy / "src" / "magnetar" / "model" / "planted.py", "import asyncio\n")
    assert "magnetar.model.planted -> asyncio" in _failure(copy, IMPORT_CONTRACTS)


def test_a_module_that_calls_itself_pure_may_not_import_asyncio(copy: Path) -> None:
    _plant(copy / "src" / "magnetar" / "managed_ledger" / "planted.py", "import asyncio\n")
    assert "planted.py:2 imports asyncio" in _failure(copy, PURITY)


def test_a_module_may_not_have_900_lines(copy: Path) -> None:
    _plant(copy / "src" / "magnetar" / "model" / "planted.py", "X = 1\n" * 899)
    assert "planted.py: 900 lines" in _failure(copy, SIZES)


def test_a_test_may_not_leave_a_thread_or_a_descriptor(copy: Path) -> None:
    planted = copy / "tests" / "meta" / "test_planted_leaks.py"
    planted.write_text(LEAKING_TESTS)
    output = _failure(copy, (*PYTEST, str(planted)))
    assert "left behind: thread planted" in output
    assert "left behind: descriptor" in output
    assert "3 passed, 2 errors" in output


def _plant(path: Path, text: str) -> None:
    path.write_text('"""Pure: planted."""\n' + text)


def _failure(tree: Path, command: Sequence[str]) -> str:
    done = _run(tree, command)
    assert done.returncode == 1, done.stdout + done.stderr
    # Both tools may break a line for a terminal's width.
    return " ".join(done.stdout.split())


def _run(tree: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # The copy's sources come before those that the environment's editable install names.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(tree / "src"), "COLUMNS": "500"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
