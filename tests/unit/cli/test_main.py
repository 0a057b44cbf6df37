"""The command line: errors in one line, exit codes, and the two verbs on real folders."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from magnetar.cli.main import main
from magnetar.metadata.api import Index
from magnetar.server.embedded import open_storage

ENTRIES_START = 1024


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A closed store with a ledger of three entries and an indexed record."""

    async def write() -> None:
        storage = await open_storage(tmp_path)
        writer = await storage.ledgers.create()
        await asyncio.gather(*map(writer.append, (b"a" * 10, b"b" * 10, b"c" * 10)))
        await writer.close()
        async with storage.connect() as metadata:
            await metadata.put("/a/b", b"value", indexes=[Index("some", "key")])
        await storage.close()

    asyncio.run(write())
    return tmp_path


def test_version() -> None:
    done = CliRunner().invoke(main, ["--version"])
    assert done.exit_code == 0
    assert done.output.split()[-1] == version("magnetar")


@pytest.mark.parametrize(
    "arguments",
    [["nothing"], ["verify"], ["verify", "absent"], ["demo", "--seconds", "x"], ["demo", "--no"]],
)
def test_wrong_call_is_exit_code_2(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "Usage: main" in done.stderr


def test_verify_counts_what_is_there(store: Path) -> None:
    done = CliRunner().invoke(main, ["verify", str(store), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {
        "ledgers": 1,
        "entries": 3,
        "entry_bytes": 30,
        "records": 1,
        "index_entries": 1,
        "replayed": 0,
        "damaged": [],
        "index_mismatches": [],
    }
    done = CliRunner().invoke(main, ["verify", str(store)])
    assert "verified: everything can be read" in done.stdout


def test_verify_reports_a_damaged_entry(store: Path) -> None:
    (path,) = store.rglob("*.ledger")
    data = bytearray(path.read_bytes())
    data[ENTRIES_START + 35 + 30] ^= 1
    path.write_bytes(data)
    done = CliRunner().invoke(main, ["verify", str(store), "--json"])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["entries"] == 2
    (damage,) = report["damaged"]
    assert f"entry {path.stem}:1 is damaged ({path}" in damage
    assert "not sound" in CliRunner().invoke(main, ["verify", str(store)]).stdout


def test_verify_reports_an_index_out_of_step(store: Path) -> None:
    from magnetar.runtime.disk import LocalDisk

    database = LocalDisk().database(store / "metadata" / "records.db")
    database.execute("UPDATE index_entries SET index_key = 'other'")
    database.close()
    done = CliRunner().invoke(main, ["verify", str(store), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["index_mismatches"] == [
        "record /a/b lacks its entry some=key",
        "entry some=other names /a/b, which does not have it",
    ]


def test_an_error_is_one_line_with_its_hint(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert done.exit_code == 1
    assert done.stderr == f"error: {tmp_path} holds no store (name a data folder)\n"
    assert list(tmp_path.iterdir()) == []


def test_settings_come_from_the_environment(store: Path) -> None:
    done = CliRunner(env={"MAGNETAR_CLOSE_SECOND": "3"}).invoke(main, ["verify", str(store)])
    assert done.exit_code == 1
    assert "there is no setting MAGNETAR_CLOSE_SECOND (did you mean" in done.stderr


def test_demo_works_in_an_empty_folder_only(store: Path) -> None:
    done = CliRunner().invoke(main, ["demo", "--data", str(store)])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: {store} is not empty (")


@pytest.mark.slow
def test_demo_verifies_what_it_did(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = CliRunner().invoke(main, ["demo", "--data", str(folder), "--seconds", "0.4", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    served, (killed, orderly) = report["server"], report["storage"]
    assert served["receipted"] > 0
    assert served["lost"] == served["doubled"] == served["unexplained"] == 0
    assert (killed["end"], orderly["end"]) == ("kill -9", "orderly")
    assert min(killed["entries"], orderly["entries"], killed["records"]) > 0
    assert orderly["replayed"] == orderly["not_acknowledged"] == 0
    for result in (killed, orderly):
        assert result["lost"] == result["unexplained"] == result["index_mismatches"] == 0
    storage = str(folder / "storage")
    verified = CliRunner().invoke(main, ["verify", storage, "--json"])
    assert verified.exit_code == 0
    report = json.loads(verified.stdout)
    found = killed["entries"] + orderly["entries"] + killed["records"] + orderly["records"]
    assert report["entries"] + report["records"] == found + killed["not_acknowledged"]
