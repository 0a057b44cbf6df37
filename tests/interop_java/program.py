"""The Java program of this folder: built against the official client, run against one server.

Owns: `build` (Maven, into `build/interop_java`, once per content of the sources) and `Program`, a
running one that is given a scenario at a time.

Invariants:
1. What was built from other sources, or against files that are gone, is never run.
2. Processes that build at the same time wait for one another: one of them does the work.

Relies on `Main.java` for the list of scenarios, and for the lines that a scenario answers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_FOLDER = Path(__file__).parent
_SOURCES = _FOLDER / "src" / "main" / "java"
_BUILT = _FOLDER.parent.parent / "build" / "interop_java"
_CLASS_PATH = _BUILT / "classpath"
_STAMP = _BUILT / "built-from"
_LOCK = _BUILT / "lock"

_MAIN = "magnetar.interop.Main"
_TOOLS = ("java", "javac", "mvn")
_JAVA_OLDEST = 17
_BUILD_SECONDS = 500
_STOP_SECONDS = 20
# What of the program's own output stands in the report of a failure.
_LINES_MAX = 40
_COLUMNS_MAX = 400
# A short run: start fast, stay small, say only what may explain a failure.
_JVM_OPTIONS = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xmx256m",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)
# How Maven says that it could not get what the program needs.
_NOT_FETCHED = re.compile(
    r"Could not (?:transfer|find|resolve)|Failed to collect|PluginResolution|offline mode"
)


class BuildFailed(Exception):
    """Maven refused; `fetching` if the reason is that something could not be downloaded."""

    def __init__(self, written: str) -> None:
        super().__init__(written)
        self.fetching = bool(_NOT_FETCHED.search(written))


@dataclass(frozen=True, slots=True)
class Shown:
    """Bytes that a scenario wants looked at, and the text that the client has for them."""

    kind: str
    data: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    failure: str | None
    shown: tuple[Shown, ...]


def scenarios() -> list[str]:
    main = _SOURCES.joinpath(*_MAIN.split(".")).with_suffix(".java")
    return re.findall(r'Map\.entry\("([a-z-]+)"', main.read_text("utf-8"))


def lacking() -> str | None:
    """What this machine lacks to build and run the program, if anything."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    done = subprocess.run(["javac", "-version"], capture_output=True, text=True)
    found = re.search(r"javac (\d+)", done.stdout + done.stderr)
    if found is None or int(found[1]) < _JAVA_OLDEST:
        return f"Java {_JAVA_OLDEST} or newer is needed, {done.stdout.strip() or 'none'} found"
    return None


def build() -> None:
    """Compiles, unless that was done from the same sources; raises `BuildFailed`."""
    with _locked():
        content = _content()
        if _STAMP.exists() and _STAMP.read_text("utf-8") == content and _whole():
            return
        shutil.rmtree(_BUILT / "classes", ignore_errors=True)
        command = ["mvn", "-q", "-B", "compiler:compile", "dependency:build-classpath"]
        done = subprocess.run(
            command,
            cwd=_FOLDER,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_BUILD_SECONDS,
        )
        if done.returncode != 0:
            raise BuildFailed(done.stdout)
        _STAMP.write_text(content, "utf-8")


class Program:
    """A running program; it is given one scenario at a time."""

    def __init__(self, service_url: str, admin_url: str, log: Path) -> None:
        class_path = f"{_BUILT / 'classes'}{os.pathsep}{_CLASS_PATH.read_text('utf-8')}"
        self._log = log
        self._stderr = log.open("wb")
        self._process = subprocess.Popen(
            ["java", *_JVM_OPTIONS, "-cp", class_path, _MAIN, service_url, admin_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def run(self, scenario: str, *arguments: str) -> Outcome:
        commands, answers = self._pipes()
        commands.write(" ".join((scenario, *arguments)) + "\n")
        commands.flush()
        shown: list[Shown] = []
        for line in answers:
            head, _, rest = line.rstrip("\n").partition(" ")
            if head == "PASS":
                return Outcome(None, tuple(shown))
            if head == "FAIL":
                return Outcome(f"{rest}\n{self._written()}", tuple(shown))
            kind, data, text = rest.split(" ", 2)
            shown.append(Shown(kind, bytes.fromhex(data), text))
        raise AssertionError(f"the program ended:\n{self._written()}")

    def stop(self) -> None:
        commands, answers = self._pipes()
        commands.close()
        try:
            self._process.wait(_STOP_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            answers.close()
            self._stderr.close()

    def _written(self) -> str:
        """The end of what it and the client in it have written to stderr."""
        lines = self._log.read_text("utf-8").splitlines()
        return "\n".join(line[:_COLUMNS_MAX] for line in lines[-_LINES_MAX:])

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


@contextmanager
def _locked() -> Iterator[None]:
    _BUILT.mkdir(parents=True, exist_ok=True)
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _content() -> str:
    """What the sources are, in one line."""
    digest = hashlib.sha256()
    for path in (_FOLDER / "pom.xml", *sorted(_SOURCES.rglob("*.java"))):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_FOLDER)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _whole() -> bool:
    """Whether everything on the class path is still there: Maven's store is not ours."""
    if not _CLASS_PATH.exists():
        return False
    return all(Path(name).exists() for name in _CLASS_PATH.read_text("utf-8").split(os.pathsep))


def main() -> int:
    """Builds, for `make interop-java`: there, what a machine lacks is a failure."""
    reason = lacking()
    if reason is None:
        try:
            build()
        except BuildFailed as error:
            reason = str(error)
    if reason is not None:
        sys.stderr.write(f"magnetar: cannot build the Java program: {reason}\n")
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
