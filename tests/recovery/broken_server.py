"""`magnetar serve` with one rule taken away: python broken_server.py RULE serve ...

The rules are patched out here; no switch for them exists in the server.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence

from magnetar.broker.publish.dedup_log import DedupLog
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.cli.main import main
from magnetar.journal.files import JournalFile

_BATCHES_LATE = 20


def ack_answers_before_the_flush() -> None:
    async def at_once(self: Subscription) -> None:
        """The next flush is up to a second away."""

    Subscription.ack_durable = at_once  # type: ignore[method-assign]


def receipts_before_the_sync() -> None:
    """A batch counts as synced while it is not even written: some batches later it is.

    Nothing is moved to its home meanwhile: a journal behind its homes would be found out at once.
    """
    os.environ["MAGNETAR_STORAGE_SETTLE_SECONDS"] = "60"
    os.environ["MAGNETAR_JOURNAL_FILE_BYTES"] = str(32 * 1024 * 1024)
    write = JournalFile.write_synced
    late: deque[tuple[JournalFile, int, list[bytes]]] = deque()

    def write_late(self: JournalFile, buffers: Sequence[bytes]) -> None:
        late.append((self, self.end, [bytes(each) for each in buffers]))
        while len(late) > _BATCHES_LATE or (late and late[0][0] is not self):
            file, end, waiting = late.popleft()
            now, file.end = file.end, end
            write(file, waiting)
            file.end = now

    JournalFile.write_synced = write_late  # type: ignore[method-assign]


def no_replay_of_dedup() -> None:
    """The sequences of producers are those of the last snapshot."""

    async def nothing(self: DedupLog, now: float) -> None:
        """Take the snapshot for everything there is."""

    DedupLog._replay = nothing  # type: ignore[method-assign]


RULES: dict[str, Callable[[], None]] = {
    rule.__name__: rule
    for rule in (ack_answers_before_the_flush, receipts_before_the_sync, no_replay_of_dedup)
}

if __name__ == "__main__":
    RULES[sys.argv.pop(1)]()
    main()
