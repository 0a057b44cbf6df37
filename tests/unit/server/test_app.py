"""A whole server: start, stop with what is owed, restart, and the command that runs it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.limits import PATIENCE_S, within
from magnetar.cli.main import main
from magnetar.errors import ConfigError, FolderInUse, StorageFenced
from magnetar.runtime.limits import Limits
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig
from magnetar.server.embedded import Storage
from magnetar.testing.virtual.driver import build_message
from tests.unit.server.serving import LIMITS, connected, published, pushed, run, serving, subscribed

MAGNETAR = Path(sys.executable).with_name("magnetar")


def test_a_stop_gives_the_receipts_that_are_owed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await driver.request("PRODUCER", topic="topic", producer_id=1)
            for number in range(200):
                entry = build_message(b"x", sequence_id=number)
                driver.send("SEND", entry, producer_id=1, sequence_id=number)
            (session,) = server.context.sessions
            while not session.owed:
                await session.heard.past(session.heard.version)
        receipts = [await pushed(driver, "SEND_RECEIPT") for _ in range(200)]
        assert [each.sequence_id for each in receipts] == list(range(200))
        await driver.lost()

    run(scene())


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_peer_that_does_not_read(tmp_path: Path) -> None:
    async def scene() -> None:
        limits = Limits(journal_file_bytes=4 * 1024 * 1024, close_seconds=10)
        async with serving(tmp_path, limits=limits) as server:
            lazy = await connected(server)
            await subscribed(lazy)
            lazy.detach().pause_reading()
            writer = await connected(server)
            await writer.request("PRODUCER", topic="topic", producer_id=1)
            big = build_message(b"x" * 500_000)
            for number in range(30):
                await writer.publish(1, number, big)
        lazy.abort()
        await lazy.lost()

    run(scene())


def test_a_server_that_comes_back_has_everything(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            ids = await published(driver, 10)
        await driver.lost()
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver)
            found = [await driver.pushes.get() for _ in range(10)]
            assert [each.body.message_id for each in found] == ids  # type: ignore[union-attr]
            await driver.close()

    run(scene())


def test_a_taken_folder_or_port_is_named(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path / "one") as server:
            with pytest.raises(FolderInUse):
                await Server(ServerConfig(data=str(tmp_path / "one"), port=0)).start()
            port = int(server.service_url.rpartition(":")[2])
            other = ServerConfig(data=str(tmp_path / "two"), port=port, limits=LIMITS)
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                await Server(other).start()

    run(scene())


@pytest.mark.slow
def test_storage_that_failed_ends_the_server(tmp_path: Path) -> None:
    async def scene() -> None:
        server = Server(ServerConfig(data=str(tmp_path), port=0, limits=LIMITS))
        await server.start()
        failure = StorageFenced("a sync failed")
        assert isinstance(server.storage, Storage)
        server.storage._journal.fence(failure)
        async with within("the server has failed"):
            await server.failed.past(0)
        with pytest.raises(StorageFenced):
            await server.stop()

    run(scene())


@pytest.mark.parametrize(
    ("config", "url"),
    [
        (ServerConfig(host="::1", port=0), "pulsar://[::1]:"),
        (ServerConfig(port=0, advertised_host="example.org"), "pulsar://example.org:"),
    ],
)
def test_the_advertised_address(tmp_path: Path, config: ServerConfig, url: str) -> None:
    async def scene() -> None:
        here = ServerConfig(
            data=str(tmp_path),
            host=config.host,
            port=0,
            advertised_host=config.advertised_host,
            limits=LIMITS,
        )
        async with Server(here) as server:
            assert server.service_url.startswith(url)

    run(scene())


# --- the command


# SIGHUP: the terminal was closed. It is an orderly stop, as the other two are.
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda each: each.name)
def test_serve_says_where_it_is_and_stops_when_told(tmp_path: Path, number: signal.Signals) -> None:
    command = [str(MAGNETAR), "serve", "--data", str(tmp_path), "--port", "0", "--admin-port", "0"]
    with subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["service_url"].startswith("pulsar://127.0.0.1:")
        assert ready["data"] == str(tmp_path)
        assert ready["pid"] == process.pid
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors


@pytest.mark.slow
def test_a_busy_admin_port_is_found_before_clients_are_served(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        data = tmp_path / "data"
        flags = ["--data", str(data), "--port", "0", "--admin-port", str(port)]
        done = subprocess.run(
            [str(MAGNETAR), "serve", *flags], capture_output=True, text=True, timeout=PATIENCE_S
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "server-ready" not in done.stderr
    assert not data.exists()


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ([], {"MAGNETAR_PROT": "1"}, "did you mean MAGNETAR_PORT?"),
        (["--port", "99999"], {}, "port must be from 0 to 65535"),
        (["--config", "nowhere.toml"], {}, "nowhere.toml cannot be read"),
    ],
)
def test_serve_refuses_wrong_settings(
    tmp_path: Path, flags: list[str], environ: dict[str, str], message: str
) -> None:
    arguments = ["serve", "--data", str(tmp_path / "data"), *flags]
    done = CliRunner().invoke(main, arguments, env=environ)
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "data").exists()
