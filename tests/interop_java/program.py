"""The Java programs of this folder: built against official clients, run against one server.

Owns: `Client`, one official client and what is built against it, and `Program`, a running one that
is given a scenario at a time. Two clients have classes of the same names, so a program has one of
them.

Relies on each `Main.java` for the list of scenarios, and on `Conversation.java` for the lines that
a scenario answers.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, TypeAlias

from harness.limits import PATIENCE_S
from tests.interop.serving import ServerProcess
from tests.interop_java.maven import BuildFailed, MavenProject, lacking

Favour: TypeAlias = Callable[[str], None]
"""Something done for a scenario; it is given what the scenario said behind the name."""

_FOLDER = Path(__file__).parent
_SOURCES = _FOLDER / "src" / "main" / "java"
_STOP_SECONDS = PATIENCE_S
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
    """One official client: the Maven project against it, and what is run."""

    project: MavenProject
    main: str

    def scenarios(self) -> list[str]:
        main = _SOURCES.joinpath(*self.main.split(".")).with_suffix(".java")
        return re.findall(r'Map\.entry\("([a-z-]+)"', main.read_text("utf-8"))


SCALABLE: Final = Client(
    MavenProject(_FOLDER / "pom.xml", "interop_java", _SOURCES), "magnetar.interop.Main"
)
V4: Final = Client(
    MavenProject(_FOLDER / "pom-v4.xml", "interop_java_v4", _SOURCES), "magnetar.interop.v4.Main"
)


class Program:
    """A running program; it is given one scenario at a time."""

    def __init__(self, client: Client, service_url: str, admin_url: str, log: Path) -> None:
        java = ["java", *_JVM_OPTIONS, "-cp", client.project.class_path(), client.main]
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


def main() -> int:
    """Builds all, for `make interop-java`: there, what a machine lacks is a failure."""
    reason = lacking("javac")
    if reason is None:
        try:
            SCALABLE.project.build()
            V4.project.build()
        except BuildFailed as error:
            reason = str(error)
    if reason is not None:
        sys.stderr.write(f"magnetar: cannot build the Java programs: {reason}\n")
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
