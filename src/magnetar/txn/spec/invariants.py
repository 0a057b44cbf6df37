"""The twelve invariants of transactions as checks on states and steps of the model (pure).

Owns: `INVARIANTS`. Each has a name and up to three checks: of every state, of every step (what was,
which action, what is), and of a world at rest, in which nothing is left to do. A check yields what
is wrong, in words. The checks look at the ghost `outcomes`, which no action can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

from magnetar.txn.spec import names
from magnetar.txn.spec.actions.owning import readable_end
from magnetar.txn.spec.actions.publishing import ceiling, holds
from magnetar.txn.spec.state import (
    ABORTED,
    COMMITTED,
    EVERYTHING,
    MISSING,
    NO_PIN,
    NOWHERE,
    OPEN,
    PLAIN,
    UNKNOWN,
    Owner,
    Segment,
    State,
    ack_works,
    entries,
    ledger_of,
    works,
)
from magnetar.txn.spec.world import World, has_ops, truth

Problems: TypeAlias = Iterator[str]


def _read_committed(world: World, state: State) -> Problems:
    for number, segment in enumerate(state.segments):
        for owner in segment.owners:
            limit = ceiling(world, owner)
            for position, txn in entries(segment):
                # Above the ceiling nothing is shown, and a zombie cannot read
                # what a later ledger holds.
                if txn == PLAIN or position >= limit or _is_beyond(owner, position[0]):
                    continue
                # What stands at or below the last aborted position is hidden, as consumers get it.
                shown = position > owner.aborted[txn]
                if shown and state.outcomes[txn] != COMMITTED:
                    outcome = state.outcomes[txn] or OPEN
                    yield (
                        f"segment {number}, owner epoch {owner.epoch} shows entry {position} "
                        f"of t{txn}, which is {outcome}"
                    )


def _is_beyond(owner: Owner, ledger: int) -> bool:
    """A former owner does not know the ledgers of later ones."""
    return bool(owner.ledger) and ledger > owner.ledger


def _one_decision(world: World, state: State) -> Problems:
    for txn, outcome in enumerate(state.outcomes):
        said = truth(world, state, txn)
        # MISSING is no contradiction: GC has forgotten a decision, it has not changed it.
        if outcome != UNKNOWN and said not in (MISSING, outcome):
            yield f"t{txn} was {outcome} and is {said}"
    for number, _, txn, owner, work in works(state):
        known = work.decision
        # A late pin is taken for aborted whatever the outcome: there is nothing under it to show.
        if known != UNKNOWN and not work.late and known != state.outcomes[txn]:
            outcome = state.outcomes[txn] or OPEN
            place = f"segment {number}, owner epoch {owner.epoch}"
            yield f"{place} takes t{txn}, which is {outcome}, for {known}"


def _all_or_nothing(world: World, state: State) -> Problems:
    for number, segment in enumerate(state.segments):
        for position, txn in entries(segment):
            if txn == PLAIN or state.outcomes[txn] != COMMITTED:
                continue
            # In the record, which the next owner believes, and in the
            # memory of those who serve now.
            if position <= segment.aborted[txn]:
                yield f"committed entry {position} of t{txn} in segment {number} counts as aborted"
            for owner in segment.owners:
                if position <= owner.aborted[txn]:
                    yield f"owner epoch {owner.epoch} hides committed entry {position} of t{txn}"
    for listed in world.scenario.listed:
        if {state.outcomes[txn] for txn in listed} >= {COMMITTED, ABORTED}:
            yield "of the transactions of one COMMIT_GROUP some are committed and some aborted"
    yield from _acks_agree(state)


def _acks_agree(state: State) -> Problems:
    committed = [txn for txn, outcome in enumerate(state.outcomes) if outcome == COMMITTED]
    # Intents of committed transactions are all that the cursor may hold. Answers are counted apart:
    # a message that two of them were told "ok" for was consumed twice.
    acked: set[tuple[int, int]] = set()
    answered: dict[tuple[int, int], int] = {}
    for txn in committed:
        acked.update(state.intents[txn])
        for ack in state.answered[txn]:
            if ack in answered:
                yield f"message {ack[1]} was acknowledged by t{answered[ack]} and by t{txn}"
            answered[ack] = txn
    cursor = state.subscription.cursor
    for message in cursor.acked:
        if (cursor.incarnation, message) not in acked:
            yield f"the cursor holds message {message}, which no committed transaction acknowledged"
    for owner in state.subscription.owners:
        for message in owner.acked:
            if (owner.incarnation, message) not in acked:
                yield f"owner epoch {owner.epoch} counts message {message} as acknowledged"
    # Held back for nobody: no intent, no command under way, and its transaction open. Such a
    # message would never be delivered again.
    for _, txn, owner, work in ack_works(state):
        durable = {op.message for op in state.subscription.ops if op.txn == txn}
        asked = {work.asked[1]} if work.command != "none" else set()
        present = owner.epoch == state.subscription.epoch and work.stage == "pending"
        for message in set(work.pending) - durable - asked:
            if present and _is_open(state, txn):
                yield f"message {message} is withheld for t{txn}, which has no intent"


def _pin_before_entry(world: World, state: State) -> Problems:
    for number, segment in enumerate(state.segments):
        for position, txn in entries(segment):
            # After the decision the pin may go; 'aborted stays known' takes over from there.
            if txn == PLAIN or state.outcomes[txn] != UNKNOWN:
                continue
            pin = segment.pins[txn]
            if pin == NO_PIN or pin.bound > position:
                yield f"entry {position} of open t{txn} in segment {number} is not pinned"


def _gate(world: World, state: State) -> Problems:
    for number, segment in enumerate(state.segments):
        for owner in segment.owners:
            place = f"segment {number}, owner epoch {owner.epoch}"
            if owner.gate and owner.phase != "serving":
                yield f"{place}: the gate is open before recovery has finished"
            # A zombie's ceiling concerns nobody; what it shows is checked by 'read committed'.
            if owner.epoch == segment.epoch:
                yield from (f"{place}: {problem}" for problem in _held(world, segment, owner))


def _held(world: World, segment: Segment, owner: Owner) -> Problems:
    for txn, work in enumerate(owner.work):
        # Recovery finds out by itself that a pin was deleted under it.
        recovers = work.stage in ("seen", "open", "missing") or work.decision != UNKNOWN
        idle = not (recovers or work.waiting or work.flying)
        if idle and holds(world, work) and segment.pins[txn] == NO_PIN:
            yield f"t{txn} holds the ceiling without a pin and without work"


def _aborted_stays_known(world: World, state: State) -> Problems:
    for number, segment in enumerate(state.segments):
        for position, txn in entries(segment):
            if txn == PLAIN or state.outcomes[txn] != ABORTED:
                continue
            pin = segment.pins[txn]
            pinned = pin != NO_PIN and pin.bound <= position
            if not pinned and segment.aborted[txn] < position:
                yield f"entry {position} of aborted t{txn} in segment {number} is not known as such"


def _intents_outlive_cursor(world: World, state: State) -> Problems:
    cursor = state.subscription.cursor
    for txn, outcome in enumerate(state.outcomes):
        if outcome != COMMITTED:
            continue
        kept = {(op.incarnation, op.message) for op in state.subscription.ops if op.txn == txn}
        for incarnation, message in state.answered[txn]:
            # From before a seek, which takes acks back on purpose; or durable where it belongs.
            if incarnation != cursor.incarnation or message in cursor.acked:
                continue
            if (incarnation, message) not in kept:
                yield f"the ack of message {message} by committed t{txn} is nowhere durable"


def _gc_never_forces(world: World, before: State, action: str, after: State) -> Problems:
    # The step that reads the ops decides; an op that comes after it is a zombie's, and harmless.
    if action != "gc.check":
        return
    for txn, collectable in enumerate(after.collectable):
        if collectable and not before.collectable[txn] and has_ops(before, txn):
            yield f"the header of t{txn} is given up while op records are left"


def _fence(world: World, before: State, action: str, after: State) -> Problems:
    if action not in ("publish.submit", "publish.more"):
        return
    # `told` stands for an owner that was told and could not remember: it counts as knowing.
    for (number, _, txn, owner, old), (*_, new) in zip(works(before), works(after), strict=True):
        if new.flying and not old.flying and (old.decision != UNKNOWN or old.told):
            yield (
                f"segment {number}, owner epoch {owner.epoch} appends for t{txn} "
                "after it was told the decision"
            )


def _sealing_irrelevant(world: World, before: State, action: str, after: State) -> Problems:
    if action != "trim":
        return
    for number, segment in enumerate(before.segments):
        for ledger in segment.ledgers:
            if ledger_of(after.segments[number], ledger.number) is not None:
                continue
            for txn in ledger.entries:
                # Those of a decided one may go; an open one's may yet have to be shown.
                if txn != PLAIN and _is_open(before, txn):
                    yield f"ledger {ledger.number} is trimmed with an entry of open t{txn}"


def _is_open(state: State, txn: int) -> bool:
    return state.outcomes[txn] == UNKNOWN


def _no_spin(world: World, before: State, action: str, after: State) -> Problems:
    if action != "dispatch":
        return
    for old, new in zip(before.segments, after.segments, strict=True):
        for was, now in zip(old.owners, new.owners, strict=True):
            # A wake-up that found nothing new is what a polling dispatcher would do all day.
            if was.awake and not now.awake and was.seen == now.seen:
                yield "a dispatcher looked although nothing had changed"


def _nothing_missed(world: World, state: State) -> Problems:
    if not world.scenario.dispatch:
        return
    for number, segment in enumerate(state.segments):
        # Only the present one: it is the one that consumers are connected to.
        for owner in segment.owners[-1:]:
            if owner.phase == "serving" and owner.seen != readable_end(world, segment, owner):
                yield f"segment {number}: the dispatcher sleeps below the ceiling"


def _no_leak(world: World, state: State) -> Problems:
    for txn, header in enumerate(state.headers):
        if header != MISSING:
            yield f"the header of t{txn} ({header}) stays"
    for number, segment in enumerate(state.segments):
        yield from _segment_leaks(world, state, number, segment)
    for op in state.subscription.ops:
        # An op that came after its header was collected stays until the next load.
        if op.epoch == state.subscription.epoch or state.headers[op.txn] != MISSING:
            yield f"an ack op of t{op.txn} stays"
    for _, txn, owner, work in ack_works(state):
        if owner.epoch == state.subscription.epoch and work.stage != "idle":
            yield f"the subscription still works on t{txn} ({work.stage})"


def _segment_leaks(world: World, state: State, number: int, segment: Segment) -> Problems:
    for txn, pin in enumerate(segment.pins):
        # A zombie's put that came after GC: the next load of the segment
        # deletes it, see `reread_pin`.
        late = pin.epoch < segment.epoch and state.headers[txn] == MISSING
        if pin != NO_PIN and not late:
            yield f"the pin of t{txn} in segment {number} stays"
    first = segment.ledgers[0].number if segment.ledgers else EVERYTHING[0]
    owners = [owner for owner in segment.owners if owner.epoch == segment.epoch]
    for txn, last in enumerate(segment.aborted):
        if owners and last != NOWHERE and last[0] < first:
            yield f"the aborted record of t{txn} in segment {number} stays without data"
    for owner in owners:
        if ceiling(world, owner) != EVERYTHING:
            yield f"the ceiling of segment {number} stays at {ceiling(world, owner)}"


class Invariant(NamedTuple):
    """A promise, and how it is checked."""

    name: str
    text: str
    of_state: Callable[[World, State], Problems] | None = None
    of_step: Callable[[World, State, str, State], Problems] | None = None
    at_rest: Callable[[World, State], Problems] | None = None


INVARIANTS: Final = (
    Invariant(
        names.READ_COMMITTED,
        "No owner shows an entry of a transaction that is open or aborted.",
        of_state=_read_committed,
    ),
    Invariant(
        names.ONE_DECISION,
        "The outcome that the records tell never changes, and nobody believes another.",
        of_state=_one_decision,
    ),
    Invariant(
        names.ALL_OR_NOTHING,
        "Entries of a committed transaction are never hidden; the cursor holds acks of committed "
        "transactions only; no two of them acknowledged one message; a message is withheld only "
        "for an intent; what one COMMIT_GROUP lists has one outcome.",
        of_state=_all_or_nothing,
    ),
    Invariant(
        names.PIN_BEFORE_ENTRY,
        "Each entry of an undecided transaction has a pin at or below it.",
        of_state=_pin_before_entry,
    ),
    Invariant(
        names.GATE,
        "Nothing may be read before recovery has finished, and nothing holds the ceiling but a pin "
        "or a first append in flight.",
        of_state=_gate,
    ),
    Invariant(
        names.ABORTED_STAYS_KNOWN,
        "Each entry of an aborted transaction has a pin, or an aborted record that reaches it.",
        of_state=_aborted_stays_known,
    ),
    Invariant(
        names.INTENTS_OUTLIVE_CURSOR,
        "An answered ack of a committed transaction is in the durable cursor or in an op record.",
        of_state=_intents_outlive_cursor,
    ),
    Invariant(
        names.GC_NEVER_FORCES,
        "A header is given up only when no op record of it is left.",
        of_step=_gc_never_forces,
    ),
    Invariant(
        names.FENCE,
        "No append is submitted by an owner that was told the decision.",
        of_step=_fence,
    ),
    Invariant(
        names.SEALING_IRRELEVANT,
        "No entry of an undecided transaction is trimmed; with seals, splits and owner changes "
        "the others hold.",
        of_step=_sealing_irrelevant,
    ),
    Invariant(
        names.NO_POLL,
        "A dispatcher looks only when there is something new, and never sleeps below the ceiling.",
        of_step=_no_spin,
        at_rest=_nothing_missed,
    ),
    Invariant(
        names.NO_LEAK,
        "At rest no header, op or work is left, no ceiling is held, and no aborted record stands "
        "without data.",
        at_rest=_no_leak,
    ),
)
