"""The main job, small: it ends by itself, its output is exact, and its page is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("pipeline")]


def test_the_main_job(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = (sys.executable, "-c", "from magnetar.cli.main import main; main()", "quickstart")
    small = ("--seconds", "10", "--rate", "100", "--page", str(page), "--json")
    done = subprocess.run(
        [*command, *small, "--data", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["expected"] == found["found"] > 900
    assert (found["missing"], found["doubled"], found["unexpected"]) == (0, 0, 0)
    assert found["batches"] > 1
    text = page.read_text("utf-8")
    assert "kill -9 in batch" in text
    assert "merge settled" in text
    assert text.count("<svg") == 3
