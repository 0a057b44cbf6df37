"""Small stores with known content, for the tests of this folder.

`python -m tests.recovery.stores` writes the golden folders of the present format anew. Do that
only for a format version that was never released; a new version gets a new folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Final

from magnetar.ledger.api import LedgerState
from magnetar.metadata.api import Index
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import STORE_FORMAT, Storage, open_storage

GOLDEN: Final = Path(__file__).parent / "golden" / f"v{STORE_FORMAT}"
SMALL: Final = Limits(
    journal_file_bytes=32 * 1024,
    journal_files_max=2,
    ledger_open_files=16,
    storage_settle_seconds=3600.0,
)
PAYLOADS: Final = [bytes([65 + number]) * size for number, size in enumerate((0, 1, 700, 40, 9))]
OWNERS: Final = {"/golden/a": "alice", "/golden/b": "bob", "/golden/dir/c": "alice"}


async def fill(storage: Storage) -> list[int]:
    """A closed, a fenced, an open and a deleted ledger, and some records; the ids that stay."""
    ids = []
    for end in (LedgerState.CLOSED, LedgerState.FENCED, LedgerState.OPEN):
        writer = await storage.ledgers.create()
        await asyncio.gather(*map(writer.append, PAYLOADS))
        if end is LedgerState.CLOSED:
            await writer.close()
        elif end is LedgerState.FENCED:
            await storage.ledgers.fence(writer.ledger_id)
        ids.append(writer.ledger_id)
    deleted = await storage.ledgers.create()
    await deleted.append(b"gone")
    await storage.ledgers.delete(deleted.ledger_id)
    async with storage.connect() as store:
        for key, owner in OWNERS.items():
            await store.put(key, key.encode(), indexes=[Index("owner", owner)])
        await store.put("/golden/a", b"changed", indexes=[Index("owner", "carol")])
        await store.put("/golden/gone", b"")
        await store.delete("/golden/gone")
        await store.append("/golden/queue", b"first", deltas=(1, 5))
    return ids


async def content(storage: Storage) -> dict[str, object]:
    """Everything in a store, for comparing."""
    found: dict[str, object] = {}
    async for ledger_id in storage.ledgers.list():
        info = await storage.ledgers.info(ledger_id)
        entries = await storage.ledgers.read(ledger_id, 0, info.last_entry)
        found[f"ledger {len(found)}"] = (info.state, [entry.payload for entry in entries])
    async with storage.connect() as store:
        for parent in ("/golden", "/golden/dir"):
            async for record in store.scan(parent):
                found[record.key] = (record.value, record.stat.mods)
        for owner in ("alice", "bob", "carol"):
            records = store.scan_index("owner", owner, owner)
            found[f"owner {owner}"] = [record.key async for record in records]
    return found


def expected_content() -> dict[str, object]:
    ends = (LedgerState.CLOSED, LedgerState.FENCED, LedgerState.OPEN)
    return {
        **{f"ledger {number}": (end, PAYLOADS) for number, end in enumerate(ends)},
        "/golden/a": (b"changed", 1),
        "/golden/b": (b"/golden/b", 0),
        "/golden/queue-00000000000000000001-00000000000000000005": (b"first", 0),
        "/golden/dir/c": (b"/golden/dir/c", 0),
        "owner alice": ["/golden/dir/c"],
        "owner bob": ["/golden/b"],
        "owner carol": ["/golden/a"],
    }


def hashes(folder: Path) -> dict[str, str]:
    """Path and hash of every file; SQLite's shared memory and an empty log hold nothing."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
        if path.stat().st_size or not path.name.endswith("-wal")
    }


async def write_stores(folder: Path) -> None:
    """`clean` was closed; `unreplayed` holds everything in its journal only."""
    storage = await open_storage(folder / "clean", limits=SMALL)
    await fill(storage)
    without_shared_memory = shutil.ignore_patterns("*-shm")
    shutil.copytree(folder / "clean", folder / "unreplayed", ignore=without_shared_memory)
    await storage.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(write_stores(Path(name)))
        shutil.rmtree(GOLDEN, ignore_errors=True)
        shutil.copytree(name, GOLDEN)
