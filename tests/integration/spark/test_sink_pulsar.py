"""A query that writes to a real Apache Pulsar: what it has instead of groups is enough.

Marked soak: Pulsar is fetched by Maven, and starts in half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from magnetar.errors import NotAllowed
from magnetar.spark import links
from tests.client_e2e.pulsar import PULSAR, PulsarProcess
from tests.integration.spark.sink_stage import sink_stage_at
from tests.integration.spark.stage import Talk
from tests.interop.serving import ask_admin
from tests.interop_java.maven import BuildFailed, lacking

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]

NAMESPACE = "public/default"
TOPIC = f"persistent://{NAMESPACE}/output"
_FOREVER = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of a Pulsar that keeps what was read."""
    reason = lacking()
    if reason is not None:
        pytest.skip(f"Apache Pulsar cannot be started: {reason}")
    try:
        PULSAR.build()
    except BuildFailed as error:
        if not error.fetching:
            raise
        pytest.skip(f"Apache Pulsar cannot be fetched: {error}")
    pulsar = PulsarProcess(tmp_path / "pulsar")
    pulsar.start()
    try:
        path = f"/admin/v2/namespaces/{NAMESPACE}/retention"
        status, answer = ask_admin(pulsar.admin_url, "POST", path, _FOREVER)
        assert status < 300, answer
        yield pulsar.service_url
    finally:
        pulsar.stop()


def test_a_stock_pulsar_is_written_exactly_once(tmp_path: Path, url: str) -> None:
    """F3, F5, F7 and F12 with one transaction for a batch, which is chosen without being told."""
    with sink_stage_at(tmp_path, url, TOPIC) as stage:
        for point, batch in (("mid-write", 1), ("before-commit", 1), ("after-commit", 2)):
            driver = stage.driver(99, {"point": point, "batch": batch})
            driver.until_reached(0)
            driver.kill()
            stage.check(batch + (point == "after-commit"))
        assert not (stage.checkpoint / "commits" / "2").exists()
        on = stage.driver(4)
        assert on.ended() == 0, on.text()
        last = stage.last_done()
        stage.check(last + 1)
        stage.forget(last)
        again = stage.driver(last + 1, partitions=2)
        assert again.ended() == 0, again.text()
        stage.check(stage.last_done() + 1)


def test_a_stock_pulsar_cannot_be_read_and_says_so(url: str) -> None:
    talk = Talk(url)
    try:
        with pytest.raises(NotAllowed, match="cannot read ranges") as no:
            talk.from_earliest(topic=TOPIC).step()
    finally:
        links.close_all()
        talk.client.close()
    assert no.value.hint is not None
    assert "Apache Pulsar has no such command" in no.value.hint
