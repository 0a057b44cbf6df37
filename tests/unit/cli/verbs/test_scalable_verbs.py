"""What the verbs of scalable topics say of a change that takes its time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from magnetar.cli.admin_client import AdminClient
from magnetar.cli.verbs import scalable
from magnetar.testing.virtual import virtual_time

WAITS = {"kind": "split", "step": "prepare", "waitsForTransaction": "(3,14)", "waitsAtMostMs": 3200}


class Admin:
    """An admin interface with a change under way."""

    async def get(self, path: str, **_: str) -> Any:
        return {"change": WAITS}


def test_who_splits_is_told_of_a_wait_for_transactions(capsys: pytest.CaptureFixture[str]) -> None:
    async def change() -> None:
        async def slow() -> None:
            await asyncio.sleep(4)

        admin = cast("AdminClient", Admin())
        await scalable._changed(admin, "t", asyncio.sleep(0.1))
        assert capsys.readouterr().err == ""
        await scalable._changed(admin, "t", slow())

    virtual_time.run(change(), until=100)
    assert capsys.readouterr().err == (
        "not done yet: split (prepare), waits for open transactions, (3,14) among them, "
        "4 s more at most\n"
    )


@pytest.mark.parametrize(
    ("found", "rows"),
    [
        ({}, []),
        ({"backlogQuotaLimitSize": -1, "backlogQuotaLimitTime": -1}, []),
        (
            {"backlogQuotaLimitSize": 30_000, "backlogSize": -1},
            [("backlog", "? of 30,000 bytes")],
        ),
        (
            {
                "backlogQuotaLimitSize": 30_000,
                "backlogSize": 1234,
                "backlogQuotaLimitTime": 7200,
                "oldestBacklogMessageAgeSeconds": 3600,
            },
            [("backlog", "1,234 of 30,000 bytes"), ("oldest message", "3,600 of 7,200 s")],
        ),
    ],
)
def test_statistics_say_how_much_of_a_quota_is_used_up(
    found: dict[str, Any], rows: list[tuple[str, str]]
) -> None:
    assert scalable._quota_rows(found) == rows
