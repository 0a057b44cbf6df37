"""File descriptors: how many the process may have open, and who of the server gets how many.

Owns: `raise_soft_limit`, `descriptors_max`, and `fitted`, which shrinks limits to what there is.

Invariants:
1. Ledger files, connections of clients and of the admin interface, and what the rest of a server
   opens (journal, database, folders being synced) fit into the descriptors together: a flood of
   connections takes none that the storage needs.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import replace
from typing import Final

from magnetar.errors import ConfigError
from magnetar.runtime.limits import Limits

DESCRIPTORS_MIN: Final = 256
"""With fewer a server would have hardly any left for clients."""

# Listeners, the loop's own, standard streams, files opened for a moment; and connections that are
# accepted in one turn of the loop only to be closed.
_SPARE: Final = 64
# A reader of SQLite has the database, its log and the log's index open.
_PER_SNAPSHOT: Final = 3
# The system's own bound is far above every limit that `fitted` looks at.
_UNLIMITED: Final = 2**30


def raise_soft_limit() -> int:
    """Raise the soft limit of this process to the hard one; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems name a hard limit that they do not grant: the soft one stays in force.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptors_max()


def descriptors_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def fitted(limits: Limits, descriptors: int) -> Limits:
    """The limits, lowered where they would need more descriptors than there are."""
    if descriptors < DESCRIPTORS_MIN:
        raise ConfigError(
            f"a server needs {DESCRIPTORS_MIN} file descriptors, and may have {descriptors}",
            hint="raise the limit of open files (`ulimit -n`, or LimitNOFILE of its unit)",
        )
    # Ledger files are closed and opened again at need: half of all is plenty.
    ledger_files = min(limits.ledger_open_files, descriptors // 2)
    spare = _SPARE + limits.journal_files_max + _PER_SNAPSHOT * limits.metadata_snapshots
    # Limits may ask for more than half of a small number: connections then have a quarter.
    room = max(descriptors - ledger_files - spare, descriptors // 4)
    # The operator's way in keeps its places, however many clients there are.
    admin = min(limits.admin_connections_max, room // 4)
    return replace(
        limits,
        ledger_open_files=ledger_files,
        admin_connections_max=admin,
        connections_max=min(limits.connections_max, room - admin),
    )
