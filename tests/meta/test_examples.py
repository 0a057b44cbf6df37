"""The examples run, and the README shows them as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.limits import PATIENCE_S
from tests.meta.tree import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINES_MAX = 60


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    assert len(example.read_text("utf-8").splitlines()) <= LINES_MAX
    done = subprocess.run(
        [sys.executable, str(example), str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_page_shows_the_storage_example() -> None:
    """Word for word, but for the folder, which the example takes from the command line."""
    page = ROOT / "docs" / "reference" / "storage.md"
    (shown,) = PYTHON_BLOCK.findall(page.read_text("utf-8"))
    example = (ROOT / "examples" / "storage.py").read_text("utf-8")
    example = example.partition('"""\n\n')[2].replace("import sys\n", "")
    example = example.replace('sys.argv[1] if len(sys.argv) > 1 else "data"', '"data"')
    assert shown == example


def test_the_readme_shows_the_first_programs() -> None:
    """Word for word, but for the address; `tests/integration/client` runs them."""
    shown = PYTHON_BLOCK.findall((ROOT / "README.md").read_text("utf-8"))
    examples = []
    for name in ("hello", "hello_transaction"):
        text = (ROOT / "examples" / "client" / f"{name}.py").read_text("utf-8")
        text = text.partition('"""\n\n')[2].replace("import sys\n\n", "")
        examples.append(text.replace("sys.argv[1] if len(sys.argv) > 1 else ", ""))
    assert shown == examples
