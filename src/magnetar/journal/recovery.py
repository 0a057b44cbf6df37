"""Reading a journal back: which records are durable, and where a crash cut.

Owns: the rules that tell a torn tail (cut, silently: nothing in it was acknowledged) from
corruption (refused and reported, nothing changed). All calls block.

The files in use form a chain: each begins with the record that follows the last of the one
before. Recovery walks the chain from the first record that may not be in its home yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from magnetar.errors import CorruptData
from magnetar.journal.files import JournalFile
from magnetar.journal.format import (
    FILE_HEADER_BYTES,
    KIND_SETTLED,
    JournalRecord,
    decode_batch,
    decode_settled,
    find_later_batch,
)


@dataclass(frozen=True, slots=True)
class Recovered:
    """The durable contents of a journal, as recovery found them."""

    next_sequence: int
    settled: int
    """Everything up to here is in its home."""
    records: list[JournalRecord]
    """Durable records behind `settled`, in order, without the journal's own."""


def recover(files: Iterable[JournalFile]) -> Recovered:
    used = sorted(
        (file for file in files if file.header.first_sequence),
        key=lambda f: f.header.first_sequence,
    )
    if not used:
        return Recovered(next_sequence=1, settled=0, records=[])
    # The last file first: what it says was settled since need not be read in the others.
    last = used[-1]
    latest, following = _read_file(last, is_last=True)
    settled = max(
        [last.header.settled]
        + [decode_settled(record) for record in latest if record.kind == KIND_SETTLED]
    )
    records: list[JournalRecord] = []
    chain = _chain(used, settled)
    expected = chain[0].header.first_sequence
    for file in chain:
        # A hole in the chain: a file is missing, or one before the last ends too early.
        if file.header.first_sequence != expected:
            raise CorruptData(
                f"journal records {expected} to {file.header.first_sequence - 1} are missing "
                f"before {file.path}"
            )
        if file is last:
            found, expected = latest, following
        else:
            found, expected = _read_file(file, is_last=False)
        records.extend(found)
    # Settled ones were read only because others stand in the same file.
    behind = [each for each in records if each.sequence > settled and each.kind != KIND_SETTLED]
    return Recovered(next_sequence=expected, settled=settled, records=behind)


def _chain(used: list[JournalFile], settled: int) -> list[JournalFile]:
    """The files that can hold records behind `settled`."""
    for place in range(len(used) - 1, -1, -1):
        if used[place].header.first_sequence <= settled + 1:
            return used[place:]
    # Even the oldest begins too late: a file with unsettled records is gone.
    raise CorruptData(
        f"journal records from {settled + 1} on are missing: the oldest file, {used[0].path}, "
        f"begins with {used[0].header.first_sequence}"
    )


def _read_file(file: JournalFile, *, is_last: bool) -> tuple[list[JournalRecord], int]:
    """The whole records of a file, and the number that follows its last."""
    data = file.read_all()
    records: list[JournalRecord] = []
    offset = last_batch = FILE_HEADER_BYTES
    expected = file.header.first_sequence
    while (batch := decode_batch(data, offset, file.header, expected)) is not None:
        records.extend(batch.records)
        last_batch, offset = offset, batch.end
        expected = batch.next_sequence
    # A torn batch can only end the last file. In an earlier one, an early end leaves a hole in
    # the chain, which `recover` finds.
    later = find_later_batch(data, offset, file.header, expected) if is_last else None
    if later is not None:
        raise CorruptData(
            f"{file.path} is damaged at byte {offset}: record {expected} was durable once, "
            f"for a later batch stands at byte {later}"
        )
    if is_last and offset > last_batch:
        # What is replayed from it goes home, so it must not vanish from here any more.
        file.secure(last_batch, data[last_batch:offset])
    return records, expected
