"""The process that the kill loops kill: a load on a data folder, until it dies or is done.

    python -m harness.crash.storage.child FOLDER --seed 7 --first-token 1 --events 3
        [--point after:sync:journal --nth 12] [--operations 100000]

Every event of the load goes to the descriptor `--events` with one unbuffered write before the
load goes on, so that the reader has it whatever happens next. A pipe takes each of them whole.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.crash.storage.history import READY, Event, Told, encode_event
from harness.crash.storage.load import CRASH_LIMITS, CrashLoad
from harness.crash.storage.points import CrashCount, CrashingDisk
from magnetar.runtime.disk import Disk, LocalDisk
from magnetar.server.embedded import open_storage

DONE = 0
FAILED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)

    def report(event: Event) -> None:
        os.write(options.events, encode_event(event) + b"\n")

    try:
        asyncio.run(_load(options, report))
    except Exception as error:  # noqa: BLE001  the parent reports it
        report(Told("failed", "; ".join(map(repr, _leaves(error)))[:2000]))
        return FAILED
    report(Told("closed"))
    return DONE


async def _load(options: argparse.Namespace, report: Callable[[Event], None]) -> None:
    disk: Disk = LocalDisk()
    if options.point:
        disk = CrashingDisk(CrashCount(options.point, options.nth))
    storage = await open_storage(options.folder, limits=CRASH_LIMITS, disk=disk)
    report(Told(READY, str(storage.recovered_records)))
    load = CrashLoad(storage, options.seed, options.first_token, report)
    await load.run(options.operations)
    await storage.close()


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in _leaves(each)]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="harness.crash.storage.child")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first-token", type=int, required=True)
    parser.add_argument("--events", type=int, required=True, help="descriptor to report to")
    parser.add_argument("--point", default="")
    parser.add_argument("--nth", type=int, default=1)
    parser.add_argument("--operations", type=int, default=1_000_000)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
