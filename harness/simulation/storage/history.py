"""Pure: what was asked of a storage and what it answered, and whether the two fit together.

Owns: `LedgerHistory` and `MetadataHistory`, told of every call, answer and read of a simulation;
each checks the promises of its contract (`ledger.api`, `metadata.api`) and adds what it finds
broken to `Findings`. The submissions of both are numbered in one order, that of the journal, and
`check_prefix` compares what a crash left with that order.

What an operation came to:

    PENDING   asked, not answered: after a crash it may or may not have happened
    DONE      acknowledged, or seen by a reader: it has happened and is never undone
    FAILED    refused with an answer that says "not applied", or found missing after a crash
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from magnetar.ledger.api import NO_ENTRY, Entry, LedgerInfo, LedgerState
from magnetar.metadata.api import ABSENT, Record, Stat

_VIOLATIONS_KEPT: Final = 20


class Findings:
    """Broken promises, a count of operations, and a digest of everything that happened."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.operations = 0
        self.submissions = 0
        self.lines: list[str] | None = None
        """Every line noted, if someone wants them."""
        self._digest = hashlib.sha256()

    def note(self, line: str) -> None:
        self._digest.update(line.encode() + b"\n")
        if self.lines is not None:
            self.lines.append(line)

    def broken(self, text: str) -> None:
        self.note(f"VIOLATION {text}")
        if len(self.violations) < _VIOLATIONS_KEPT:
            self.violations.append(text)

    def submit(self) -> int:
        """The number of the next submission, in the order of the journal."""
        self.operations += 1
        self.submissions += 1
        return self.submissions

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()[:16]


class Outcome(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


# --- ledgers ---


@dataclass(slots=True)
class Append:
    """An entry that was submitted; its place in the list is its entry id."""

    order: int
    payload: bytes
    outcome: Outcome = Outcome.PENDING


@dataclass(slots=True)
class LedgerStory:
    """What is known of one ledger."""

    ledger_id: int
    appends: list[Append] = field(default_factory=list)
    durable: int = NO_ENTRY
    """The highest entry that was acknowledged or read."""
    state: LedgerState = LedgerState.OPEN
    """At least this far; an unanswered fence or close may have gone further."""
    final: int | None = None
    """The last entry, once a fence or close was answered."""
    delete_asked: bool = False
    gone: bool = False


class LedgerHistory:
    """All ledgers of a run, deleted ones included."""

    def __init__(self, findings: Findings) -> None:
        self.stories: dict[int, LedgerStory] = {}
        self._findings = findings
        self._unanswered = 0
        """Calls of create."""

    def create_asked(self) -> None:
        self._findings.operations += 1
        self._unanswered += 1

    def create_refused(self) -> None:
        self._unanswered -= 1

    def created(self, ledger_id: int) -> None:
        """Create was answered, or a ledger was found whose creator never was."""
        if self.stories and ledger_id <= max(self.stories):
            self._findings.broken(f"ledger id {ledger_id} is not above {max(self.stories)}")
        if self._unanswered <= 0:
            self._findings.broken(f"ledger {ledger_id} exists, and nobody created it")
        self._unanswered -= 1
        self.stories[ledger_id] = LedgerStory(ledger_id)

    def submitted(self, ledger_id: int, payload: bytes) -> int:
        """The entry id that this append must get."""
        appends = self.stories[ledger_id].appends
        appends.append(Append(self._findings.submit(), payload))
        return len(appends) - 1

    def acknowledged(self, ledger_id: int, entry_id: int, answered: int) -> None:
        story = self.stories[ledger_id]
        if answered != entry_id:
            self._findings.broken(f"entry {ledger_id}:{entry_id} was acknowledged as {answered}")
        if story.final is not None and entry_id > story.final:
            self._findings.broken(f"{ledger_id}:{entry_id} acknowledged behind {story.final}")
        story.appends[entry_id].outcome = Outcome.DONE
        story.durable = max(story.durable, entry_id)

    def refused(self, ledger_id: int, entry_id: int) -> None:
        """The answer was that this entry was not stored, now or ever."""
        story = self.stories[ledger_id]
        if story.appends[entry_id].outcome is Outcome.DONE:
            self._findings.broken(f"{ledger_id}:{entry_id} was read, then refused")
        story.appends[entry_id].outcome = Outcome.FAILED

    def ended(self, info: LedgerInfo, asked: LedgerState) -> None:
        """A fence or close was answered."""
        story = self.stories[info.ledger_id]
        if info.state not in (asked, LedgerState.CLOSED):
            self._findings.broken(f"ledger {info.ledger_id} is {info.state} after {asked}")
        story.state = info.state
        self._check_end(story, info)
        story.final = info.last_entry

    def read(self, ledger_id: int, first: int, entries: Sequence[Entry]) -> None:
        """Entries that a reader got, asked for from `first` on."""
        story = self.stories[ledger_id]
        for expected, entry in enumerate(entries, first):
            where = f"{ledger_id}:{expected}"
            if entry.position != (ledger_id, expected):
                self._findings.broken(f"{where} was asked for, {entry.position} came")
                return
            if expected >= len(story.appends):
                self._findings.broken(f"{where} was never submitted")
                return
            append = story.appends[expected]
            if append.payload != entry.payload:
                self._findings.broken(f"{where} has other bytes than were submitted")
            if append.outcome is Outcome.FAILED:
                self._findings.broken(f"{where} is readable, though it was refused")
            if story.final is not None and expected > story.final:
                self._findings.broken(f"{where} stands behind the final entry {story.final}")
            append.outcome = Outcome.DONE
            story.durable = max(story.durable, expected)

    def found(self, info: LedgerInfo, entries: Sequence[Entry]) -> None:
        """The whole ledger, with nobody writing to it: compare all."""
        story = self.stories[info.ledger_id]
        if story.gone:
            self._findings.broken(f"ledger {info.ledger_id} was deleted and is back")
            return
        self._check_end(story, info)
        if len(entries) != info.last_entry + 1:
            self._findings.broken(
                f"ledger {info.ledger_id} ends with {info.last_entry}, {len(entries)} entries read"
            )
        self.read(info.ledger_id, 0, entries)
        if info.state is not LedgerState.OPEN:
            story.state = info.state
            story.final = info.last_entry
        size = sum(len(entry.payload) for entry in entries)
        if size != info.size_bytes:
            self._findings.broken(
                f"ledger {info.ledger_id} has {size} bytes, {info.size_bytes} said"
            )

    def crashed(self) -> None:
        """After a restart, with every ledger read: what is unanswered now has not happened."""
        self._unanswered = 0
        for story in self.stories.values():
            story.delete_asked = False
            for append in story.appends:
                if append.outcome is Outcome.PENDING:
                    append.outcome = Outcome.FAILED

    def missing(self, ledger_id: int) -> None:
        """A reader was told that there is no such ledger."""
        story = self.stories[ledger_id]
        if not story.delete_asked and not story.gone:
            self._findings.broken(f"ledger {ledger_id} is missing, and nobody deleted it")
        story.gone = True

    def deleted(self, ledger_id: int) -> None:
        self.stories[ledger_id].gone = True

    def listed(self, ledger_ids: Sequence[int]) -> None:
        """The list of all ledgers, with nobody creating or deleting."""
        if list(ledger_ids) != sorted(set(ledger_ids)):
            self._findings.broken(f"the list of ledgers is out of order: {ledger_ids}")
        for ledger_id in ledger_ids:
            if ledger_id not in self.stories:
                self.created(ledger_id)  # its creator was never answered
        for story in self.stories.values():
            present = story.ledger_id in ledger_ids
            if present and story.gone:
                self._findings.broken(f"ledger {story.ledger_id} was deleted and is listed")
            if not present and not story.gone and not story.delete_asked:
                self._findings.broken(f"ledger {story.ledger_id} is not listed")

    def _check_end(self, story: LedgerStory, info: LedgerInfo) -> None:
        name = f"ledger {info.ledger_id}"
        if info.last_entry < story.durable:
            self._findings.broken(f"{name} lost entries: {info.last_entry} < {story.durable}")
        if info.last_entry >= len(story.appends):
            self._findings.broken(f"{name} has {info.last_entry}, more than was submitted")
        if story.final is not None and info.last_entry != story.final:
            self._findings.broken(f"{name} ends with {info.last_entry}, not {story.final}")
        order = list(LedgerState)
        if order.index(info.state) < order.index(story.state):
            self._findings.broken(f"{name} is {info.state.value} again, it was {story.state.value}")


# --- metadata ---


@dataclass(slots=True)
class Change:
    """A put (or, without a value, a delete) of one key."""

    order: int
    value: bytes | None
    sure: bool
    """It was taken whatever it met: no compare-and-set, no delete of what may be absent."""
    outcome: Outcome = Outcome.PENDING
    version: int | None = None


@dataclass(slots=True)
class KeyStory:
    """The changes of one key in the order in which they were submitted."""

    changes: list[Change] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    floors: list[int] = field(default_factory=list)
    """Which change is known to have happened, and since which moment (`stamps`)."""

    def floor(self, stamp: int) -> int:
        """The last change that had certainly happened at a moment; -1: none."""
        place = bisect_right(self.stamps, stamp)
        return self.floors[place - 1] if place else -1


class MetadataHistory:
    """All keys of a run. Every value is put at most once, so that it tells its change."""

    def __init__(self, findings: Findings) -> None:
        self.stories: dict[str, KeyStory] = {}
        self._findings = findings
        self._appends: dict[bytes, Change] = {}
        self._versions: dict[int, tuple[str, bytes]] = {}
        self._stamp = 0

    @property
    def stamp(self) -> int:
        """The present moment, to be given with what was read from a snapshot taken now."""
        return self._stamp

    def submitted(self, key: str, value: bytes | None, *, sure: bool) -> Change:
        change = Change(self._findings.submit(), value, sure)
        self.stories.setdefault(key, KeyStory()).changes.append(change)
        return change

    def append_submitted(self, value: bytes) -> Change:
        """An append: its key is known once it is answered or read."""
        change = self._appends[value] = Change(self._findings.submit(), value, sure=True)
        return change

    def acknowledged(self, key: str, change: Change, stat: Stat | None) -> None:
        """A put (with its stat) or a delete was answered."""
        story = self._story_of(key, change)
        if change.outcome is Outcome.FAILED:
            self._findings.broken(f"{key}: a change was lost, then acknowledged")
        if stat is not None:
            self._check_version(key, change, stat.version)
        self._happened(story, story.changes.index(change))

    def failed(self, key: str, change: Change) -> None:
        """The answer was that the change was not applied."""
        if change.outcome is Outcome.DONE:
            self._findings.broken(f"{key}: a change was seen, then refused")
        change.outcome = Outcome.FAILED

    def won(self, key: str, change: Change, expected: int) -> None:
        """A compare-and-set was answered with success: what it met had that version."""
        before = self._before(key, change)
        actual = ABSENT if before is None or before.value is None else before.version
        if actual is not None and actual != expected:
            self._findings.broken(f"{key}: a CAS on {expected} won, but {actual} was there")

    def absent(self, key: str, change: Change) -> None:
        """A delete was answered: there was nothing."""
        before = self._before(key, change)
        if before is not None and before.value is not None:
            self._findings.broken(f"{key}: nothing to delete, though a record was there")
        self.failed(key, change)

    def read(self, key: str, record: Record | None, stamp: int) -> None:
        """A record as read from a snapshot taken at or after `stamp`."""
        if record is None:
            self._read_absent(key, stamp)
            return
        change = self._appends.get(record.value)
        if change is not None:
            self._story_of(key, change)
        story = self.stories.get(key, KeyStory())
        place = next((i for i, each in enumerate(story.changes) if each.value == record.value), -1)
        if place < 0:
            self._findings.broken(f"{key} holds a value that was never put there")
            return
        found = story.changes[place]
        if found.outcome is Outcome.FAILED:
            self._findings.broken(f"{key} holds a value whose put was refused or lost")
        if place < story.floor(stamp):
            self._findings.broken(f"{key} holds change {place}, {story.floor(stamp)} was done")
        self._check_version(key, found, record.version)
        self._happened(story, place)

    def scanned(self, parent: str, records: Iterable[Record], stamp: int) -> None:
        """One whole directory."""
        found = {record.key: record for record in records}
        for key in found.keys() | self._keys_of(parent):
            self.read(key, found.get(key), stamp)

    def index_scanned(
        self, records: Sequence[Record], matching: Iterable[Record], index: str
    ) -> None:
        """An index against the records that should be in it, with nobody writing."""
        found = [record.key for record in records]
        wanted = {record.key for record in matching}
        if set(found) != wanted or len(found) != len(wanted):
            extra, lacking = sorted({*found} - wanted), sorted(wanted - {*found})
            self._findings.broken(f"index {index} has {extra} too many and lacks {lacking}")

    def watched(self, seen: dict[str, int], records: Iterable[Record], where: str) -> None:
        """What watch and scan led to against the truth, with nobody writing."""
        truth = {record.key: record.version for record in records}
        if seen != truth:
            wrong = sorted(key for key in seen.keys() | truth if seen.get(key) != truth.get(key))
            self._findings.broken(f"a watch of {where} ended with a wrong view of {wrong}")

    def crashed(self) -> None:
        """After a restart, with every key read: what is unanswered now has not happened."""
        for story in self.stories.values():
            floor = story.floor(self._stamp)
            for place, change in enumerate(story.changes):
                if change.outcome is Outcome.PENDING and place > floor:
                    change.outcome = Outcome.FAILED
        for change in self._appends.values():
            if change.outcome is Outcome.PENDING:
                change.outcome = Outcome.FAILED

    def live_keys(self, parent: str) -> list[str]:
        """Keys of a directory that hold a record for certain, sorted."""
        found = []
        for key in sorted(self._keys_of(parent)):
            story = self.stories[key]
            floor = story.floor(self._stamp)
            if floor >= 0 and story.changes[floor].value is not None:
                found.append(key)
        return found

    def _read_absent(self, key: str, stamp: int) -> None:
        story = self.stories.get(key)
        if story is None:
            return
        floor = story.floor(stamp)
        if floor < 0 or story.changes[floor].value is None:
            return
        for place in range(floor + 1, len(story.changes)):
            change = story.changes[place]
            if change.value is None and change.outcome is not Outcome.FAILED:
                self._happened(story, place)
                return
        self._findings.broken(f"{key} is gone, though nothing deleted it")

    def _happened(self, story: KeyStory, place: int) -> None:
        story.changes[place].outcome = Outcome.DONE
        if place > story.floor(self._stamp):
            self._stamp += 1
            story.stamps.append(self._stamp)
            story.floors.append(place)

    def _story_of(self, key: str, change: Change) -> KeyStory:
        """The story of a key; the change of an append joins it now."""
        story = self.stories.setdefault(key, KeyStory())
        if change.value is not None and self._appends.pop(change.value, None) is not None:
            last = story.changes[story.floor(self._stamp)] if story.stamps else None
            if last is not None and last.value is not None:
                self._findings.broken(f"{key} was given to an append, but it is taken")
            story.changes.append(change)
        return story

    def _before(self, key: str, change: Change) -> Change | None:
        """The change that this one met: the last before it that was not refused."""
        changes = self.stories[key].changes
        place = changes.index(change)
        earlier = [each for each in changes[:place] if each.outcome is not Outcome.FAILED]
        return earlier[-1] if earlier else None

    def _check_version(self, key: str, change: Change, version: int) -> None:
        assert change.value is not None
        if change.version not in (None, version):
            self._findings.broken(f"{key}: version {change.version} became {version}")
        change.version = version
        owner = self._versions.setdefault(version, (key, change.value))
        if owner != (key, change.value):
            self._findings.broken(f"version {version} is that of {owner[0]} and of {key}")

    def _keys_of(self, parent: str) -> set[str]:
        return {key for key in self.stories if key.rpartition("/")[0] == parent}


# --- both ---


def check_prefix(
    findings: Findings, ledgers: LedgerHistory, metadata: MetadataHistory, since: int
) -> None:
    """After a crash: what survived of the submissions after `since` is a prefix of them."""
    survived = since
    for ledger in ledgers.stories.values():
        done = [each.order for each in ledger.appends if each.outcome is Outcome.DONE]
        survived = max([survived, *done[-1:]])
    for story in metadata.stories.values():
        floor = story.floor(metadata.stamp)
        # A delete may have found nothing, and is then no record of the journal.
        if floor >= 0 and story.changes[floor].value is not None:
            survived = max(survived, story.changes[floor].order)
    for ledger in ledgers.stories.values():
        for entry_id, append in enumerate(ledger.appends):
            lost = append.outcome is Outcome.PENDING and since < append.order < survived
            if lost and not ledger.gone:
                findings.broken(f"{ledger.ledger_id}:{entry_id} is lost, but later changes are not")
    for key, story in metadata.stories.items():
        floor = story.floor(metadata.stamp)
        later = story.changes[floor + 1 :]
        if floor < 0 or story.changes[floor].value is None:
            # A record that is not there may have been put, and deleted again.
            deletes = [place for place, each in enumerate(later) if each.value is None]
            later = later[deletes[-1] + 1 :] if deletes else later
        for change in later:
            lost = change.outcome is Outcome.PENDING and since < change.order < survived
            if lost and change.sure:
                findings.broken(f"a put of {key} is lost, but later changes are not")
