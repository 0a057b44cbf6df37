"""Programs that stand between Spark and what it starts: small scripts in the user's cache.

Owns: `written`, which puts one there or finds it.

Invariants:
1. A script is written at once or not at all, so that two processes may.
2. One that somebody else could have written is never run.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def written(program: str, script: str) -> Path | None:
    """The program with this text, `bin/<program>` in a folder of its own; None: nowhere."""
    # Named by what it holds: another text gets a folder of its own, and a running Spark keeps the
    # one that it was started with.
    name = f"{program}-{hashlib.sha256(script.encode()).hexdigest()[:12]}"
    for folder in _caches():
        path = folder / name / "bin" / program
        try:
            if not _is_ours(path, script):
                _write(path, script)
        except OSError:
            continue  # not writable: the next one
        # Homes may be mounted so that nothing in them is run.
        if os.access(path, os.X_OK):
            return path
    return None


def _caches() -> Iterator[Path]:
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen or os.environ.get("HOME"):
        yield (Path(chosen) if chosen else Path.home() / ".cache") / "magnetar"
    # Shared with other users: the user's number keeps them apart, and `_is_ours` looks.
    yield Path(tempfile.gettempdir()) / f"magnetar-{os.getuid()}"


def _is_ours(path: Path, script: str) -> bool:
    """Whether the script is there, ours, and says what we would write."""
    folder = path.parent.parent.parent
    try:
        about = path.stat()
        # A folder in /tmp that somebody else made could run anything in our name.
        if about.st_uid != os.getuid() or folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        return bool(about.st_mode & stat.S_IXUSR) and path.read_text("utf-8") == script
    except FileNotFoundError:
        return False


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Written beside it and renamed: another process never starts half a script (invariant 1).
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    made = Path(name)
    made.write_text(text, "utf-8")
    made.chmod(0o700)
    made.replace(path)
