"""The records of a cursor's state: one main record, and chunk records that it names.

Owns: `CursorStore`, the durable side of one cursor.

Invariants:
1. A state is written as a whole without any atomicity over keys: new chunk records under new
   names, then the main record that names them (compare-and-set), then the old ones go. Until the
   main record is written the old state is whole, from then on the new one.
2. A chunk record is never changed: its name holds the owner's epoch and a number used once.
3. Only chunks that changed since the last write are written again.
4. No record is longer than `cursor_record_bytes`: chunks and the table of chunks are split.
5. Only chunk records that no main record can name are deleted; what a crash leaves behind is swept
   at the next load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Final

import msgspec

from magnetar.errors import (
    CorruptMetadata,
    ManagedLedgerFenced,
    MetadataError,
    OutcomeUnknown,
    Unavailable,
)
from magnetar.managed_ledger.acked import AckedSet, ChunkKey
from magnetar.managed_ledger.cursor_state import CursorState
from magnetar.managed_ledger.names import chunks_directory
from magnetar.managed_ledger.owned_record import OwnedRecord
from magnetar.managed_ledger.records import (
    ChunkRef,
    CursorRecord,
    decode_chunk,
    decode_table,
    encode_chunk,
    encode_table,
    piece_body,
    split,
)
from magnetar.metadata.api import MetadataStore
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger

INLINE_BYTES_MAX: Final = 1024
"""A chunk up to this long stands in the table itself."""

# Large enough that a sync serves many of them, small beside what the store lets queue.
WRITES_IN_FLIGHT_MAX: Final = 64

_LOG: Final = logger(__name__)


class CursorStore:
    """Writes the states of one cursor, one after the other."""

    def __init__(
        self,
        metadata: MetadataStore,
        limits: Limits,
        record: OwnedRecord[CursorRecord],
        next_generation: Callable[[], str],
    ) -> None:
        self._metadata = metadata
        self._record_bytes = limits.cursor_record_bytes
        self._record = record
        self._next_generation = next_generation
        self._directory = chunks_directory(record.value.managed_ledger, record.value.name)
        # As of the last durable main record, and the chunk records that no main record names.
        self._table: dict[ChunkKey, ChunkRef] = {}
        self._garbage: set[str] = set()

    @property
    def record(self) -> CursorRecord:
        return self._record.value

    async def load(self) -> CursorState:
        """Read the state that the main record names, and sweep what it does not name."""
        state = CursorState(self.record.mark_delete, self.record.incarnation)
        # The main record is ours by now, so nobody else adds a piece that counts.
        async with aclosing(self._metadata.scan(self._directory)) as records:
            bodies = {record.key: record.value async for record in records}
        table = self._read_table(bodies)
        for ref in table:
            key = ChunkKey(ref.ledger_id, ref.number)
            self._table[key] = ref
            self._load_chunk(state.acked, key, ref, bodies)
        self._garbage = bodies.keys() - self._named_keys()
        await self._collect_garbage()
        return state

    async def write(self, state: CursorState) -> None:
        """Make the state of this moment durable; on an error all of it is still to be written."""
        # Before the first await: what is acknowledged while this writes counts as changed again.
        changed = state.acked.take_changed()
        try:
            await self._write(state, changed)
        except BaseException:
            state.acked.give_back_changed(changed)
            raise

    async def change_properties(self, properties: dict[str, str]) -> None:
        """Replace the properties; not while a state is being written."""
        await self._record.update(
            lambda record: msgspec.structs.replace(record, properties=properties)
        )

    async def delete(self) -> None:
        """Remove the cursor. Once the main record says so, the rest can be done by anyone."""
        await self._record.update(lambda record: msgspec.structs.replace(record, deleted=True))
        await self._metadata.delete_range(self._directory)
        await self._record.delete()

    # --- writing

    async def _write(self, state: CursorState, changed: set[ChunkKey]) -> None:
        # All that is stored is taken from the state before the first await: it goes on changing.
        generation = self._next_generation()
        # Chunks that did not change keep their records (invariant 3). They may hold positions that
        # the mark covers by now, which loading drops.
        table = {key: self._table[key] for key in state.acked.chunk_keys if key not in changed}
        pieces: dict[str, bytes] = {}
        for key in changed:
            table[key] = self._place_chunk(state.acked, key, generation, pieces)
        encoded = encode_table([table[key] for key in sorted(table)])
        table_pieces = self._place_table(encoded, generation, pieces)
        mark_delete, incarnation = state.mark_delete, state.incarnation
        named_before = self._named_keys()

        def change(record: CursorRecord) -> CursorRecord:
            return msgspec.structs.replace(
                record,
                mark_delete=mark_delete,
                incarnation=incarnation,
                table=b"" if table_pieces else encoded,
                table_generation=generation if table_pieces else "",
                table_pieces=table_pieces,
            )

        def applied() -> None:
            self._table = table
            self._garbage |= named_before - self._named_keys()

        # Until the main record names them the new pieces are garbage; whether it does is unknown
        # after an unknown outcome or a lost race, and then nothing is deleted any more.
        try:
            await self._put_all(pieces)
            await self._record.update(change, applied)
        except (OutcomeUnknown, ManagedLedgerFenced):
            raise
        except MetadataError:
            self._garbage |= pieces.keys() - self._named_keys()
            raise
        await self._collect_garbage()

    def _place_chunk(
        self, acked: AckedSet, key: ChunkKey, generation: str, pieces: dict[str, bytes]
    ) -> ChunkRef:
        body = encode_chunk(acked.dump_chunk(key))
        # Few holes, as nearly always: one write of the main record stores it all.
        if len(body) <= INLINE_BYTES_MAX:
            return ChunkRef(key.ledger_id, key.number, inline=body)
        parts = split(body, self._record_bytes)
        ref = ChunkRef(key.ledger_id, key.number, generation=generation, pieces=len(parts))
        pieces.update(zip(self._chunk_record_keys(ref), parts, strict=True))
        return ref

    def _place_table(self, encoded: bytes, generation: str, pieces: dict[str, bytes]) -> int:
        """How many records of its own the table needs; 0: it stands in the main record."""
        # Half, because the main record also holds names and properties.
        if len(encoded) <= self._record_bytes // 2:
            return 0
        parts = split(encoded, self._record_bytes)
        pieces.update(zip(self._table_record_keys(generation, len(parts)), parts, strict=True))
        return len(parts)

    async def _put_all(self, pieces: dict[str, bytes]) -> None:
        items = list(pieces.items())
        for at in range(0, len(items), WRITES_IN_FLIGHT_MAX):
            batch = items[at : at + WRITES_IN_FLIGHT_MAX]
            results = await asyncio.gather(
                *(self._metadata.put(key, value) for key, value in batch), return_exceptions=True
            )
            for result in results:
                if isinstance(result, OutcomeUnknown):
                    # The name is used once, so a late arrival is only a leftover for the sweep.
                    raise Unavailable("a chunk of a cursor may be missing") from result
                if isinstance(result, BaseException):
                    raise result

    async def _collect_garbage(self) -> None:
        for key in sorted(self._garbage):
            try:
                await self._metadata.delete(key)
            except MetadataError as error:
                # The state is durable; leftovers are tried again with the next write.
                _LOG.warning("cursor-leftover-kept", key=key, error=str(error))
                return
            self._garbage.discard(key)

    # --- reading

    def _read_table(self, bodies: dict[str, bytes]) -> list[ChunkRef]:
        if not self.record.table_pieces:
            return decode_table(self._record.key, self.record.table)
        keys = self._table_record_keys(self.record.table_generation, self.record.table_pieces)
        return decode_table(self._record.key, self._join(keys, bodies))

    def _load_chunk(
        self, acked: AckedSet, key: ChunkKey, ref: ChunkRef, bodies: dict[str, bytes]
    ) -> None:
        body = ref.inline or self._join(self._chunk_record_keys(ref), bodies)
        acked.load_chunk(key, decode_chunk(self._record.key, body))

    def _join(self, keys: Iterable[str], bodies: dict[str, bytes]) -> bytes:
        parts = []
        for key in keys:
            # Invariant 5 rules that out. Going on would take acknowledgements back in silence.
            if key not in bodies:
                raise CorruptMetadata(f"{self._record.key} names {key}, which does not exist")
            parts.append(piece_body(key, bodies[key]))
        return b"".join(parts)

    # --- names

    def _named_keys(self) -> set[str]:
        named = {key for ref in self._table.values() for key in self._chunk_record_keys(ref)}
        record = self.record
        named.update(self._table_record_keys(record.table_generation, record.table_pieces))
        return named

    def _chunk_record_keys(self, ref: ChunkRef) -> list[str]:
        stem = f"{self._directory}/{ref.generation}-{ref.ledger_id:x}-{ref.number:x}"
        return [f"{stem}-{piece}" for piece in range(ref.pieces)]

    def _table_record_keys(self, generation: str, pieces: int) -> list[str]:
        return [f"{self._directory}/{generation}-table-{piece}" for piece in range(pieces)]
