"""kill -9 of a driver, its JVM and its workers, at the points of the source: F1, F2, F8."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.spark.driver_process import DriverProcess
from tests.integration.spark.files import Files
from tests.integration.spark.stage import Stage, check

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]


class Driver(DriverProcess):
    """A process of `tests.integration.spark.source_driver`."""

    def __init__(self, folder: Path, options: dict[str, str], hold: str = "") -> None:
        self._reached = folder / "reached"
        self._reached.unlink(missing_ok=True)
        plan = {"folder": str(folder), "options": options, "hold": hold}
        super().__init__("tests.integration.spark.source_driver", plan, folder / "text")

    def kill_when_reached(self) -> None:
        self.until(self._reached.exists)
        self.kill()


@pytest.mark.parametrize(
    "point",
    ["before-wal:0", "before-wal:1", "after-wal:0", "after-wal:2", "in-read", "in-commit:1"],
)
def test_a_killed_driver_goes_on_exactly(on: Stage, tmp_path: Path, point: str) -> None:
    options = on.options(
        {
            "startingOffsets": "earliest",
            "maxMessagesPerTrigger": "20",
            "subscription": "spark",
        }
    )
    on.send(80)
    killed = Driver(tmp_path, options, point)
    try:
        killed.kill_when_reached()
    finally:
        killed.kill()
    on.split(0)
    on.send(40)
    again = Driver(tmp_path, options | {"maxMessagesPerTrigger": "35"})
    try:
        assert again.ended() == 0, again.text()
    finally:
        again.kill()
    check(Files(tmp_path).rows(), on.sent)
