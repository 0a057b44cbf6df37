"""Pure: which sends of a topic are stored already, by producer name and sequence id.

Owns: `Dedup`: per producer name the highest pushed and the highest persisted sequence, what is in
flight between the two, and the holes that failed appends left; what transactions stored; what a
segment inherited of its parents; its stored form.

A send covers the sequences from its own id to its highest (of a batch; else the same). Of a chunked
message only the last chunk counts: the others share its sequence, and are stored unjudged.

What the parents of a segment stored goes before its own state: a producer may have sent a sequence
again that only one of two parents lacks, and then one that the other has. Above everything that is
inherited, own state alone decides.

Invariants (`check_invariants`):
1. persisted <= pushed. With nothing in flight the two are equal.
2. A sequence at or below `persisted` is in the log, was skipped by its producer, or is in a hole:
   an append that failed while a later one of the same producer reached the log. So DUPLICATE never
   answers for something that is not stored, and a hole can be filled: its resend is STORE.
3. Holes are disjoint, ascending, not empty, and lie below `pushed`.
4. What is decided STORE is settled (`persisted` or `failed`) once, in the order of the decisions
   about its name.
5. Only names without a producer are ever forgotten.
6. Once an inherited sequence got UNKNOWN, no later one of that name is stored before the producer
   comes again (and with it, in order, whatever it still wants to send). So "at or below persisted"
   keeps its meaning (2) for the next generation.
7. What a transaction stored does not count before its commit: below `persisted` it is UNKNOWN until
   then. An abort leaves holes, which nobody need fill: a producer that comes back goes on behind
   them, or its next messages would be taken for those that are stored behind the holes.
8. A name has at most `HOLES_MAX` holes. At or below the last one that was given up (`unproven`)
   nothing is STORE or DUPLICATE; a segment's children take it for stored.

Relies on: the caller, which settles every append even after its producer has gone, and stores a
snapshot before it serves a topic on which `has_holes` (a log alone does not show holes).
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from magnetar.broker.api import NO_SEQUENCE
from magnetar.broker.publish.lineage import (
    Lineage,
    Piece,
    SequenceSpan,
    stored,
    within,
)
from magnetar.errors import CorruptMetadata, FormatTooNew, InvariantBroken
from magnetar.model.hashing import HashRange
from magnetar.model.ids import Position
from magnetar.txn.buffer.txn_dedup import Sent, SequenceNews, TxnRuns
from magnetar.wire.messages import SendRun

HOLES_MAX: Final = 500
"""Of one producer name. Beyond it the older half is given up: whether a sequence among them is
stored is not known any more."""

# The first byte of a snapshot. Topics that inherited nothing keep the older form.
_PLAIN: Final = 1
_WITH_LINEAGE: Final = 2
_HEADER: Final = struct.Struct(">BqqI")
_NAME_SIZE: Final = struct.Struct(">I")
_PRODUCER: Final = struct.Struct(">qI")


class SendVerdict(Enum):
    """The verdict on a send."""

    STORE = "store"
    DUPLICATE = "duplicate"
    """It is stored: answer a receipt with position (-1, -1)."""
    UNKNOWN = "unknown"
    """Whether it is or will be stored is not known: answer an error."""


class _Inherited(NamedTuple):
    """The sequences of one name that a segment's parents stored."""

    pieces: tuple[Piece, ...]
    highest: int
    """No piece has a sequence above it."""


class DedupFastPath:
    """The sequences of one producer name.

    A plain send (one message, above `pushed` and above `floor`) is certainly new: its producer
    notes it here without asking (`pushed`, `plain`), and settles it in the order of its sends.
    """

    __slots__ = (
        "filling",
        "floor",
        "holes",
        "in_flight",
        "in_txns",
        "persisted",
        "plain",
        "pushed",
        "undecided",
        "unproven",
    )

    def __init__(self, persisted: int) -> None:
        self.pushed = persisted
        self.persisted = persisted
        self.plain = 0
        """Plain sends in flight. If there are any, `pushed` is in flight."""
        self.floor = NO_SEQUENCE
        """Up to here, what was inherited decides."""
        self.in_flight: deque[SequenceSpan] = deque()
        """The other sends in flight."""
        self.holes: list[SequenceSpan] = []
        self.unproven = NO_SEQUENCE
        """Up to here holes were given up, there were too many: what is stored is not known."""
        self.filling: list[SequenceSpan] = []
        """Those in flight again that were holes."""
        self.undecided: list[SequenceSpan] = []
        """Stored in transactions that are not decided (found in the log), or not counted."""
        self.in_txns: list[TxnRuns] = []
        """Stored in transactions that are not decided; they grow as those store more."""

    @property
    def is_idle(self) -> bool:
        return not self.in_flight and not self.plain

    @property
    def doubtful(self) -> list[SequenceSpan]:
        """Sequences of which nobody knows yet whether they will be stored."""
        in_txns = [SequenceSpan(*run, needed=False) for runs in self.in_txns for run in runs]
        return [*self.filling, *self.undecided, *in_txns]

    def fits(self, run: SendRun) -> bool:
        """Whether all sends of a run are certainly new."""
        return run.sequence_ids[0] > self.pushed and run.sequence_ids[0] > self.floor

    def push(self, sequence_ids: list[int]) -> None:
        """Note a run that `fits`: it is in flight now."""
        self.pushed = sequence_ids[-1]
        self.plain += len(sequence_ids)

    def plain_run_persisted(self, sequence_ids: list[int]) -> None:
        """Plain sends that came together are durable."""
        self.plain -= len(sequence_ids)
        if sequence_ids[-1] > self.persisted:
            self.persisted = sequence_ids[-1]

    def plain_persisted(self, sequence_id: int) -> None:
        """A plain send is durable."""
        self.plain -= 1
        if sequence_id > self.persisted:
            self.persisted = sequence_id

    def plain_failed(self, sequence_id: int) -> None:
        """The append of a plain send failed."""
        self.plain -= 1
        self.forget(SequenceSpan(sequence_id, sequence_id))

    def forget(self, *sent: SequenceSpan) -> None:
        """Sends that are in flight no more were not stored: forget that they were pushed."""
        # Back to what is in flight or durable: a resend above that is new by its number.
        highest = max((each.last for each in self.in_flight), default=NO_SEQUENCE)
        self.pushed = self.pushed if self.plain else max(highest, self.persisted)
        holes, pushed = self.holes, self.pushed
        # Old and new ones may touch or overlap: put in order, neighbours become one.
        if holes and holes[-1].last >= sent[0].first:
            sent = tuple(sorted([*_without(holes, sent), *sent]))
            holes = self.holes = []
        for each in sent:
            before = holes[-1] if holes else None
            if before is not None and before[1:] == (each.first - 1, each.needed):
                holes[-1] = before._replace(last=each.last)
            else:
                holes.append(each)
        # Above everything pushed there is no hole: a resend is new by its number alone.
        while holes and holes[-1].last > pushed:
            above = holes.pop()
            if above.first <= pushed:
                holes.append(above._replace(last=pushed))
        # Invariant 8: a producer that fails for hours must not make its snapshot grow without end.
        if len(holes) > HOLES_MAX:
            kept = HOLES_MAX // 2
            self.unproven = max(self.unproven, holes[-kept - 1].last)
            del holes[:-kept]

    def drop(self, *sent: SequenceSpan) -> None:
        """Take sequences out of the holes and the undecided ones."""
        if self.undecided:
            self.undecided = _without(self.undecided, sent)
        if self.holes and self.holes[-1].last >= sent[0].first:
            self.holes = _without(self.holes, sent)


class Dedup:
    """The sequences of one topic. Times are the caller's, in any unit that only grows."""

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._producers: dict[str, DedupFastPath] = {}
        self._absent: dict[str, float] = {}
        """Names without a producer, by when it left: the longest absent first."""
        self._inherited: dict[str, _Inherited] = {}
        self._doubts: dict[str, int] = {}
        """The first inherited sequence that got UNKNOWN since its producer came."""
        self._news = SequenceNews()
        """What transactions stored; the topic's own once it is followed."""

    # --- sends

    def decide(
        self,
        name: str,
        sequence_id: int,
        highest_sequence_id: int = NO_SEQUENCE,
        *,
        is_last_chunk: bool = True,
        key_hash: int | None = None,
    ) -> SendVerdict:
        """Judge a send. After STORE it counts as pushed, and the caller owes its settlement.

        `key_hash` is where its key stands on the ring of segments; None: it has none, or several.
        """
        # Its sequence counts with the last chunk; a lost one shows when the message is put
        # together.
        if not is_last_chunk:
            return SendVerdict.STORE
        if self._news:
            self.catch_up()
        # Parents go first: below their highest sequence own numbers prove nothing.
        if self._inherited:
            verdict = self._inherited_verdict(name, sequence_id, key_hash)
            if verdict is not None:
                return verdict
        producer = self._sequences_of(name)
        sent = SequenceSpan(sequence_id, max(sequence_id, highest_sequence_id))
        # Above all that was seen of this name.
        if sequence_id > producer.pushed:
            producer.pushed = sent.last
        # It will be stored or not as its transaction ends: neither answer is true now.
        elif any(runs.holds(sequence_id) for runs in producer.in_txns):
            return SendVerdict.UNKNOWN
        # An earlier append of it failed: this resend fills the hole (invariant 2).
        elif within(sequence_id, producer.holes):
            producer.holes = _without(producer.holes, [sent])
            producer.filling.append(sent)
        # In flight, given up for the number of holes, or of an undecided transaction.
        elif not producer.unproven < sequence_id <= producer.persisted or within(
            sequence_id, producer.doubtful
        ):
            return SendVerdict.UNKNOWN
        else:
            return SendVerdict.DUPLICATE
        producer.in_flight.append(sent)
        return SendVerdict.STORE

    def persisted(self, name: str, sequence_id: int, *, is_last_chunk: bool = True) -> None:
        """The append of a send that was decided STORE is durable."""
        if is_last_chunk:
            producer, sent = self._settled(name, sequence_id)
            if sent.last > producer.persisted:
                producer.persisted = sent.last

    def failed(self, name: str, sequence_id: int, *, is_last_chunk: bool = True) -> None:
        """The append of a send that was decided STORE failed: forget that it was pushed."""
        if not is_last_chunk:
            return
        producer, sent = self._settled(name, sequence_id)
        producer.forget(sent)

    def fast_path(self, name: str) -> DedupFastPath | None:
        """Where plain sends of a name may be noted without asking; None: ask."""
        fast_path = self._producers.get(name)
        if fast_path is None or name in self._doubts:
            return None
        inherited = self._inherited.get(name)
        fast_path.floor = NO_SEQUENCE if inherited is None else inherited.highest
        return fast_path

    def last_sequence_id(self, name: str) -> int:
        """Up to where a producer need not send again; -1 if it never sent."""
        self.catch_up()
        producer = self._producers.get(name)
        pushed = NO_SEQUENCE if producer is None else producer.pushed
        holes = [] if producer is None else producer.holes
        inherited = self._inherited.get(name)
        if inherited is not None:
            # What is below its own sequences, the producer has sent again or given up.
            above = [hole for piece in inherited.pieces for hole in _above(piece.holes, pushed)]
            holes = [*holes, *above]
            pushed = max(pushed, inherited.highest)
        # The client sends again from behind this one: from the first hole on, if it is needed.
        return min((hole.first - 1 for hole in holes if hole.needed), default=pushed)

    @property
    def has_holes(self) -> bool:
        self.catch_up()
        return any(producer.holes for producer in self._producers.values())

    # --- what transactions stored

    def follow(self, news: SequenceNews) -> None:
        """Take the news of this segment's transactions from now on."""
        self._news = news

    def catch_up(self) -> None:
        """Take what transactions did since the last call; whatever judges or tells begins so.

        Plain sends of a fast path do not ask: for them it happens one turn of the loop after a
        decision, which is before anybody is told of it.
        """
        for state, name, sequences in self._news.take():
            if isinstance(sequences, Sent):
                # Durable after the end: it counts, or is forgotten, as that end says.
                told = self.txn_committed if state == "COMMITTED" else self.txn_aborted
                told(name, SequenceSpan(sequences.first, sequences.last))
            elif state == "OPEN":
                self.began_in_txn(name, sequences)
            else:
                self.ended_in_txn(name, sequences, committed=state == "COMMITTED")

    def began_in_txn(self, name: str, stored: TxnRuns) -> None:
        """A transaction that is not decided stores these, and what is to come."""
        self._sequences_of(name).in_txns.append(stored)

    def ended_in_txn(self, name: str, stored: TxnRuns, *, committed: bool) -> None:
        """Apply the decision of a transaction to what it stored."""
        fast_path = self._sequences_of(name)
        fast_path.in_txns = [each for each in fast_path.in_txns if each is not stored]
        runs = [SequenceSpan(*run, needed=False) for run in stored]
        if runs and committed:
            self.txn_committed(name, *runs)
        elif runs:
            self.txn_aborted(name, *runs)

    def stored_in_txn(self, name: str, sent: SequenceSpan) -> None:
        """The log has it, of a transaction that is not decided."""
        fast_path, sent = self._sequences_of(name), sent._replace(needed=False)
        fast_path.holes = _without(fast_path.holes, [sent])
        # Transactions store in runs: one span for many messages.
        if fast_path.undecided and fast_path.undecided[-1].last == sent.first - 1:
            fast_path.undecided[-1] = fast_path.undecided[-1]._replace(last=sent.last)
        else:
            fast_path.undecided.append(sent)

    def txn_committed(self, name: str, *stored: SequenceSpan) -> None:
        """What a transaction stored (ascending) counts like any other message."""
        producer = self._sequences_of(name)
        producer.drop(*stored)
        for sent in stored:
            if sent.last > producer.persisted:
                if not producer.is_idle:
                    # Not past what is in flight: it stays unknown until the log is read again.
                    producer.undecided.append(sent._replace(needed=False))
                    continue
                producer.pushed = producer.persisted = sent.last

    def txn_aborted(self, name: str, *stored: SequenceSpan) -> None:
        """What a transaction stored is as if it had never been sent: it may be sent again."""
        producer = self._sequences_of(name)
        producer.drop(*stored)
        forgotten = []
        for sent in (each._replace(needed=False) for each in stored):
            # Above all that counts so far: nothing else of this producer was stored behind it.
            if sent.last > producer.pushed:
                if not producer.is_idle:
                    producer.undecided.append(sent)
                    continue
                # Later ones may pass it: then it is a hole among them.
                producer.pushed = producer.persisted = sent.last
            forgotten.append(sent)
        if forgotten:
            producer.forget(*forgotten)

    def _sequences_of(self, name: str) -> DedupFastPath:
        fast_path = self._producers.get(name)
        if fast_path is None:
            fast_path = self._producers[name] = DedupFastPath(NO_SEQUENCE)
        return fast_path

    # --- what a segment inherits and bequeaths

    def inherit(self, lineage: Lineage, own_range: HashRange, now: float) -> None:
        """Take over what the parents stored; again: the same names once more."""
        for name, pieces in lineage.covering(own_range).items():
            self._inherited[name] = _Inherited(pieces, max(each.persisted for each in pieces))
            if name not in self._producers:
                self._absent.setdefault(name, now)

    def lineage(self, own_range: HashRange, child_range: HashRange) -> Lineage:
        """What a child on that range inherits, once nothing is in flight any more."""
        self.catch_up()
        names = {**self._producers, **self._inherited}
        return Lineage({name: self._pieces(name, own_range) for name in names}).clipped(child_range)

    def needs_key(self, name: str, sequence_id: int) -> bool:
        """Whether the verdict depends on the key of the message."""
        inherited = self._inherited.get(name)
        return inherited is not None and sequence_id <= inherited.highest

    def _inherited_verdict(
        self, name: str, sequence_id: int, key_hash: int | None
    ) -> SendVerdict | None:
        """None: it is not stored by the parents, and its own state decides."""
        inherited = self._inherited.get(name)
        if inherited is None:
            return None
        # Invariant 6: behind the first doubt nothing new is stored.
        doubt = self._doubts.get(name, sequence_id)
        found = sequence_id <= inherited.highest and stored(inherited.pieces, sequence_id, key_hash)
        if found:
            return SendVerdict.DUPLICATE
        # Parents disagree: several pieces, and the key does not tell which part of the ring it is
        # of.
        if found is None:
            self._doubts[name] = min(doubt, sequence_id)
            return SendVerdict.UNKNOWN
        producer = self._producers.get(name)
        # A resend below `pushed` does not move it, so it cannot make a doubt look stored.
        is_new = producer is None or sequence_id > producer.pushed
        return SendVerdict.UNKNOWN if is_new and sequence_id > doubt else None

    def _pieces(self, name: str, own_range: HashRange) -> list[Piece]:
        inherited = self._inherited.get(name)
        pieces = (Piece(own_range, NO_SEQUENCE),) if inherited is None else inherited.pieces
        producer = self._producers.get(name)
        if producer is None:
            return list(pieces)
        persisted, missing = producer.persisted, _missing(producer)
        # For each part of the ring: own sequences on top of what was inherited there.
        return [
            Piece(
                hash_range,
                max(persisted, highest),
                (*missing, *_above(holes, persisted)),
            )
            for hash_range, highest, holes in pieces
        ]

    # --- names

    def producer_joined(self, name: str) -> None:
        self._absent.pop(name, None)
        self._doubts.pop(name, None)

    def producer_left(self, name: str, now: float) -> None:
        if name in self._producers or name in self._inherited:
            self._absent.pop(name, None)
            self._absent[name] = now

    def forget_idle(self, now: float, idle: float) -> list[str]:
        """Drop the names absent for at least `idle`, and the longest absent above the limit."""
        self.catch_up()
        forgotten: list[str] = []
        known = len(self)
        # The longest absent come first: the first that is neither overdue nor surplus ends the
        # search.
        for name, since in self._absent.items():
            surplus = known - len(forgotten) > self._names_max
            if since > now - idle and not surplus:
                break
            producer = self._producers.get(name)
            # Something of it is unsettled: forgetting it would let a resend be stored twice.
            if producer is None or (producer.is_idle and not producer.doubtful):
                forgotten.append(name)
        for name in forgotten:
            del self._absent[name]
            for known_names in (self._producers, self._inherited, self._doubts):
                known_names.pop(name, None)
        return forgotten

    def __len__(self) -> int:
        """How many names it knows."""
        if not self._inherited:
            return len(self._producers)
        return len(self._producers.keys() | self._inherited.keys())

    # --- the stored form

    def snapshot(self, position: Position) -> bytes:
        """What is persisted, for a log that is covered up to `position` at least."""
        self.catch_up()
        version = _WITH_LINEAGE if self._inherited else _PLAIN
        out = bytearray(_HEADER.pack(version, *position, len(self._producers)))
        for name, producer in self._producers.items():
            encoded = name.encode()
            out += _NAME_SIZE.pack(len(encoded)) + encoded
            holes = _missing(producer)
            if producer.unproven > NO_SEQUENCE:
                holes.insert(
                    0, SequenceSpan(NO_SEQUENCE, producer.unproven)
                )  # no hole begins there
            out += _PRODUCER.pack(producer.persisted, len(holes))
            for hole in holes:
                out += hole.to_bytes()
        if self._inherited:
            inherited = {name: each.pieces for name, each in self._inherited.items()}
            out += Lineage(inherited).to_bytes()
        return bytes(out)

    @classmethod
    def restore(cls, data: bytes, names_max: int, now: float) -> tuple[Dedup, Position]:
        """State of a snapshot, and behind which position to replay. All names are absent."""
        # Asked first: a later form cannot be told from a damaged one.
        if data and data[0] > _WITH_LINEAGE:
            raise FormatTooNew(f"a dedup snapshot has version {data[0]}, not up to {_WITH_LINEAGE}")
        dedup = cls(names_max)
        try:
            version, ledger_id, entry_id, count = _HEADER.unpack_from(data)
            offset = _HEADER.size
            for _ in range(count):
                offset = dedup._restore_producer(data, offset, now)
            if version == _WITH_LINEAGE:
                dedup._restore_inherited(Lineage.from_bytes(data[offset:]), now)
                offset = len(data)
            dedup.check_invariants()
        except (struct.error, UnicodeDecodeError, InvariantBroken) as error:
            raise CorruptMetadata(f"a dedup snapshot of {len(data)} bytes: {error}") from error
        if version < _PLAIN or offset != len(data) or len(dedup._producers) != count:
            raise CorruptMetadata(f"a dedup snapshot of {len(data)} bytes does not add up")
        return dedup, Position(ledger_id, entry_id)

    def _restore_producer(self, data: bytes, offset: int, now: float) -> int:
        (size,) = _NAME_SIZE.unpack_from(data, offset)
        offset += _NAME_SIZE.size
        name = data[offset : offset + size].decode()
        offset += size
        persisted, holes = _PRODUCER.unpack_from(data, offset)
        offset += _PRODUCER.size
        producer = self._producers[name] = DedupFastPath(persisted)
        for _ in range(holes):
            hole, offset = SequenceSpan.read(data, offset)
            if hole.first == NO_SEQUENCE:
                producer.unproven = hole.last
            else:
                producer.holes.append(hole)
        self._absent[name] = now
        return offset

    def _restore_inherited(self, lineage: Lineage, now: float) -> None:
        for name, pieces in lineage.items():
            self._inherited[name] = _Inherited(pieces, max(each.persisted for each in pieces))
            self._absent[name] = now

    def replay(
        self,
        name: str,
        sequence_id: int,
        highest_sequence_id: int = NO_SEQUENCE,
        *,
        now: float,
        is_last_chunk: bool = True,
    ) -> None:
        """An entry of the log behind the snapshot; in log order, before anything is decided."""
        if not is_last_chunk:
            return
        producer = self._sequences_of(name)
        highest = max(sequence_id, highest_sequence_id)
        # The log behind the snapshot has a resend that filled a hole.
        producer.holes = _without(producer.holes, [SequenceSpan(sequence_id, highest)])
        producer.pushed = producer.persisted = max(producer.persisted, highest)
        # To the end of the order: its last message is more recent than those before.
        self._absent.pop(name, None)
        self._absent[name] = now

    # --- parts

    def check_invariants(self) -> None:
        for name, producer in self._producers.items():
            pushed, persisted = producer.pushed, producer.persisted
            if persisted > pushed or (producer.is_idle and persisted != pushed):
                raise InvariantBroken(f"{name}: persisted {persisted}, pushed {pushed}")
            before = NO_SEQUENCE
            for hole in producer.holes:
                if not before < hole.first <= hole.last or hole.first > pushed:
                    raise InvariantBroken(f"{name}: hole {hole} after {before}, pushed {pushed}")
                before = hole.last
        for inherited in self._inherited.values():
            for piece in inherited.pieces:
                piece.check_invariants()
        if not self._absent.keys() <= self._producers.keys() | self._inherited.keys():
            raise InvariantBroken("an absent producer has no sequences")

    def _settled(self, name: str, sequence_id: int) -> tuple[DedupFastPath, SequenceSpan]:
        producer = self._producers.get(name)
        if producer is None or producer.is_idle:
            raise InvariantBroken(f"{name}: nothing is in flight, settled {sequence_id}")
        # Invariant 4: settled in the order of decisions, so it is the first.
        sent = producer.in_flight.popleft()
        if sent.first != sequence_id:
            raise InvariantBroken(f"{name}: settled {sequence_id}, the next one is {sent.first}")
        if sent in producer.filling:
            producer.filling.remove(sent)
        return producer, sent


def _missing(producer: DedupFastPath) -> list[SequenceSpan]:
    """What is not stored of the sequences up to the last persisted one."""
    persisted = producer.persisted
    missing = sorted([*producer.holes, *producer.doubtful])
    found: list[SequenceSpan] = []
    for low, high, needed in missing:
        # Holes and doubtful spans may overlap: the later one begins behind the earlier.
        first, last = max(low, found[-1].last + 1 if found else low), min(high, persisted)
        if first <= last:
            found.append(SequenceSpan(first, last, needed))
    return found


def _above(spans: Iterable[SequenceSpan], sequence_id: int) -> list[SequenceSpan]:
    return [
        each._replace(first=max(each.first, sequence_id + 1))
        for each in spans
        if each.last > sequence_id
    ]


def _without(spans: Sequence[SequenceSpan], gone: Sequence[SequenceSpan]) -> list[SequenceSpan]:
    """What is left of spans without these sequences, which are ascending."""
    rest: list[SequenceSpan] = []
    for low, high, needed in spans:
        at = bisect_left(gone, low, key=_last)
        while at < len(gone) and gone[at].first <= high:
            if low < gone[at].first:
                rest.append(SequenceSpan(low, gone[at].first - 1, needed))
            low = gone[at].last + 1
            at += 1
        if low <= high:
            rest.append(SequenceSpan(low, high, needed))
    return rest


def _last(span: SequenceSpan) -> int:
    return span.last
