"""The Java programs of this folder: built against official clients, run against one server.

Owns: `Client`, one official client and what is built against it (by Maven, into a folder of its
own, once per content of the sources), and `Program`, a running one that is given a scenario at a
time. Two clients have classes of the same names, so a program has one of them.

Invariants:
1. What was built from other sources, or against files that are gone, is never run.
2. Processes that build at the same time wait for one another: one of them does the work.

Relies on each `Main.java` for the list of scenarios, and on `Conversation.java` for the lines that
a scenario answers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, TypeAlias

from tests.interop.serving import ServerProcess

Favour: TypeAlias = Callable[[str], None]
"""Something done for a scenario; it is given what the scenario said behind the name."""

_FOLDER = Path(__file__).parent
_SOURCES = _FOLDER / "src" / "main" / "java"
_TOOLS = ("java", "javac", "mvn")
_JAVA_OLDEST = 17
_BUILD_SECONDS = 500
_STOP_SECONDS = 20
NO_FAVOURS: Final[Mapping[str, Favour]] = {}
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


@dataclass(frozen=True, slots=True)
class Client:
    """One official client: the Maven project against it, where its results go, what is run."""

    project: str
    results: str
    main: str

    @property
    def built(self) -> Path:
        return _FOLDER.parent.parent / "build" / self.results

    @property
    def class_path_file(self) -> Path:
        return self.built / "classpath"

    def class_path(self) -> str:
        jars = self.class_path_file.read_text("utf-8")
        return f"{self.built / 'classes'}{os.pathsep}{jars}"

    def scenarios(self) -> list[str]:
        main = _SOURCES.joinpath(*self.main.split(".")).with_suffix(".java")
        return re.findall(r'Map\.entry\("([a-z-]+)"', main.read_text("utf-8"))

    def build(self) -> None:
        """Compiles, unless that was done from the same sources; raises `BuildFailed`."""
        stamp = self.built / "built-from"
        with _locked(self.built):
            content = _content(_FOLDER / self.project)
            if stamp.exists() and stamp.read_text("utf-8") == content and self._is_whole():
                return
            shutil.rmtree(self.built / "classes", ignore_errors=True)
            goals = ("compiler:compile", "dependency:build-classpath")
            done = subprocess.run(
                ["mvn", "-q", "-B", "-f", self.project, *goals],
                cwd=_FOLDER,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_BUILD_SECONDS,
            )
            if done.returncode != 0:
                raise BuildFailed(done.stdout)
            stamp.write_text(content, "utf-8")

    def _is_whole(self) -> bool:
        """Whether everything on the class path is still there: Maven's store is not ours."""
        if not self.class_path_file.exists():
            return False
        return all(Path(name).exists() for name in self.class_path().split(os.pathsep))


SCALABLE: Final = Client("pom.xml", "interop_java", "magnetar.interop.Main")
V4: Final = Client("pom-v4.xml", "interop_java_v4", "magnetar.interop.v4.Main")


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


class Program:
    """A running program; it is given one scenario at a time."""

    def __init__(self, client: Client, service_url: str, admin_url: str, log: Path) -> None:
        java = ["java", *_JVM_OPTIONS, "-cp", client.class_path(), client.main]
        self._log = log
        self._stderr = log.open("wb")
        self._process = subprocess.Popen(
            [*java, service_url, admin_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    @classmethod
    @contextmanager
    def started(cls, client: Client, server: ServerProcess, folder: Path) -> Iterator[Program]:
        """One against that server; what it writes to stderr goes to a file in the folder."""
        program = cls(client, server.service_url, server.admin_url, folder / "program-stderr")
        try:
            yield program
        finally:
            program.stop()

    def run(
        self, scenario: str, *arguments: str, favours: Mapping[str, Favour] = NO_FAVOURS
    ) -> Outcome:
        """Runs a scenario, and meanwhile does the favours that it asks for by their names."""
        _, answers = self._pipes()
        self._tell(" ".join((scenario, *arguments)))
        shown: list[Shown] = []
        for line in answers:
            head, _, rest = line.rstrip("\n").partition(" ")
            if head == "PASS":
                return Outcome(None, tuple(shown))
            if head == "FAIL":
                return Outcome(f"{rest}\n{self._written()}", tuple(shown))
            if head == "ASK":
                name, _, argument = rest.partition(" ")
                favours[name](argument)
                self._tell("DONE")
                continue
            kind, data, text = rest.split(" ", 2)
            shown.append(Shown(kind, bytes.fromhex(data), text))
        raise AssertionError(f"the program ended:\n{self._written()}")

    def _tell(self, line: str) -> None:
        commands, _ = self._pipes()
        commands.write(line + "\n")
        commands.flush()

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
def _locked(built: Path) -> Iterator[None]:
    built.mkdir(parents=True, exist_ok=True)
    with (built / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _content(project: Path) -> str:
    """What the sources are, in one line."""
    digest = hashlib.sha256()
    for path in (project, *sorted(_SOURCES.rglob("*.java"))):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_FOLDER)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def main() -> int:
    """Builds all, for `make interop-java`: there, what a machine lacks is a failure."""
    reason = lacking()
    if reason is None:
        try:
            SCALABLE.build()
            V4.build()
        except BuildFailed as error:
            reason = str(error)
    if reason is not None:
        sys.stderr.write(f"magnetar: cannot build the Java programs: {reason}\n")
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
