"""The main job, small: it ends by itself, its output is exact, and its page is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

SEGMENTS = {"orders": [1, 2, 4, 1], "payments": [1, 2], "settled": [1, 2, 4, 1]}


def test_the_main_job(tmp_path: Path) -> None:
    found, text = _run(tmp_path, seconds=10, rate=100, kills=1, limit=580)
    assert found["expected"] == found["found"] > 900
    assert len(found["killed_batches"]) == 1
    assert "kill -9 in batch" in text
    assert found["segments"] == SEGMENTS
    assert "settled: 4 to 1 segments" in text
    assert text.count("<svg") == 12, "three topics and three plots, wide and narrow"


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [1, 2])
def test_five_kills_while_topics_go_from_one_segment_to_four_and_back(
    tmp_path: Path, seed: int
) -> None:
    """The source and the sink, while orders come in; kills fall where they fall."""
    found, _ = _run(tmp_path, seconds=120, rate=300, kills=5, seed=seed, limit=2900)
    assert len(found["killed_batches"]) == 5
    assert found["segments"] == SEGMENTS
    assert found["expected"] > 30_000


def _run(folder: Path, *, limit: float, **settings: int) -> tuple[dict[str, Any], str]:
    """What a run reported, exact as it is, and its page."""
    page = folder / "page.html"
    command = (sys.executable, "-c", "from magnetar.cli.main import main; main()", "quickstart")
    chosen = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    places = ("--page", str(page), "--data", str(folder / "data"), "--json")
    done = subprocess.run(
        [*command, *chosen, *places], capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["missing"], found["doubled"], found["unexpected"]) == (0, 0, 0)
    assert found["expected"] == found["found"]
    return found, page.read_text("utf-8")
