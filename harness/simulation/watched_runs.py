"""What every simulated run with brokers looks out for.

Owns: `ServiceBugs`, errors in what brokers write to the log; `unhandled`, errors that nobody took;
`ended`, actors that do not end, or end with an error; `watched`, a whole life. All of them become
findings. `small_limits`, what makes such a run worth its time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, Final

from harness.simulation.broker.world import Bugs
from harness.simulation.broker_lives import present_life
from harness.simulation.seeds import LIFE_SECONDS_MAX, where
from harness.simulation.storage.history import Findings
from magnetar.errors import MagnetarError
from magnetar.testing.virtual import virtual_time

_CRASHES: Final = frozenset({"service-task-crashed", "controller-crashed"})


class ServiceBugs(Bugs):
    """Also finds loops of brokers that have ended with an error: nothing does their work now."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() in _CRASHES:
            if present_life() is None or not is_alive():
                return  # of a client, or of a broker that is dead
            fields: dict[str, object] = getattr(record, "magnetar_fields", {})
            self._findings.broken(f"{fields.get('task')} has crashed: {fields.get('error')}")
            return
        super().emit(record)


def is_alive() -> bool:
    """Whether what runs now is not just being cleared away."""
    life = present_life()
    return life is None or not life.is_over


def unhandled(findings: Findings) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A handler of a loop's exceptions."""

    def noted(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, MagnetarError) and is_alive():
            findings.broken(f"{context['message']}: {type(error).__name__}: {error}")

    return noted


async def ended(
    tasks: Sequence[asyncio.Task[None]],
    findings: Findings,
    seconds: float,
    *,
    may_be_late: Callable[[], bool],
) -> None:
    """Wait for actors, then end those that are late."""
    _, late = await asyncio.wait(tasks, timeout=seconds)
    if late and not may_be_late():
        names = sorted(task.get_name() for task in late)
        findings.broken(f"these do not end: {names}")
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            findings.broken(f"{where(result)}: {type(result).__name__}: {result}")


def watched(main: Coroutine[Any, Any, None], findings: Findings, bugs: ServiceBugs) -> None:
    """Run a life on virtual time: what it raises, or brokers write as an error, is a finding."""
    log = logging.getLogger("magnetar")
    log.addHandler(bugs)
    try:
        virtual_time.run(main, until=LIFE_SECONDS_MAX)
    except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
        findings.broken(f"{where(error)}: {type(error).__name__}: {error}")
    finally:
        log.removeHandler(bugs)


def small_limits(
    random: Random,
    *,
    flush_seconds: Sequence[float] = (0.1, 1.0),
    ledger_entries: Sequence[int] = (10, 50, 5000),
) -> dict[str, float]:
    """Limits so small that everything that waits, turns over or expires does so often."""
    return {
        "journal_file_bytes": 256 * 1024,
        "journal_files_max": 4,
        "storage_settle_seconds": random.choice((0.1, 1.0)),
        "cursor_flush_seconds": random.choice(flush_seconds),
        "managed_ledger_ledger_entries": random.choice(ledger_entries),
        "connection_keepalive_seconds": random.choice((2.0, 30.0)),
        "connection_liveness_seconds": random.choice((0.5, 5.0)),
        "subscription_read_entries": random.choice((3, 500)),
    }
