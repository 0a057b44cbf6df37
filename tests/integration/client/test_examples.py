"""The examples of the client run, and its pages show nothing that does not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import magnetar
from harness.limits import PATIENCE_S
from tests.integration.client.service import service
from tests.meta.tree import ROOT

EXAMPLES = sorted((ROOT / "examples" / "client").glob("*.py"))
PAGES = sorted((ROOT / "docs" / "client").glob("*.md"))
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
LINES_MAX = 60


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with service(tmp_path / "data") as found:
        yield found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_often_as_one_likes(example: Path, url: str, tmp_path: Path) -> None:
    assert len(example.read_text("utf-8").splitlines()) <= LINES_MAX
    # Twice, as whoever tries it does.
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", str(example), url],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_block_of_a_page_is_in_an_example(page: Path) -> None:
    shown = PYTHON_BLOCK.findall(page.read_text("utf-8"))
    assert shown, "a page shows how it is done"
    missing = [block for block in shown if not any(_has(path, block) for path in EXAMPLES)]
    assert not missing, "not in an example, word for word:\n" + "\n".join(missing)


def _has(example: Path, block: str) -> bool:
    """Whether these lines stand there one after the other, however far they are indented."""
    wanted = block.rstrip().splitlines()
    lines = example.read_text("utf-8").splitlines()
    return any(
        dedent("\n".join(lines[start : start + len(wanted)])).splitlines() == wanted
        for start in range(len(lines) - len(wanted) + 1)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text("utf-8"))
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_every_page_and_example_is_found_from_the_first_page() -> None:
    index = (ROOT / "docs" / "client" / "README.md").read_text("utf-8")
    names = [page.name for page in PAGES if page.name != "README.md"]
    assert not [name for name in names if f"({name})" not in index]
    assert not [path.name for path in EXAMPLES if f"examples/client/{path.name}" not in index]


@pytest.mark.slow
def test_the_reference_can_be_made(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make_docs.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", script, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "magnetar.html").read_text("utf-8")
    assert not [name for name in magnetar.__all__ if f'id="{name}"' not in page]


def test_plain_names_are_loaded_when_they_are_asked_for() -> None:
    syntax = ast.parse(Path(magnetar.__file__).read_text("utf-8"))
    typed = {
        alias.name
        for node in ast.walk(syntax)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("magnetar.")
        for alias in node.names
    }
    assert typed == set(magnetar._HOME_OF), "what types see is what there is"
    for name in typed:
        assert getattr(magnetar, name) is not None
    with pytest.raises(AttributeError):
        _ = magnetar.NoSuchName  # type: ignore[attr-defined]
    program = "import sys, magnetar; print([each for each in sys.modules if '.client' in each])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
