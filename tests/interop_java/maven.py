"""What Maven makes of a project: classes and a class path, in a folder of the build.

Owns: `MavenProject`: built once per content of its files, `BuildFailed`, and `lacking`.

Invariants:
1. What was built from other files, or against jars that are gone, counts as not built.
2. Processes that build at the same time wait for one another: one of them does the work.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.interop.program import locked

_JAVA_OLDEST = 17
_BUILD_SECONDS = 500
_BUILD: Final = Path(__file__).parent.parent.parent / "build"
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
class MavenProject:
    """A project file that writes its class path to `build/<results>/classpath`."""

    file: Path
    results: str
    sources: Path | None = None
    """Java that is compiled; without it, only the class path is made."""

    @property
    def built(self) -> Path:
        return _BUILD / self.results

    @property
    def class_path_file(self) -> Path:
        return self.built / "classpath"

    def class_path(self) -> str:
        jars = self.class_path_file.read_text("utf-8")
        return jars if self.sources is None else f"{self.built / 'classes'}{os.pathsep}{jars}"

    def build(self) -> None:
        """Does so, unless that was done from the same files; raises `BuildFailed`."""
        stamp = self.built / "built-from"
        with locked(self.built):
            content = self._content()
            if stamp.exists() and stamp.read_text("utf-8") == content and self._is_whole():
                return
            shutil.rmtree(self.built / "classes", ignore_errors=True)
            compiling = () if self.sources is None else ("compiler:compile",)
            done = subprocess.run(
                ["mvn", "-q", "-B", "-f", self.file, *compiling, "dependency:build-classpath"],
                cwd=self.file.parent,
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

    def _content(self) -> str:
        """What the files are, in one line."""
        digest = hashlib.sha256()
        sources = () if self.sources is None else sorted(self.sources.rglob("*.java"))
        for path in (self.file, *sources):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(self.file.parent)} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()


def lacking(*tools: str) -> str | None:
    """What this machine lacks of Java, Maven and these tools, if anything."""
    missing = [tool for tool in ("java", "mvn", *tools) if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    done = subprocess.run(["java", "-version"], capture_output=True, text=True)
    found = re.search(r'version "(\d+)', done.stdout + done.stderr)
    if found is None or int(found[1]) < _JAVA_OLDEST:
        return f"Java {_JAVA_OLDEST} or newer is needed, {found[1] if found else 'none'} found"
    return None
