"""Pure: the bytes of ledgers, in the journal and in their files.

An entry is one journal record (crc, size, kind, ledger id, entry id, payload); its bytes are the
same in the journal and in the ledger's file, so its checksum is computed once in its life.

    <id>.ledger   header twice, one sector each | entries, one behind the other
    <id>.index    offset of each entry in the ledger file, 8 bytes each
    header        magic 8 | version 2 | state 1 | 0 | counter 4 | ledger 8 | last 8 | size 8 | crc 4

Invariants:
1. An entry says whose it is: read at a wrong offset, it does not pass for another.
2. The header with the higher counter that passes its checksum counts; a single damaged sector
   loses nothing.
3. The index can be rebuilt from the entries, and an entry's offset from the entry before it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from magnetar.errors import CorruptData, FormatTooNew
from magnetar.journal.format import encode_record
from magnetar.ledger.api import ENTRY_BYTES_MAX, NO_ENTRY, LedgerState

FORMAT_VERSION: Final = 1

# Kinds of journal records. Numbers on disk: 0 is the journal's own, the metadata store has 16.
KIND_CREATE: Final = 1
KIND_ENTRY: Final = 2
KIND_FENCE: Final = 3
KIND_CLOSE: Final = 4
KIND_DELETE: Final = 5
LEDGER_KINDS: Final = frozenset(range(KIND_CREATE, KIND_DELETE + 1))

_CRC = struct.Struct("<I")
# A journal record (`journal/format.py`) whose body begins with the two ids.
_ENTRY_TAIL = struct.Struct("<IBQQ")
_ENTRY = struct.Struct("<IIBQQ")
_LEDGER_ID = struct.Struct("<Q")
_BODY_IDS: Final = 16
"""How much of a record's body is ids."""

ENTRY_OVERHEAD: Final = _ENTRY.size
INDEX_SLOT_BYTES: Final = 8

_MAGIC: Final = b"MAGLEDG\n"
_HEADER = struct.Struct("<8sHBxIQqQ")
_HEADER_BYTES: Final = 512
ENTRIES_START: Final = 2 * _HEADER_BYTES
_STATES: Final = (LedgerState.OPEN, LedgerState.FENCED, LedgerState.CLOSED)


def encode_entry(ledger_id: int, entry_id: int, payload: bytes) -> bytes:
    tail = _ENTRY_TAIL.pack(_BODY_IDS + len(payload), KIND_ENTRY, ledger_id, entry_id)
    return _CRC.pack(crc32c(payload, crc32c(tail))) + tail + payload


def encode_entries(ledger_id: int, first: int, payloads: Iterable[bytes]) -> list[bytes]:
    """The records of entries that follow one another."""
    pack_tail, pack_crc = _ENTRY_TAIL.pack, _CRC.pack
    records: list[bytes] = []
    add = records.append
    for entry_id, payload in enumerate(payloads, first):
        tail = pack_tail(_BODY_IDS + len(payload), KIND_ENTRY, ledger_id, entry_id)
        add(pack_crc(crc32c(payload, crc32c(tail))) + tail + payload)
    return records


def entry_ids(record: bytes) -> tuple[int, int]:
    """Ledger and entry id of a record that is known to be whole."""
    _, _, _, ledger_id, entry_id = _ENTRY.unpack_from(record)
    return ledger_id, entry_id


def entry_size(data: bytes, offset: int, ledger_id: int, entry_id: int) -> int | None:
    """Size of the record that begins at `offset`, if it claims to be this entry."""
    if len(data) - offset < ENTRY_OVERHEAD:
        return None
    _, body, kind, ledger, entry = _ENTRY.unpack_from(data, offset)
    # Another record, or the middle of one: the offset that led here is wrong (invariant 1).
    if (kind, ledger, entry) != (KIND_ENTRY, ledger_id, entry_id):
        return None
    # No writer makes such a size: following it would read far beyond the entry.
    if not _BODY_IDS <= body <= ENTRY_BYTES_MAX + _BODY_IDS:
        return None
    return int(body) - _BODY_IDS + ENTRY_OVERHEAD


def whole_payloads(data: bytes, ledger_id: int, first: int, last: int) -> list[bytes]:
    """Payloads of the entries that stand one behind the other from the start of `data` on.

    Up to `last`, or to the first that is not the one that follows, is damaged, or is cut off.
    """
    # Without a call or a second copy for each: a backlog is read here.
    view, end, place = memoryview(data), len(data), 0
    payloads: list[bytes] = []
    take, read_head = payloads.append, _ENTRY.unpack_from
    for entry_id in range(first, last + 1):
        start = place + ENTRY_OVERHEAD
        if start > end:
            break
        crc, body, kind, ledger, entry = read_head(data, place)
        stop: int = start + body - _BODY_IDS
        if (
            entry != entry_id
            or ledger != ledger_id
            or kind != KIND_ENTRY
            or not start <= stop <= end
            or crc32c(view[place + _CRC.size : stop]) != crc
        ):
            break
        take(data[start:stop])
        place = stop
    return payloads


def encode_ledger_record(kind: int, ledger_id: int) -> bytes:
    """A record that concerns a whole ledger: create, fence, close or delete."""
    return encode_record(kind, _LEDGER_ID.pack(ledger_id))


def decode_ledger_id(body: bytes) -> int:
    (ledger_id,) = _LEDGER_ID.unpack(body)
    return int(ledger_id)


def encode_index(offset: int, records: Iterable[bytes]) -> bytes:
    """Index slots of records that stand one behind the other from `offset` on."""
    slots = array("Q")
    for record in records:
        slots.append(offset)
        offset += len(record)
    return slots.tobytes()


def decode_index(slots: bytes) -> list[int]:
    # A slot that was cut short counts for nothing: its entry is found from the one before it.
    whole = len(slots) - len(slots) % INDEX_SLOT_BYTES
    return list(array("Q", slots[:whole]))


@dataclass(frozen=True, slots=True)
class LedgerHeader:
    """The header of a ledger file: whose it is, its state, and once it has one, its end."""

    ledger_id: int
    state: LedgerState
    counter: int
    last_entry: int = NO_ENTRY
    """Final once the state is not OPEN."""
    size_bytes: int = 0

    def encode(self) -> bytes:
        head = _HEADER.pack(
            _MAGIC,
            FORMAT_VERSION,
            _STATES.index(self.state),
            self.counter,
            self.ledger_id,
            self.last_entry,
            self.size_bytes,
        )
        # One copy per sector: a torn write or a bad sector leaves the other (invariant 2).
        return 2 * (head + _CRC.pack(crc32c(head))).ljust(_HEADER_BYTES, b"\0")


def decode_header(sectors: bytes, name: str) -> tuple[LedgerHeader, bool]:
    """The header, and whether both its copies are whole."""
    copies = [
        _decode_copy(sectors[offset : offset + _HEADER_BYTES], name)
        for offset in (0, _HEADER_BYTES)
    ]
    whole = [copy for copy in copies if copy is not None]
    if not whole:
        raise CorruptData(f"both copies of the header of {name} are damaged")
    return max(whole, key=lambda header: header.counter), len(whole) == len(copies)


def _decode_copy(sector: bytes, name: str) -> LedgerHeader | None:
    if len(sector) < _HEADER_BYTES:
        return None
    (crc,) = _CRC.unpack_from(sector, _HEADER.size)
    magic, version, state, counter, ledger_id, last_entry, size_bytes = _HEADER.unpack_from(sector)
    # Damaged: the other copy decides. A whole one of a newer version is refused, not misread.
    if magic != _MAGIC or crc != crc32c(sector[: _HEADER.size]):
        return None
    if version > FORMAT_VERSION:
        raise FormatTooNew(f"{name} has ledger format {version}, this is {FORMAT_VERSION}")
    return LedgerHeader(ledger_id, _STATES[state], counter, last_entry, size_bytes)
