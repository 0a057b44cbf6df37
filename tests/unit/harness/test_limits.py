"""An expired limit ends a run wherever it is raised, and is reported as what it is."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from harness.limits import EXIT_CODE, PATIENCE_S, LimitExpired, OwnTime, expire, reported, within
from magnetar.testing.virtual import virtual_time

ROOT = Path(__file__).parents[3]

SLOW_TESTS = """
import asyncio
import pytest
from hypothesis import given, strategies
from harness.simulation.storage.run import simulate
from tests.simulation.search import first_violation

def test_a_simulated_run_without_a_fault():
    assert not any(simulate(seed).violations for seed in range(10**6))

def test_a_rule_that_was_taken_away():
    assert first_violation(simulate, 10**6, 0)

def test_any_error_is_expected():
    with pytest.raises(BaseException):
        while True:
            pass

def test_a_task_that_nobody_awaits():
    async def spin():
        while True:
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(spin(), return_exceptions=True)

    asyncio.run(main())

@given(strategies.integers())
def test_an_example(number):
    while True:
        pass

@pytest.fixture
def slow():
    while True:
        pass

def test_a_fixture(slow):
    pass
"""


@pytest.mark.slow
def test_a_test_whose_limit_ran_out_is_reported_as_that(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW_TESTS)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--timeout=0.3", "--tb=no"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, str(tmp_path)],
        cwd=ROOT,
        env={"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    # Only its ends: a limit that runs out in a finalizer is warned of, and runs out once more.
    ends = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert len(ends) == SLOW_TESTS.count("def test_"), done.stdout
    assert all("Failed: limit of 0.3 s expired: " in line for line in ends), done.stdout


def test_a_wait_ends_with_its_limit() -> None:
    async def main() -> None:
        async with within("it rains", 5.0):
            await asyncio.sleep(10)

    with pytest.raises(LimitExpired, match=r"^limit of 5 s expired: it rains$"):
        virtual_time.run(main())


def test_a_timeout_of_the_body_is_its_own() -> None:
    async def main() -> None:
        async with within("it rains"):
            async with asyncio.timeout(1):
                await asyncio.sleep(2)

    with pytest.raises(TimeoutError):
        virtual_time.run(main())


def test_nothing_keeps_an_expired_limit() -> None:
    """Neither a task, nor whoever gathers all errors, nor a broad `except`."""

    async def late() -> None:
        await asyncio.sleep(1)
        expire("an answer")

    async def main() -> None:
        task = asyncio.create_task(late())
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(10)

    def run() -> None:
        try:
            virtual_time.run(main())
        except Exception as error:
            raise AssertionError("it was taken for a finding") from error

    with pytest.raises(LimitExpired, match="an answer"):
        run()


def test_a_program_says_that_a_limit_ran_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert reported(lambda: 1) == 1
    assert reported(lambda: expire("an answer")) == EXIT_CODE
    assert "limit of 300 s expired: an answer" in capsys.readouterr().err


def test_own_time_counts_what_the_loop_got() -> None:
    async def main() -> tuple[float, float]:
        own = OwnTime()
        await asyncio.sleep(0.205)
        awake = own.seconds
        own.stop()
        await asyncio.sleep(1)
        return awake, own.seconds

    assert virtual_time.run(main()) == (0.2, 0.2)
