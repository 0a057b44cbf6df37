"""Programs with official clients of other languages, run against one server.

Owns: `Program`, a running one that is given a scenario at a time, `Outcome`, what became of it, and
`locked`, for whoever builds one.

A line on its stdin is a scenario with its arguments. It answers with PASS, or FAIL and why; before
that, ASK names something that only we can do for it (answered by DONE), and any other line is
something that we are shown.
"""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, TypeAlias

import pytest

from harness.limits import PATIENCE_S

Favour: TypeAlias = Callable[[str], None]
"""Something done for a scenario; it is given what the scenario said behind the name."""

NO_FAVOURS: Final[Mapping[str, Favour]] = {}
_STOP_SECONDS = PATIENCE_S
# What of the program's own output stands in the report of a failure.
_LINES_MAX = 40
_COLUMNS_MAX = 400


@dataclass(frozen=True, slots=True)
class Shown:
    """Bytes that a scenario wants looked at, and the text that the client has for them."""

    kind: str
    data: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    failure: str | None
    shown: tuple[Shown, ...]


class Program:
    """A running program; it is given one scenario at a time."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        self._stderr = log.open("wb")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    @classmethod
    @contextmanager
    def started(cls, command: Sequence[str], folder: Path) -> Iterator[Program]:
        """One that runs; what it writes to stderr goes to a file in the folder."""
        program = cls(command, folder / "program-stderr")
        try:
            yield program
        finally:
            program.stop()

    def run(
        self, scenario: str, *arguments: str, favours: Mapping[str, Favour] = NO_FAVOURS
    ) -> Outcome:
        """Runs a scenario, and meanwhile does the favours that it asks for by their names."""
        _, answers = self._pipes()
        self._tell(" ".join((scenario, *arguments)))
        shown: list[Shown] = []
        for line in answers:
            head, _, rest = line.rstrip("\n").partition(" ")
            if head == "PASS":
                return Outcome(None, tuple(shown))
            if head == "FAIL":
                return Outcome(f"{rest}\n{self._written()}", tuple(shown))
            if head == "ASK":
                name, _, argument = rest.partition(" ")
                favours[name](argument)
                self._tell("DONE")
                continue
            kind, data, text = rest.split(" ", 2)
            shown.append(Shown(kind, bytes.fromhex(data), text))
        raise AssertionError(f"the program ended:\n{self._written()}")

    def _tell(self, line: str) -> None:
        commands, _ = self._pipes()
        commands.write(line + "\n")
        commands.flush()

    def stop(self) -> None:
        commands, answers = self._pipes()
        commands.close()
        try:
            self._process.wait(_STOP_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            answers.close()
            self._stderr.close()

    def _written(self) -> str:
        """The end of what it and the client in it have written to stderr."""
        lines = self._log.read_text("utf-8").splitlines()
        return "\n".join(line[:_COLUMNS_MAX] for line in lines[-_LINES_MAX:])

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def passes(
    program: Program, name: str, *arguments: str, favours: Mapping[str, Favour] = NO_FAVOURS
) -> None:
    """Run a scenario that must pass."""
    outcome = program.run(name, *arguments, favours=favours)
    if outcome.failure is not None:
        pytest.fail(outcome.failure, pytrace=False)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; the others wait, and find built what they were about to build."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
