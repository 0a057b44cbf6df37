"""Races of the embedded storage, and rules that matter: switched off, they show their harm."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from magnetar.errors import (
    BadVersion,
    DiskFull,
    LedgerMissing,
    Unavailable,
)
from magnetar.ledger import file as ledger_file
from magnetar.ledger.file_home import Move
from magnetar.ledger.file_ledger import FileLedger
from magnetar.metadata.api import ABSENT
from magnetar.metadata.sqlite_engine import SqliteMetadata
from tests.unit.journal.support import turns
from tests.unit.server.storage_bench import opened, run

# --- races


@pytest.mark.parametrize("at_rest", [False, True])
@pytest.mark.parametrize("order", ["delete first", "fence first"])
def test_fencing_what_is_being_deleted_leaves_a_store_that_opens(
    tmp_path: Path, at_rest: bool, order: str
) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "data")
        ledgers = bench.storage.ledgers
        writer = await ledgers.create()
        await writer.append(b"x")
        if at_rest:
            await bench.storage.settle()
        calls = [ledgers.delete(writer.ledger_id), ledgers.fence(writer.ledger_id)]
        if order == "fence first":
            calls.reverse()
        await asyncio.gather(*calls, return_exceptions=True)
        again = await opened(bench.killed())
        for one in (ledgers, again.storage.ledgers):
            with pytest.raises(LedgerMissing):
                await one.info(writer.ledger_id)
            assert [ledger_id async for ledger_id in one.list()] == []
        await again.close()
        await bench.close()

    run(main())


def test_a_closing_client_leaves_what_another_just_took_over(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await opened(tmp_path / "data")
        former, successor = bench.storage.connect(), bench.storage.connect()
        await former.put("/leader", b"former", ephemeral=True)
        bench.journal.held = True
        last = asyncio.ensure_future(former.put("/last", b""))
        await turns()
        closing = asyncio.ensure_future(former.close())
        await turns()
        taking_over = asyncio.ensure_future(successor.put("/leader", b"successor"))
        await turns()
        bench.journal.release(1)
        await turns()
        bench.journal.release()
        await asyncio.gather(last, closing, taking_over)
        record = await successor.get("/leader")
        assert record is not None, "an acknowledged record is gone"
        assert record.value == b"successor"
        await successor.close()
        await bench.close()

    run(main())


# --- rules that matter: without them there is harm


async def _answer_on_a_refused_change(folder: Path) -> BaseException | None:
    """A put is in flight, a create of the same key is asked; then the disk is full."""
    bench = await opened(folder)
    store = bench.storage.connect()
    bench.journal.held = True
    put = asyncio.ensure_future(store.put("/a", b"1"))
    create = asyncio.ensure_future(store.put("/a", b"2", expected=ABSENT))
    await turns()
    bench.disk.fail("write", "journal/*", DiskFull("no space"))
    bench.journal.release()
    await asyncio.gather(put, create, return_exceptions=True)
    assert isinstance(put.exception(), Unavailable)
    assert await store.get("/a") is None
    bench.disk.heal()
    await store.close()
    await bench.close()
    return create.exception()


def test_an_answer_waits_for_what_it_rests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        assert isinstance(await _answer_on_a_refused_change(tmp_path / "ruled"), Unavailable)

        def at_once(self: SqliteMetadata, answer: Any) -> asyncio.Future[Any]:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_exception(answer)
            return future

        monkeypatch.setattr(SqliteMetadata, "_answer", at_once)
        lost = await _answer_on_a_refused_change(tmp_path / "unruled")
        assert isinstance(lost, BadVersion), "beaten by a record that never was"

    run(main())


async def _replace_behind_a_delete(folder: Path) -> BaseException | None:
    """Delete, put, delete are in flight; the put is durable; now it is replaced by version."""
    bench = await opened(folder)
    store = bench.storage.connect()
    await store.put("/a", b"1")
    bench.journal.held = True
    first, put, second = store.delete("/a"), store.put("/a", b"2"), store.delete("/a")
    for _ in range(2):
        await turns()
        bench.journal.release(1)
        await turns()
    version = (await put).version
    replace = asyncio.ensure_future(store.put("/a", b"3", expected=version))
    await turns()
    bench.journal.release()
    await asyncio.gather(replace, return_exceptions=True)
    assert [await first, await second] == [True, True]
    await store.close()
    await bench.close()
    return replace.exception()


def test_a_judged_state_goes_only_with_its_own_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        assert isinstance(await _replace_behind_a_delete(tmp_path / "ruled"), BadVersion)
        show = SqliteMetadata._show

        def by_equality(self: SqliteMetadata, change: Any) -> None:
            judged = self._judged.get(change.key)
            self._judged.setdefault(change.key, change)
            show(self, change)
            if judged is not None and judged.state == change.state:
                self._judged.pop(change.key, None)

        monkeypatch.setattr(SqliteMetadata, "_show", by_equality)
        assert await _replace_behind_a_delete(tmp_path / "unruled") is None, (
            "a compare-and-set succeeded on a deleted record"
        )

    run(main())


async def _entries_after_a_refused_append(folder: Path) -> int:
    """An append is in flight while the ledger is moved; then the disk is full, then a kill."""
    bench = await opened(folder)
    store = bench.storage.connect()
    writer = await bench.storage.ledgers.create()
    await writer.append(b"acknowledged")
    bench.journal.held = True
    append = writer.append(b"refused")
    await turns()
    await bench.storage.settle()
    bench.disk.fail("write", "journal/*", DiskFull("no space"))
    bench.journal.release()
    with pytest.raises(DiskFull):
        await append
    bench.disk.heal()
    await store.put("/later", b"")
    await bench.storage.settle()
    await store.put("/later", b"settled")
    again = await opened(bench.killed())
    info = await again.storage.ledgers.fence(writer.ledger_id)
    await again.close()
    await store.close()
    await bench.close()
    return info.last_entry


def test_only_durable_entries_are_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        assert await _entries_after_a_refused_append(tmp_path / "ruled") == 0

        def all_of_it(ledger: FileLedger) -> Move:
            header = ledger.wanted_header()
            return Move(header, ledger.ledger_id, ledger.moved, ledger.moved_end, list(ledger.tail))

        monkeypatch.setattr(ledger_file, "move_of", all_of_it)
        found = await _entries_after_a_refused_append(tmp_path / "unruled")
        assert found == 1, "an entry that was refused is there after all"

    run(main())
