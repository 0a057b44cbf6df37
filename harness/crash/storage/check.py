"""What a store holds after a crash, against what it acknowledged before it.

Owns: reading a whole store back (`read_store`, by its own interface and then by its SQLite file)
and the comparison with a `History` (`compare`), which sorts what is wrong by kind and lets the
history go on from what was found.

Invariants:
1. What is acknowledged must be there, byte for byte, at its place; what is there must have been
   submitted; an acknowledged end or deletion holds for ever.
2. What a reader saw after one crash is certain from then on: no later crash may take it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.crash.storage.history import (
    EPHEMERAL_FOLDER,
    INDEX_NAMES,
    SEQUENCE_FOLDER,
    History,
    KeyHistory,
    Kind,
    LedgerHistory,
    entry_payload,
    record_indexes,
    record_value,
    token_of,
)
from magnetar.cli.stored_metadata import database_path, look_at_metadata
from magnetar.ledger.api import LedgerState
from magnetar.metadata.api import Index
from magnetar.runtime.disk import LocalDisk
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import Storage, open_storage

_ALL_ROWS = "SELECT parent || '/' || name, value, version, session, indexes FROM records"
_decode_indexes = msgspec.json.Decoder(tuple[Index, ...]).decode


class Fault(Enum):
    """What can be wrong with a store after a crash."""

    LOST = "lost"
    UNEXPLAINED = "unexplained"
    INDEX = "index"
    REUSED = "reused"


class Violation(NamedTuple):
    fault: Fault
    text: str


@dataclass(frozen=True, slots=True)
class FoundLedger:
    state: LedgerState
    payloads: list[bytes]


@dataclass(frozen=True, slots=True)
class FoundRecord:
    value: bytes
    version: int


@dataclass(slots=True)
class Found:
    """Everything in a store."""

    ledgers: dict[int, FoundLedger] = field(default_factory=dict)
    records: dict[str, FoundRecord] = field(default_factory=dict)
    indexed: dict[str, list[str]] = field(default_factory=dict)
    """Keys by index, in the order of a scan of it."""
    violations: list[Violation] = field(default_factory=list)
    """What is wrong whatever was acknowledged."""
    recovered: int = 0
    """Records that the opening replayed."""


@dataclass(slots=True)
class Verdict:
    """The result of one comparison."""

    checked: int = 0
    """Acknowledged entries and records that were looked for."""
    violations: list[Violation] = field(default_factory=list)

    def add(self, fault: Fault, text: str) -> None:
        self.violations.append(Violation(fault, text))


async def check_store(folder: Path, history: History, limits: Limits) -> Verdict:
    """Open a store as after a crash, compare, close it, and look at its SQLite file."""
    try:
        found = await read_store(folder, history, limits)
    except Exception as error:  # noqa: BLE001  whatever a broken store raises, it is a finding
        text = f"the store cannot be read: {type(error).__name__}: {error}"
        return Verdict(violations=[Violation(Fault.LOST, text)])
    verdict = compare(history, found)
    _settle(history, found)
    return verdict


# --- reading


async def read_store(folder: Path, history: History, limits: Limits) -> Found:
    storage = await open_storage(folder, limits=limits)
    try:
        found = Found(recovered=storage.recovered_records)
        await _read_ledgers(storage, found)
        await _read_records(storage, found, history)
    finally:
        await storage.close()
    _read_database(folder, found)
    return found


async def _read_ledgers(storage: Storage, found: Found) -> None:
    async for ledger_id in storage.ledgers.list():
        info = await storage.ledgers.info(ledger_id)
        payloads: list[bytes] = []
        while len(payloads) <= info.last_entry:
            entries = await storage.ledgers.read(ledger_id, len(payloads), info.last_entry)
            expected = range(len(payloads), len(payloads) + len(entries))
            if not entries or [each.position.entry_id for each in entries] != [*expected]:
                text = f"ledger {ledger_id} has a gap behind entry {len(payloads) - 1}"
                found.violations.append(Violation(Fault.LOST, text))
                break
            payloads.extend(each.payload for each in entries)
        if info.size_bytes != sum(map(len, payloads)):
            text = f"ledger {ledger_id} has {sum(map(len, payloads))} bytes, says {info.size_bytes}"
            found.violations.append(Violation(Fault.LOST, text))
        found.ledgers[ledger_id] = FoundLedger(info.state, payloads)


async def _read_records(storage: Storage, found: Found, history: History) -> None:
    parents = {key.rpartition("/")[0] for key in history.keys}
    async with storage.connect() as store:
        for parent in sorted(parents | {EPHEMERAL_FOLDER, SEQUENCE_FOLDER}):
            async for record in store.scan(parent):
                found.records[record.key] = FoundRecord(record.value, record.version)
        for index in INDEX_NAMES:
            found.indexed[index] = [record.key async for record in store.scan_index(index)]


def _read_database(folder: Path, found: Found) -> None:
    """The closed store's file must say the same as its interface said."""
    disk = LocalDisk()
    for text in look_at_metadata(folder, disk).mismatches:
        found.violations.append(Violation(Fault.INDEX, text))
    with closing(disk.database(database_path(folder), read_only=True)) as database:
        rows = database.execute(_ALL_ROWS)
    stored = {key: FoundRecord(value, version) for key, value, version, _, _ in rows}
    for key in sorted(stored.keys() ^ found.records.keys()):
        where = "only in SQLite" if key in stored else "not in SQLite"
        found.violations.append(Violation(Fault.UNEXPLAINED, f"record {key} is {where}"))
    for key, value, _, session, indexes in rows:
        token = token_of(value)
        entries = () if indexes is None else _decode_indexes(indexes)
        if not session and (token is None or entries != record_indexes(token)):
            text = f"record {key} of operation {token} has the index entries {entries}"
            found.violations.append(Violation(Fault.INDEX, text))


# --- comparing


def compare(history: History, found: Found) -> Verdict:
    verdict = Verdict(violations=list(found.violations))
    for text in history.reused:
        verdict.add(Fault.REUSED, text)
    for text in history.unexplained:
        verdict.add(Fault.UNEXPLAINED, text)
    for ledger_id, ledger in history.ledgers.items():
        _compare_ledger(history.seed, ledger_id, ledger, found.ledgers.get(ledger_id), verdict)
    _compare_unknown_ledgers(history, found, verdict)
    for key, known in history.keys.items():
        _compare_key(history, key, known, found.records.get(key), verdict)
    _compare_unknown_keys(history, found, verdict)
    _compare_indexes(found, verdict)
    return verdict


def _compare_ledger(
    seed: int, ledger_id: int, ledger: LedgerHistory, found: FoundLedger | None, verdict: Verdict
) -> None:
    if found is None:
        if not ledger.drop_submitted:
            text = f"ledger {ledger_id} is gone, with {ledger.acknowledged} acknowledged entries"
            verdict.add(Fault.LOST, text)
        return
    verdict.checked += ledger.acknowledged + 1
    count = len(found.payloads)
    if count < ledger.acknowledged:
        text = f"ledger {ledger_id} has {count} entries, {ledger.acknowledged} were acknowledged"
        verdict.add(Fault.LOST, text)
    if count > len(ledger.tokens):
        text = f"ledger {ledger_id} has {count} entries, {len(ledger.tokens)} were submitted"
        verdict.add(Fault.UNEXPLAINED, text)
    for entry_id, (token, payload) in enumerate(zip(ledger.tokens, found.payloads, strict=False)):
        if payload != entry_payload(seed, token):
            fault = Fault.LOST if entry_id < ledger.acknowledged else Fault.UNEXPLAINED
            verdict.add(fault, f"entry {ledger_id}:{entry_id} is not what was appended")
    if ledger.last_entry is not None and ledger.last_entry != count - 1:
        text = f"ledger {ledger_id} ended with {ledger.last_entry}, now ends with {count - 1}"
        verdict.add(Fault.LOST if ledger.last_entry >= count else Fault.UNEXPLAINED, text)
    if not _state_fits(ledger, found.state):
        text = f"ledger {ledger_id} is {found.state.value} against what was acknowledged"
        verdict.add(Fault.LOST, text)


def _state_fits(ledger: LedgerHistory, state: LedgerState) -> bool:
    if ledger.closed:
        return state is LedgerState.CLOSED
    if ledger.last_entry is not None:
        return state is not LedgerState.OPEN
    return state is LedgerState.OPEN or ledger.ends_submitted


def _compare_unknown_ledgers(history: History, found: Found, verdict: Verdict) -> None:
    unknown = [each for each in found.ledgers if each not in history.ledgers]
    for ledger_id in unknown:
        if ledger_id in history.dropped:
            verdict.add(Fault.UNEXPLAINED, f"ledger {ledger_id} was deleted and is back")
        elif found.ledgers[ledger_id].payloads:
            verdict.add(Fault.UNEXPLAINED, f"ledger {ledger_id} has entries of nobody")
    if len(unknown) > len(history.creates):
        text = f"{len(unknown)} more ledgers than known, {len(history.creates)} creates unanswered"
        verdict.add(Fault.UNEXPLAINED, text)


def _compare_key(
    history: History, key: str, known: KeyHistory, found: FoundRecord | None, verdict: Verdict
) -> None:
    verdict.checked += 1
    if found is None:
        if known.token is not None and Kind.REMOVE not in known.pending.values():
            verdict.add(Fault.LOST, f"record {key} of operation {known.token} is gone")
        return
    token = token_of(found.value)
    if token is None or found.value != record_value(history.seed, token):
        verdict.add(Fault.UNEXPLAINED, f"record {key} holds what nobody put")
    elif token == known.token:
        if known.version is not None and found.version != known.version:
            text = f"record {key} is at version {found.version}, not {known.version}"
            verdict.add(Fault.LOST, text)
    elif known.pending.get(token) is not Kind.PUT:
        text = f"record {key} is as of operation {token}, not {known.token} or later"
        verdict.add(Fault.LOST if known.token is not None else Fault.UNEXPLAINED, text)
    elif history.was_given(found.version):
        verdict.add(Fault.REUSED, f"version {found.version} of {key} was acknowledged elsewhere")


def _compare_unknown_keys(history: History, found: Found, verdict: Verdict) -> None:
    for key, record in found.records.items():
        if key in history.keys:
            continue
        token = token_of(record.value)
        prefix = None if token is None else history.sequences.get(token)
        if token is None or prefix is None or not key.startswith(f"{prefix}-"):
            verdict.add(Fault.UNEXPLAINED, f"record {key} was put by nobody, or should be gone")
        elif record.value != record_value(history.seed, token):
            verdict.add(Fault.UNEXPLAINED, f"record {key} holds what nobody appended")


def _compare_indexes(found: Found, verdict: Verdict) -> None:
    """A scan of an index gives each record that has an entry in it, once."""
    for index, keys in found.indexed.items():
        expected = sorted(_having(found, index))
        if sorted(keys) != expected:
            wrong = sorted(set(keys) ^ set(expected)) or ["a record twice"]
            text = f"index {index} and the records disagree on {len(wrong)}, such as {wrong[0]}"
            verdict.add(Fault.INDEX, text)


def _having(found: Found, index: str) -> Iterable[str]:
    for key, record in found.records.items():
        token = token_of(record.value)
        if token is not None and any(each.name == index for each in record_indexes(token)):
            yield key


# --- going on from what was found


def _settle(history: History, found: Found) -> None:
    """What was found is certain from now on, and what was not found will never come."""
    for ledger_id in [each for each in history.ledgers if each not in found.ledgers]:
        history.drop(ledger_id)
    for ledger_id, seen in found.ledgers.items():
        history.saw(ledger_id)
        ledger = history.ledgers.setdefault(ledger_id, LedgerHistory())
        ledger.acknowledged = len(seen.payloads)
        del ledger.tokens[ledger.acknowledged :]
        ended = seen.state is not LedgerState.OPEN
        ledger.last_entry = ledger.acknowledged - 1 if ended else None
        ledger.closed = seen.state is LedgerState.CLOSED
        ledger.ends_submitted = ledger.drop_submitted = False
    history.creates.clear()
    for key, known in history.keys.items():
        record = found.records.get(key)
        known.token = None if record is None else token_of(record.value)
        known.version = None if record is None else record.version
        known.pending.clear()
    for key, record in found.records.items():
        history.saw(record.version)
        token = token_of(record.value)
        if key not in history.keys and token in history.sequences:
            history.keep_sequence(token, key, record.version)
    history.sequences.clear()
