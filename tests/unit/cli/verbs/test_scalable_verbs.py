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
