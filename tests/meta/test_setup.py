"""The set-up script on machines that lack something: one line that says what to do, exit 1.

And what is packed for others.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.meta.tree import ROOT

# Stands for an interpreter: answers the script's questions as the machine in the test would.
OLD_PYTHON = """#!/bin/sh
case "$2" in
*print*) echo 3.9 ;;
*) exit 1 ;;
esac
"""
WITHOUT_VENV = """#!/bin/sh
case "$2" in
*print*) echo 3.12 ;;
*ensurepip*) exit 1 ;;
esac
"""
USABLE = """#!/bin/sh
case "$2" in
*print*) echo 3.13 ;;
venv) exit 1 ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A tree with the script alone, and a `bin` that is the whole search path."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for tool in ("cat", "dirname"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def test_a_machine_without_python(machine: Path) -> None:
    assert "no Python found: install Python 3.11 or newer" in _refusal(machine)


def test_an_older_python(machine: Path) -> None:
    _install(machine, "python3", OLD_PYTHON)
    line = _refusal(machine)
    assert "python3 is Python 3.9, too old: install Python 3.11 or newer" in line
    assert "make PYTHON=" in line


def test_a_python_without_venv(machine: Path) -> None:
    # The better one is reported, though the older one stands first.
    _install(machine, "python3", OLD_PYTHON)
    _install(machine, "python3.12", WITHOUT_VENV)
    assert "lacks the venv module: install it" in _refusal(machine)


def test_the_python_that_was_asked_for_comes_first(machine: Path) -> None:
    _install(machine, "mine", WITHOUT_VENV)
    _install(machine, "python3", WITHOUT_VENV)
    assert "mine (Python 3.12) lacks" in _refusal(machine, PYTHON="mine")


def test_a_usable_python_is_found_behind_an_old_one(machine: Path) -> None:
    _install(machine, "python3", OLD_PYTHON)
    _install(machine, "python3.13", USABLE)
    done = _run(machine)
    making, downloads = done.stdout.splitlines()
    assert making == "magnetar: making .venv with python3.13 (Python 3.13)"
    assert "downloads about" in downloads, "said before it is done"
    assert done.returncode == 1
    assert "could not make .venv with python3.13" in done.stderr


def _install(machine: Path, name: str, script: str) -> None:
    path = machine / "bin" / name
    path.write_text(script)
    path.chmod(0o755)


def _refusal(machine: Path, **environment: str) -> str:
    done = _run(machine, **environment)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def _run(machine: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    shell = shutil.which("sh")
    assert shell is not None
    return subprocess.run(
        [shell, str(machine / "scripts" / "setup.sh")],
        env={"PATH": str(machine / "bin")} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_that_tests_it(tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("hatchling")),
        "build",
        "-t",
        "wheel",
        "-d",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "magnetar/server/app.py" in names
    assert "magnetar/cli/quickstart/quickstart.yaml" in names
    assert "magnetar/testing/kits/metadata.py" in names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "magnetar",
        "pyspark_magnetar.py",
        "pyspark_pulsar.py",
    }
    assert not [name for name in names if name.endswith(".md")], "signs are for the source tree"
