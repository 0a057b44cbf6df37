"""Open a data folder, write a record and two entries, read them back."""

import asyncio
import sys
from pathlib import Path

from magnetar.metadata.api import ABSENT, Index
from magnetar.server.embedded import open_storage


async def main() -> None:
    storage = await open_storage(Path(sys.argv[1] if len(sys.argv) > 1 else "data"))
    async with storage.connect() as metadata:
        await metadata.put("/jobs/1", b"open", expected=ABSENT, indexes=[Index("by-state", "open")])
        writer = await storage.ledgers.create()
        first = writer.append(b"hello")  # submitted now, in this order ...
        second = writer.append(b"world")
        print(await first, await second)  # ... durable when awaited
        print([entry.payload for entry in await storage.ledgers.read(writer.ledger_id, 0, 1)])
        print([record.key async for record in metadata.scan_index("by-state", "open", "open")])
    await storage.close()


asyncio.run(main())
