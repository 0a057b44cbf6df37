"""Pure: what is stored about the compaction of a topic, as properties of its cursor.

Owns: `CompactionState`, and its form in the properties of the cursor `__compaction`.

Invariants:
1. All of it changes in one write of one record: which ledger holds the compacted view, up to where
   that stands for the log, and which ledgers are to be deleted.
2. A ledger is named here from its creation until it is deleted: while it is written, among those to
   be deleted; then as the compacted one; then, replaced, among those to be deleted once more.
3. Properties of others stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from magnetar.errors import CorruptMetadata
from magnetar.model.ids import Position

# The first one is Pulsar's, by which its tools know it.
LEDGER: Final = "CompactedTopicLedger"
HORIZON: Final = "CompactedTopicHorizon"
DROPPING: Final = "CompactionDropping"


class CompactionState(NamedTuple):
    """The compaction of one topic, as it is stored."""

    ledger_id: int | None = None
    """Where the compacted view is; None: there is none."""
    horizon: Position | None = None
    """Up to here the compacted view stands for the log."""
    dropping: tuple[int, ...] = ()
    """Ledgers that are no view, or none any more."""

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> CompactionState:
        """Read it from the properties of the cursor."""
        try:
            dropping = tuple(int(each) for each in properties.get(DROPPING, "").split(",") if each)
            if LEDGER not in properties:
                return cls(dropping=dropping)
            ledger_id, entry_id = properties[HORIZON].split(":")
            horizon = Position(int(ledger_id), int(entry_id))
            return cls(int(properties[LEDGER]), horizon, dropping)
        except (KeyError, ValueError) as error:
            raise CorruptMetadata(f"the state of a compaction cannot be read: {error}") from error

    def within(self, properties: Mapping[str, str]) -> dict[str, str]:
        """The properties with this state in place of the one that was there."""
        own = (LEDGER, HORIZON, DROPPING)
        found = {name: text for name, text in properties.items() if name not in own}
        if self.ledger_id is not None and self.horizon is not None:
            found[LEDGER] = str(self.ledger_id)
            found[HORIZON] = f"{self.horizon.ledger_id}:{self.horizon.entry_id}"
        if self.dropping:
            found[DROPPING] = ",".join(map(str, self.dropping))
        return found

    @property
    def ledgers(self) -> tuple[int, ...]:
        """All that it names."""
        return self.dropping if self.ledger_id is None else (*self.dropping, self.ledger_id)
