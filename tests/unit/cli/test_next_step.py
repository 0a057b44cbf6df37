"""What a verb tells people to type next."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from magnetar.cli.next_step import to_type


@pytest.mark.parametrize(
    ("called", "is_found", "expected"),
    [
        (".venv/bin/magnetar", False, ".venv/bin/magnetar serve"),
        (".venv/bin/magnetar", True, "magnetar serve"),
        ("a b/magnetar", False, "'a b/magnetar' serve"),
        ("/usr/lib/python3/pytest", False, "magnetar serve"),
    ],
)
def test_a_command_to_go_on_with_can_be_pasted(
    called: str, is_found: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / ".venv" / "bin" / "magnetar"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(program.parent if is_found else tmp_path))
    monkeypatch.setattr(sys, "argv", [called])
    assert to_type("serve") == expected
