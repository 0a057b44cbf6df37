"""Bench results: the file that `publish` writes, and what `make bench-diff` compares it with."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import diff, report
from bench.report import Row

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="results are kept by commit")

APPENDS = Row(measure="appends", value=900.0, unit="1/s", anchor="bare", ratio=0.9, samples=5)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository in the place of ours."""
    results = tmp_path / "build" / "bench"
    history = results / "history"
    monkeypatch.setattr(report, "ROOT", tmp_path)
    for module in (report, diff):
        monkeypatch.setattr(module, "RESULTS", results)
        monkeypatch.setattr(module, "HISTORY", history)
    monkeypatch.setattr(report, "ORIGINS", history / "origins.json")
    _git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("build\n")
    _commit(tmp_path)
    return tmp_path


def test_a_result_is_a_list_of_rows_kept_under_its_commit(repository: Path) -> None:
    path = report.publish("storage", [APPENDS])
    assert json.loads(path.read_text()) == [
        {
            "measure": "appends",
            "value": 900.0,
            "unit": "1/s",
            "anchor": "bare",
            "ratio": 0.9,
            "samples": 5,
        }
    ]
    kept = report.HISTORY / report.measured_commit() / "storage.json"
    assert report.read(kept) == [APPENDS]


def test_a_ratio_needs_an_anchor() -> None:
    with pytest.raises(ValueError, match="come together"):
        Row(measure="appends", value=1.0, unit="1/s", ratio=0.5)


def test_a_commit_is_compared_with_the_newest_one_before(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["bench.diff"])
    first = report.measured_commit()
    report.publish("storage", [APPENDS])
    assert diff.main() == 1, "nothing earlier to compare with"

    _commit(repository)
    report.publish("storage", [Row(measure="appends", value=1800.0, unit="1/s")])
    capsys.readouterr()
    assert diff.main() == 0
    printed = capsys.readouterr().out
    assert first[:12] in printed
    assert "+100.0%" in printed


def test_uncommitted_changes_are_compared_with_their_own_commit(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.diff"])
    first = report.measured_commit()
    report.publish("storage", [APPENDS])
    (repository / "changed").touch()
    report.publish("storage", [APPENDS])
    assert report.origins() == {"storage": first + report.CHANGED}
    capsys.readouterr()
    assert diff.main() == 0
    assert first[:12] in capsys.readouterr().out


def test_a_base_can_be_named(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report.publish("storage", [APPENDS])
    monkeypatch.setattr("sys.argv", ["bench.diff", "--base", "HEAD"])
    assert diff.main() == 0
    monkeypatch.setattr("sys.argv", ["bench.diff", "--base", "no-such-commit"])
    assert diff.main() == 1
    assert "no result of no-such-commit is kept" in capsys.readouterr().out


def _commit(repository: Path) -> None:
    _git(repository, "add", "--all")
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    message = ("commit", "--quiet", "--no-verify", "--allow-empty", "--message", "a state")
    _git(repository, *identity, *message)


def _git(repository: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=repository, check=True)
