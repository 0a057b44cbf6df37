"""One data folder, one process: the second is refused at once, and told what to do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness.limits import PATIENCE_S
from magnetar.errors import FolderInUse
from magnetar.server.embedded import open_storage
from tests.recovery.stores import SMALL, hashes

OPEN_AND_WAIT = """
    import asyncio, sys
    from pathlib import Path
    from magnetar.server.embedded import open_storage
    from tests.recovery.stores import SMALL

    async def main(folder):
        storage = await open_storage(folder, limits=SMALL)
        print("open", flush=True)
        sys.stdin.read()
        await storage.close()

    asyncio.run(main(Path(sys.argv[1])))
"""


def test_second_process_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(OPEN_AND_WAIT), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"open\n"
        before = hashes(tmp_path)
        with pytest.raises(FolderInUse) as refusal:
            asyncio.run(open_storage(tmp_path, limits=SMALL))
        assert str(refusal.value) == (
            f"{tmp_path} is open in another process "
            "(stop the other process or choose another folder)"
        )
        assert hashes(tmp_path) == before
        command_line = Path(sys.executable).with_name("magnetar")
        second = subprocess.run(
            [command_line, "verify", tmp_path], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert second.returncode == 1
        assert second.stderr == f"error: {refusal.value}\n"
        first.communicate(b"")
    assert first.returncode == 0


def test_folder_is_free_after_a_close_and_after_a_kill(tmp_path: Path) -> None:
    async def open_and_close() -> None:
        storage = await open_storage(tmp_path, limits=SMALL)
        with pytest.raises(FolderInUse):
            await open_storage(tmp_path, limits=SMALL)
        await storage.close()

    asyncio.run(open_and_close())
    command = [sys.executable, "-c", textwrap.dedent(OPEN_AND_WAIT), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        process.kill()
    asyncio.run(open_and_close())
