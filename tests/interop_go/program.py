"""The Go program of this folder: built against the official client, run against one server.

Owns: `build`, done once for all who test, and the list of scenarios, which stands in `main.go`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.interop.program import locked
from tests.interop.serving import ServerProcess

_FOLDER: Final = Path(__file__).parent
_BUILT: Final = _FOLDER.parent.parent / "build" / "interop_go"
_PROGRAM: Final = _BUILT / "program"
_GO_OLDEST: Final = (1, 24)
# The first time, the client and all that it needs are fetched and compiled.
_BUILD_SECONDS: Final = 1800
# How Go says that it could not get what the program needs.
_NOT_FETCHED: Final = re.compile(
    r"dial tcp|no such host|proxyconnect|i/o timeout|TLS handshake|module lookup disabled|"
    r"cannot query module|unexpected status code"
)


class BuildFailed(Exception):
    """Go refused; `fetching` if the reason is that something could not be downloaded."""

    def __init__(self, written: str) -> None:
        super().__init__(written)
        self.fetching = bool(_NOT_FETCHED.search(written))


def scenarios() -> list[str]:
    return re.findall(r'^\t"([a-z-]+)":', (_FOLDER / "main.go").read_text("utf-8"), re.MULTILINE)


def command(server: ServerProcess) -> list[str]:
    """What runs the program against a server."""
    return [str(_PROGRAM), server.service_url, server.admin_url]


def build() -> None:
    """Raises `BuildFailed`. Go knows by itself what is built already."""
    with locked(_BUILT):
        done = subprocess.run(
            ["go", "build", "-mod=readonly", "-o", _PROGRAM, "."],
            cwd=_FOLDER,
            # No C compiler is needed, and no other version of Go is fetched.
            env=os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_BUILD_SECONDS,
        )
    if done.returncode != 0:
        raise BuildFailed(done.stdout)


def lacking() -> str | None:
    """What this machine lacks of Go, if anything."""
    if shutil.which("go") is None:
        return "not installed: go"
    done = subprocess.run(
        ["go", "env", "GOVERSION"],
        capture_output=True,
        text=True,
        env=os.environ | {"GOTOOLCHAIN": "local"},
    )
    found = re.search(r"go(\d+)\.(\d+)", done.stdout)
    if found is None or (int(found[1]), int(found[2])) < _GO_OLDEST:
        needed = ".".join(map(str, _GO_OLDEST))
        return f"Go {needed} or newer is needed, {found[0] if found else 'none'} found"
    return None


def main() -> int:
    """Builds it, for `make interop-go`: there, what a machine lacks is a failure."""
    reason = lacking()
    if reason is None:
        try:
            build()
        except BuildFailed as error:
            reason = str(error)
    if reason is not None:
        sys.stderr.write(f"magnetar: cannot build the Go program: {reason}\n")
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
