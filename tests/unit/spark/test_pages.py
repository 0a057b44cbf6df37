"""The pages on Spark: the commands that they show exist, and so do the pages that they point to."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from magnetar.cli.main import main
from tests.meta.tree import ROOT

FOLDER = ROOT / "docs" / "spark"
PAGES = ("README.md", "tutorial.md", "pipelines.md", "migration.md", "pipeline-file.md")
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"^(?:\.venv/bin/)?magnetar (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]*)(?:#[^)]*)?\)")


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8")
    calls = [call for block in SHELL.findall(text) for call in CALL.findall(block)]
    for call in calls:
        words = shlex.split(call, comments=True)
        command: click.Command = main
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, call
            command = found
        known = {flag for each in command.params for flag in each.opts}
        assert {word for word in words if word.startswith("--")} <= known, call


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for link in LINK.findall((FOLDER / name).read_text("utf-8")):
        assert not link or (FOLDER / link).exists(), link


def test_the_tutorial_shows_commands() -> None:
    text = (FOLDER / "tutorial.md").read_text("utf-8")
    assert len(CALL.findall("\n".join(SHELL.findall(text)))) >= 9
