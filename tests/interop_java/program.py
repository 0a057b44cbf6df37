"""The Java programs of this folder: built against official clients, run against one server.

Owns: `Client`, one official client and what is built against it. Two clients have classes of the
same names, so a program has one of them.

Relies on each `Main.java` for the list of scenarios, and on `Conversation.java` for the lines that
a scenario answers (`tests/interop/program.py`).
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.interop.serving import ServerProcess
from tests.interop_java.maven import BuildFailed, MavenProject, lacking

_FOLDER = Path(__file__).parent
_SOURCES = _FOLDER / "src" / "main" / "java"
# A short run: start fast, stay small, say only what may explain a failure.
_JVM_OPTIONS = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xmx256m",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)


@dataclass(frozen=True, slots=True)
class Client:
    """One official client: the Maven project against it, and what is run."""

    project: MavenProject
    main: str

    def command(self, server: ServerProcess) -> list[str]:
        """What runs it against a server."""
        java = ["java", *_JVM_OPTIONS, "-cp", self.project.class_path(), self.main]
        return [*java, server.service_url, server.admin_url]

    def scenarios(self) -> list[str]:
        main = _SOURCES.joinpath(*self.main.split(".")).with_suffix(".java")
        return re.findall(r'Map\.entry\("([a-z-]+)"', main.read_text("utf-8"))


SCALABLE: Final = Client(
    MavenProject(_FOLDER / "pom.xml", "interop_java", _SOURCES), "magnetar.interop.Main"
)
V4: Final = Client(
    MavenProject(_FOLDER / "pom-v4.xml", "interop_java_v4", _SOURCES), "magnetar.interop.v4.Main"
)


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
