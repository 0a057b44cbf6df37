"""The archives that executors of a cluster need.

Owns: the archive with this package that every executor gets, and the settings for an archive with
a whole Python environment.

Invariants:
1. The archive holds the code of the running version, and the modules by which Spark finds the
   format, so that an executor never runs another version than the driver.
2. What the package relies on is compiled and not in it: executors have it installed, or get it in
   an environment (`--environment`).
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

import magnetar
from magnetar.errors import ConfigError

ENVIRONMENT: Final = "environment"
"""The folder that an archived environment is unpacked to, beside each executor."""

# What no executor runs.
_LEFT_OUT: Final = frozenset({"__pycache__", "cli", "testing"})


def pack(folder: Path) -> Path:
    """Write the archive for `addPyFile`."""
    root = Path(magnetar.__file__).parent
    archive = folder / "magnetar.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(root.rglob("*.py")):
            inner = path.relative_to(root)
            if not _LEFT_OUT.intersection(inner.parts):
                file.write(path, Path("magnetar") / inner)
        # Spark finds data sources by modules of that name (invariant 1).
        for path in sorted(root.parent.glob("pyspark_*.py")):
            file.write(path, path.name)
    return archive


def environment_settings(archive: str) -> dict[str, str]:
    """The settings with which executors run the interpreter of an archived environment."""
    if "://" not in archive and not Path(archive).is_file():
        raise ConfigError(
            f"--environment: there is no file {archive}",
            hint="pack one: python -m venv env; env/bin/pip install 'magnetar[spark]' venv-pack; "
            "env/bin/venv-pack -p env -o env.tar.gz",
        )
    # Relative to the folder in which Spark starts each executor, and unpacks the archive.
    python = f"./{ENVIRONMENT}/bin/python"
    return {
        "spark.archives": f"{archive}#{ENVIRONMENT}",
        "spark.pyspark.python": python,
        "spark.executorEnv.PYSPARK_PYTHON": python,
    }
