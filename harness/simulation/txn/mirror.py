"""What is durable of transactions, change by change, as the stores themselves say it.

Owns: `Mirror`, told of every durable change of a metadata store and of every durable entry, in
order. It knows when each transaction was decided, which pins, intents and aborted records there
were when, and what stands in each log. The checks that are about durable changes are made here:
invariants 2, 4, 6, 7, 8 and 10, 12 at the end, and of 9 what a store can see.

Invariants:
1. Nothing is asked of the product: only its records are read. What a group decided is computed here
   from its record, at the moment at which that became durable.
2. A decision that was seen once is kept: later ones are compared with it.
3. "Place" is the name of a managed ledger; a topic that is deleted and made again keeps it.

Relies on: changes being told in the order in which they became durable (`txn_stores`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import unquote

import msgspec

from harness.simulation.txn.cursors import DurableCursor
from harness.simulation.txn.truth import AbortedStory, PinStory, Place, Stored, Truth, place_of
from magnetar.managed_ledger.names import CURSORS, MANAGED_LEDGERS
from magnetar.managed_ledger.records import (
    ManagedLedgerRecord,
    decode_cursor,
    decode_managed_ledger,
)
from magnetar.model.ids import Position
from magnetar.txn.ids import to_text
from magnetar.txn.records import (
    ABORTED_RECORDS,
    GROUPS,
    HEADERS,
    OPS,
    Aborted,
    AckOp,
    Group,
    Header,
    Pin,
    State,
)
from magnetar.txn.spec import names
from magnetar.wire.messages import TxnId, layout_of, metadata_of

LATE_SECONDS: Final = 60.0
"""By then every owner that still serves knows of a decision, whatever happens to the stores."""

_KINDS: Final = frozenset({HEADERS, OPS, ABORTED_RECORDS, GROUPS, MANAGED_LEDGERS, CURSORS})

_TOPICS: Final = "public/default/"
"""Where the messages of clients are; other logs are the product's own."""

Broken = Callable[[str, str], None]
"""Called with the name of an invariant, and what happened."""


class Mirror:
    """All that is durable in one world."""

    def __init__(self, broken: Broken, now: Callable[[], float]) -> None:
        self.truths: dict[str, Truth] = {}
        self.places: defaultdict[str, Place] = defaultdict(Place)
        self.dropped: dict[int, float] = {}
        """Ledgers that are no part of any log any more, and since when."""
        self.keys: dict[str, bytes] = {}
        """All records that it was told of and that are there now."""
        self._broken = broken
        self._now = now
        self._since: dict[str, float] = {}
        """Of op records: when they were written first."""
        self._ledgers: dict[int, str] = {}
        self._of: defaultdict[tuple[str, str], list[Position]] = defaultdict(list)
        """By transaction and place: where its entries stand."""
        self._live: dict[tuple[str, str], PinStory] = {}
        self._pinned: dict[tuple[str, str], Position] = {}
        """The lowest bound that was ever durable."""
        self._aborted: defaultdict[tuple[str, str], list[AbortedStory]] = defaultdict(list)
        self._groups: dict[str, Group] = {}
        self._homeless: list[tuple[Position, bytes]] = []

    # --- what is told

    def put(self, key: str, value: bytes) -> None:
        """A record was written."""
        kind = _kind_of(key)
        if kind not in _KINDS:
            return
        self.keys[key] = value
        if kind == HEADERS:
            self._header(msgspec.json.decode(value, type=Header))
        elif kind == OPS:
            self._since.setdefault(key, self._now())
            if _is_pin(key):
                self._pin(msgspec.json.decode(value, type=Pin))
        elif kind == ABORTED_RECORDS:
            self._hidden(msgspec.json.decode(value, type=Aborted))
        elif kind == GROUPS:
            self._group(msgspec.json.decode(value, type=Group))
        elif kind == MANAGED_LEDGERS:
            self._managed_ledger(decode_managed_ledger(key, _name_in(key), value))
        elif kind == CURSORS:
            record = decode_cursor(key, _name_in(key), value)
            self.places[record.managed_ledger].cursors[key] = record

    def removed(self, key: str) -> None:
        """A record was deleted."""
        kind = _kind_of(key)
        if kind not in _KINDS:
            return
        value = self.keys.pop(key)
        if kind == HEADERS:
            self._forgotten(msgspec.json.decode(value, type=Header))
        elif kind == OPS:
            self._since.pop(key)
            if _is_pin(key):
                self._unpinned(msgspec.json.decode(value, type=Pin))
            else:
                self._ack_deleted(msgspec.json.decode(value, type=AckOp))
        elif kind == ABORTED_RECORDS:
            self._shown(msgspec.json.decode(value, type=Aborted))
        elif kind == MANAGED_LEDGERS:
            place = self.places[_name_in(key)]
            if place.record is not None:
                self._drop({each.ledger_id for each in place.record.ledgers})
            place.record = None
        elif kind == CURSORS:
            self.places[_name_in(key)].cursors.pop(key, None)

    def stored(self, position: Position, payload: bytes) -> None:
        """An entry became durable."""
        name = self._ledgers.get(position.ledger_id)
        if name is None:
            self._homeless.append((position, payload))
            return
        place = self.places[name]
        if position in place.entries or not name.startswith(_TOPICS):
            return
        metadata = metadata_of(payload)
        txn = None
        if metadata.HasField("txnid_least_bits"):
            txn = to_text(TxnId(metadata.txnid_most_bits, metadata.txnid_least_bits))
        text = payload[layout_of(payload).payload :].decode()
        place.entries[position] = Stored(txn, tuple(map(int, text.split())))
        if txn is not None:
            self._of[txn, name].append(position)
            self._check_entry(txn, name, position)

    # --- questions

    def truth(self, txn: str) -> Truth:
        return self.truths.setdefault(txn, Truth(txn))

    def undecided_below(self, place: str, position: Position, moment: float) -> PinStory | None:
        """A pin whose transaction has an entry at or below a position, undecided at a moment."""
        for pin in self.places[place].pins:
            if pin.bound > position or pin.since >= moment:
                continue
            was_there = pin.until is None or pin.until >= moment
            decided = self.truth(pin.txn).decided_at
            is_undecided = decided is None or decided > moment
            has_entries = any(each <= position for each in self._of[pin.txn, place])
            if was_there and is_undecided and has_entries and not pin.is_late:
                return pin
        return None

    def unmarked_below(self, place: str, position: Position, moment: float) -> str | None:
        """An aborted transaction with entries at or below a position, not known as such then."""
        for pin in self.places[place].pins:
            truth = self.truth(pin.txn)
            if pin.since >= moment or pin.bound > position or not truth.was("ABORTED", moment):
                continue
            for entry in self._of[pin.txn, place]:
                is_kept = entry.ledger_id not in self.dropped
                if (
                    entry <= position
                    and is_kept
                    and not self._covered(pin.txn, place, entry, moment)
                ):
                    return pin.txn
        return None

    def is_dropped(self, position: Position) -> bool:
        return position.ledger_id in self.dropped

    def visible(self, place: str) -> Iterator[tuple[Position, Stored]]:
        """All entries that consumers are to see, in order; those that are trimmed included."""
        for position, stored in sorted(self.places[place].entries.items()):
            if stored.txn is None or self.truth(stored.txn).decision == "COMMITTED":
                yield position, stored

    @property
    def ops(self) -> list[str]:
        return [key for key in self.keys if key.startswith(OPS)]

    @property
    def undecided(self) -> list[str]:
        return [each.txn for each in self.truths.values() if each.is_open and each.header]

    def left(self) -> list[str]:
        """What is still known of transactions."""
        kinds = tuple(f"{each}/" for each in (HEADERS, OPS, ABORTED_RECORDS))
        return [key for key in self.keys if key.startswith(kinds)]

    def check_empty(self) -> None:
        """Invariant 12, once everything is over, trimmed and forgotten."""
        left = self.left()
        if left:
            self._broken(names.NO_LEAK, f"{len(left)} keys are left: {left[:5]}")

    # --- decisions

    def _decide(self, txn: str, state: State, how: str) -> None:
        truth = self.truth(txn)
        if truth.decision is None:
            truth.decision, truth.decided_at = state, self._now()
        elif truth.decision != state:
            text = f"{txn} was {truth.decision} at {truth.decided_at:.3f}, and by {how} is {state}"
            self._broken(names.ONE_DECISION, text)

    def _header(self, header: Header) -> None:
        truth = self.truth(header.txn)
        truth.header = header
        if header.state != "OPEN":
            self._decide(header.txn, header.state, "its header")
        elif header.group is not None:
            self._by_group(truth, self._groups.get(header.group.application))

    def _group(self, group: Group) -> None:
        self._groups[group.application] = group
        for txn in group.decided:
            self._decide(txn, "COMMITTED", f"group {group.application}")
        for truth in list(self.truths.values()):
            header = truth.header
            if header is None or header.state != "OPEN" or header.group is None:
                continue
            if header.group.application == group.application:
                self._by_group(truth, group)

    def _by_group(self, truth: Truth, group: Group | None) -> None:
        """What a group says of a member whose header says nothing."""
        assert truth.header is not None
        member = truth.header.group
        if member is None or group is None or truth.txn in group.decided:
            return
        is_over = member.epoch != group.epoch or member.sequence <= group.sequence
        if is_over or truth.txn in group.aborted:
            self._decide(truth.txn, "ABORTED", f"group {group.application} at {group.sequence}")

    def _forgotten(self, header: Header) -> None:
        truth = self.truth(header.txn)
        truth.header = None
        if truth.decided_at is None:
            self._broken(names.GC_NEVER_FORCES, f"the header of {header.txn}, open, is deleted")
            return
        prefix = f"{OPS}/{header.txn}-"
        left = [
            key
            for key, since in self._since.items()
            if key.startswith(prefix) and since < truth.decided_at
        ]
        if left:
            text = f"the header of {header.txn} is deleted, and there are {left[:3]}"
            self._broken(names.GC_NEVER_FORCES, text)

    # --- pins and entries

    def _pin(self, pin: Pin) -> None:
        name, now = place_of(pin.segment), self._now()
        place = self.places[name]
        # Of a former owner: nothing can be appended under it, and the present one may miss it.
        is_late = place.record is not None and pin.epoch < place.record.epoch
        known = self._pinned.get((pin.txn, name))
        self._pinned[pin.txn, name] = pin.bound if known is None else min(known, pin.bound)
        live = self._live.get((pin.txn, name))
        if live is not None and (not live.is_late or is_late):
            live.bound = min(live.bound, pin.bound)
            return
        if live is not None:
            live.until = now
        story = self._live[pin.txn, name] = PinStory(pin.txn, pin.bound, now, is_late=is_late)
        place.pins.append(story)

    def _check_entry(self, txn: str, name: str, position: Position) -> None:
        bound = self._pinned.get((txn, name))
        if bound is None or bound > position:
            text = f"{txn} has an entry at {position} of {name}, and its pin is {bound}"
            self._broken(names.PIN_BEFORE_ENTRY, text)
        truth = self.truth(txn)
        if truth.decided_at is None or (txn, name) in self._live:
            return
        if truth.decision == "ABORTED" and not self._covered(txn, name, position):
            text = f"{txn} is aborted, and its entry {position} of {name} is not known as such"
            self._broken(names.ABORTED_STAYS_KNOWN, text)
        if self._now() - truth.decided_at > LATE_SECONDS:
            text = f"{txn} is {truth.decision} since {truth.decided_at:.3f}; {position} is stored"
            self._broken(names.FENCE, text)

    def _unpinned(self, pin: Pin) -> None:
        name = place_of(pin.segment)
        self._live.pop((pin.txn, name)).until = self._now()
        kept = [each for each in self._of[pin.txn, name] if each.ledger_id not in self.dropped]
        truth, place = self.truth(pin.txn), self.places[name]
        if not kept or place.is_deleted:
            return
        if truth.is_open:
            text = f"the pin of {pin.txn}, open, on {name} is deleted; it has {kept[:3]}"
            self._broken(names.GC_NEVER_FORCES, text)
        elif truth.decision == "ABORTED":
            bare = [each for each in kept if not self._covered(pin.txn, name, each)]
            if bare:
                text = f"the pin of {pin.txn} on {name} is gone; {bare[:3]} are not marked aborted"
                self._broken(names.ABORTED_STAYS_KNOWN, text)

    # --- aborted records

    def _hidden(self, aborted: Aborted) -> None:
        stories = self._aborted[aborted.txn, place_of(aborted.segment)]
        if stories and stories[-1].until is None:
            if stories[-1].last > aborted.last:
                text = f"{aborted.txn} is aborted up to {stories[-1].last}, then {aborted.last}"
                self._broken(names.ABORTED_STAYS_KNOWN, text)
            stories[-1].until = self._now()
        stories.append(AbortedStory(aborted.last, self._now()))

    def _shown(self, aborted: Aborted) -> None:
        name = place_of(aborted.segment)
        self._aborted[aborted.txn, name][-1].until = self._now()
        kept = [each for each in self._of[aborted.txn, name] if each.ledger_id not in self.dropped]
        if kept and not self.places[name].is_deleted:
            text = f"{aborted.txn} is no longer known as aborted on {name}; it has {kept[:3]}"
            self._broken(names.ABORTED_STAYS_KNOWN, text)

    def _covered(
        self, txn: str, name: str, position: Position, moment: float | None = None
    ) -> bool:
        """Whether a record tells that an entry is aborted, now or at a moment."""
        stories = self._aborted.get((txn, name), ())
        if moment is None:
            stories = [each for each in stories if each.until is None]
        return any(
            position <= each.last
            and (moment is None or each.since <= moment)
            and (moment is None or each.until is None or each.until >= moment)
            for each in stories
        )

    # --- logs and cursors

    def _managed_ledger(self, record: ManagedLedgerRecord) -> None:
        place = self.places[record.name]
        before, place.record = place.record, record
        present = {each.ledger_id for each in record.ledgers}
        for ledger_id in present:
            self._ledgers[ledger_id] = record.name
        gone = set() if before is None else {each.ledger_id for each in before.ledgers} - present
        if not record.deleted:
            self._check_trim(record.name, place, gone)
        self._drop(present if record.deleted else gone)
        waiting, self._homeless = self._homeless, []
        for position, payload in waiting:
            self.stored(position, payload)

    def _check_trim(self, name: str, place: Place, gone: set[int]) -> None:
        for (txn, pinned), pin in self._live.items():
            if pinned != name or not self.truth(txn).is_open:
                continue
            lost = [each for each in place.entries if each.ledger_id in gone and each >= pin.bound]
            if lost:
                text = f"{name}: {lost[:3]} are trimmed; {txn} is open with the bound {pin.bound}"
                self._broken(names.SEALING_IRRELEVANT, text)

    def _drop(self, ledgers: set[int]) -> None:
        for ledger_id in ledgers:
            self.dropped.setdefault(ledger_id, self._now())

    def _ack_deleted(self, ack: AckOp) -> None:
        name = place_of(ack.segment)
        place = self.places[name]
        found = [each for each in place.cursors.values() if each.name == ack.subscription]
        if place.is_deleted or not found or self.truth(ack.txn).decision != "COMMITTED":
            return
        record = found[0]
        if record.deleted or record.incarnation != ack.incarnation:
            return
        cursor = DurableCursor(record)
        for position in cursor.missing(ack, place.entries):
            if position.ledger_id not in self.dropped:
                text = (
                    f"{ack.txn} is committed and has acknowledged {position} on "
                    f"{ack.subscription} of {name}: the intent is deleted, the cursor is {cursor}"
                )
                self._broken(names.INTENTS_OUTLIVE_CURSOR, text)
                return


def _kind_of(key: str) -> str:
    """The directory that says what a record is."""
    depth = 2 if key.startswith("/txn/") else 1
    return "/".join(key.split("/")[: depth + 1])


def _is_pin(key: str) -> bool:
    return key[len(OPS) + 1 :].split("-", 2)[1] == "w"


def _name_in(key: str) -> str:
    """The name of the managed ledger in a key; those of a simulation are short."""
    return unquote(key.split("/")[2])
