"""The ledger conformance kit: what every backend of `ledger.api` must do, in 26 items.

Owns: `LedgerKit`. A backend's test class inherits it, says how to open a store, and lists the
items that do not apply to it. `docs/reference/ledger-kit.md` shows a whole example.

Damage on disk, full disks, failed syncs and power loss need a disk to break: they are tested with
the backend that has one, not here.

Invariant: each item is a test, or is listed with a reason, or names the file that tests it.
"""

from __future__ import annotations

from magnetar.testing.kits.ledger_base import ITEMS, LedgerWorld
from magnetar.testing.kits.ledger_durability import DurabilityItems
from magnetar.testing.kits.ledger_ends import EndItems
from magnetar.testing.kits.ledger_entries import AppendItems, ReadItems
from magnetar.testing.kits.metadata_base import item_number

__all__ = ["LedgerKit", "LedgerWorld"]


class LedgerKit(AppendItems, ReadItems, EndItems, DurabilityItems):
    """All items. A subclass gives `make_world` and says what its backend can do."""

    def test_00_every_item_is_accounted_for(self) -> None:
        tested = {number for name in dir(self) if (number := item_number(name))}
        not_applicable, elsewhere = set(self.NOT_APPLICABLE), set(self.ELSEWHERE)
        assert not not_applicable & elsewhere, "an item is tested elsewhere, or does not apply"
        assert tested | not_applicable | elsewhere == set(range(1, ITEMS + 1))
