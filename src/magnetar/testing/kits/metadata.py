"""The metadata conformance kit: what every backend of `metadata.api` must do, in 62 items.

Owns: `MetadataKit`. A backend's test class inherits it, says how to open a store, and lists the
items that do not apply to it. `docs/reference/metadata-kit.md` shows a whole example.

Invariant: each of the 62 items is a test, or is listed with a reason, or names the file that
tests it. `test_00_every_item_is_accounted_for` fails otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final
from unittest import SkipTest

from magnetar.testing.kits.metadata_base import (
    ITEMS,
    MetadataWorld,
    item_number,
    partition_of,
)
from magnetar.testing.kits.metadata_records import RecordItems
from magnetar.testing.kits.metadata_scans import ScanItems
from magnetar.testing.kits.metadata_sequences import IndexItems, SequenceItems
from magnetar.testing.kits.metadata_sessions import SessionItems
from magnetar.testing.kits.metadata_watches import WatchItems

__all__ = ["NO_CHANGE_LOG", "NO_DISK", "NO_NETWORK", "MetadataKit", "MetadataWorld", "partition_of"]

# Ready-made reasons, for `NOT_APPLICABLE` of a backend: item number to why it means nothing.
NO_NETWORK: Final = {
    44: "there is no connection to cut: the store is in the process",
    48: "the owner's death is the store's: its next start drops ephemeral records (item 51)",
    49: "a paused owner pauses the store: nobody can expire its session meanwhile",
    50: "there are no heartbeats: the session is the open store object",
    60: "there is no server that could restart alone",
}
"""Reasons of a backend that lives in the process of its only user."""

NO_CHANGE_LOG: Final = {45: "watches are fed directly: there is no log of changes to be trimmed"}

NO_DISK: Final = {
    36: "nothing is written to a disk: a crash takes records and indexes together",
    56: "nothing is durable beyond the process",
    57: "nothing is durable beyond the process",
    58: "there is no disk that could be full or read-only",
    59: "there is no folder: sharing one server is what this backend is for",
}
"""Reasons of a backend that keeps everything in memory."""


class MetadataKit(RecordItems, ScanItems, SequenceItems, IndexItems, WatchItems, SessionItems):
    """All items. A subclass gives `make_world` and says what its backend can do."""

    def test_00_every_item_is_accounted_for(self) -> None:
        tested = {number for name in dir(self) if (number := item_number(name))}
        not_applicable, elsewhere = set(self.NOT_APPLICABLE), set(self.ELSEWHERE)
        assert not not_applicable & elsewhere, "an item is tested elsewhere, or does not apply"
        accounted = tested | not_applicable | elsewhere
        missing = sorted(set(range(1, ITEMS + 1)) - accounted)
        assert not missing, f"items without a test or a reason: {missing}"
        assert accounted == set(range(1, ITEMS + 1)), "an item that the suite does not have"

    def test_62_random_operations(self, tmp_path: Path) -> None:
        # Not made by `item`: the state machine brings a loop and a world for each of its runs.
        for listed in (self.NOT_APPLICABLE, self.ELSEWHERE):
            if ITEMS in listed:
                raise SkipTest(listed[ITEMS])
        # Only this item needs hypothesis.
        from magnetar.testing.kits.metadata_machine import run_machine

        run_machine(self, tmp_path, examples=self.machine_examples)
