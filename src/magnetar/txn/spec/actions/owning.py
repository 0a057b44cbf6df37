"""Ownership of a segment: take-over and recovery, trim, seal, dispatch (pure).

Owns: the phases of a recovery (`phases`), and everything that an owner does to a segment as a
whole. Recovery: fence the former ledgers and start a new one; read the pins; read the headers,
adopting the pin of each open transaction by compare-and-set; read the aborted records; open the
gate. Within a phase the records come in any order.
"""

from __future__ import annotations

from collections.abc import Iterator

from magnetar.txn.spec.actions.publishing import appended, ceiling
from magnetar.txn.spec.state import (
    ABORTED,
    ENTRY_MAX,
    MISSING,
    NO_PIN,
    NOWHERE,
    OPEN,
    PLAIN,
    UNKNOWN,
    Ledger,
    Owner,
    Pin,
    Position,
    Segment,
    State,
    Work,
    last_position,
    ledger_of,
    next_position,
    put,
    with_owner,
    with_segment,
    with_work,
    without_owner,
    works,
)
from magnetar.txn.spec.world import Actions, Steps, World, is_final, look

ACTIONS = Actions("segment owner")


def phases(world: World) -> tuple[str, ...]:
    """The order of a recovery."""
    # Each wrong order is a rule switched off; the last line is the protocol.
    if not world.rules.fence_before_pins:
        return ("pins", "fence", "headers", "aborted", "serving")
    if not world.rules.pins_before_aborted:
        return ("fence", "aborted", "pins", "headers", "serving")
    return ("fence", "pins", "headers", "aborted", "serving")


def new_owner(world: World, epoch: int) -> Owner:
    txns = world.scenario.txns
    return Owner(
        epoch=epoch,
        ledger=0,
        phase=phases(world)[0],
        left=(True,) * txns,
        work=(Work(),) * txns,
        aborted=(NOWHERE,) * txns,
        gate=not world.rules.gate_shut_until_recovered,
    )


@ACTIONS("own.load", "write", "a broker takes the segment: epoch + 1; the former owner lives on")
def own_load(world: World, state: State) -> Steps:
    for number, segment in enumerate(state.segments):
        owned = segment.owners[-1:] and segment.owners[-1].epoch == segment.epoch
        # Nobody serves a pin of a finished transaction: GC loads the segment ('no leak').
        asked = world.rules.gc_loads_owner and not owned and _is_wanted(state, number)
        if not state.budget.loads and not asked:
            continue
        loads = max(0, state.budget.loads - 1)
        # One zombie at most keeps the world small.
        former = segment.owners[-1:] if world.scenario.zombies else ()
        epoch = segment.epoch + 1
        taken = segment._replace(epoch=epoch, owners=(*former, new_owner(world, epoch)))
        after = with_segment(state, number, taken)
        yield (
            f"segment {number}, epoch {epoch}",
            after._replace(budget=state.budget._replace(loads=loads)),
        )


def _is_wanted(state: State, number: int) -> bool:
    """Does GC need an owner here: is there a pin of a finished transaction?"""
    return any(
        pin != NO_PIN and is_final(state.headers[txn])
        for txn, pin in enumerate(state.segments[number].pins)
    )


@ACTIONS("own.crash", "fault", "the present owner is gone, with all that it had in memory")
def own_crash(world: World, state: State) -> Steps:
    if not state.budget.crashes:
        return
    left = state._replace(budget=state.budget._replace(crashes=state.budget.crashes - 1))
    for number, segment in enumerate(state.segments):
        if segment.owners and segment.owners[-1].epoch == segment.epoch:
            after = without_owner(left, number, len(segment.owners) - 1)
            yield f"segment {number}, epoch {segment.epoch}", after


@ACTIONS("recover.fence", "write", "former ledgers are fenced and closed; a new one is recorded")
def recover_fence(world: World, state: State) -> Steps:
    for number, at, segment, owner in _owners(state, "fence"):
        # Superseded before it could fence: a later owner is at work already.
        if segment.epoch != owner.epoch:
            yield f"segment {number}, epoch {owner.epoch} stops", without_owner(state, number, at)
            continue
        ledgers = tuple(ledger._replace(fenced=True) for ledger in segment.ledgers)
        own = 0
        # A sealed segment takes no entries: its owner serves reads, with no ledger of its own.
        if not segment.sealed:
            if world.rules.new_ledger_per_load or not ledgers:
                ledgers = (*ledgers, Ledger(owner.epoch, False, ()))
            else:
                ledgers = (*ledgers[:-1], ledgers[-1]._replace(fenced=False))
            own = ledgers[-1].number
        fenced = with_segment(state, number, segment._replace(ledgers=ledgers))
        done = owner._replace(ledger=own, left=(False,) * len(owner.left))
        yield _place(number, owner), with_owner(fenced, number, at, _advanced(world, done))


@ACTIONS("recover.pin", "read", "a pin of this segment is read")
def recover_pin(world: World, state: State) -> Steps:
    for number, at, segment, owner in _owners(state, "pins"):
        for txn in _left(owner):
            pin = segment.pins[txn]
            # Being adopted in this phase (only without `adopt_only_open`).
            if owner.work[txn].stage != "idle":
                continue
            # A later owner has adopted it: this recovery is a zombie's.
            if pin.epoch > owner.epoch:
                yield f"{_place(number, owner)} stops", without_owner(state, number, at)
                continue
            seen = Work("seen", _recovered_bound(world, segment, owner, pin), pin)
            after = _done(world, owner, txn, Work() if pin == NO_PIN else seen)
            if pin != NO_PIN and _adopts_unread(world):
                after = owner._replace(work=put(owner.work, txn, seen._replace(stage="open")))
            yield f"t{txn} at {_place(number, owner)}", with_owner(state, number, at, after)


def _adopts_unread(world: World) -> bool:
    return world.rules.adopt_pins and not world.rules.adopt_only_open


def _recovered_bound(world: World, segment: Segment, owner: Owner, pin: Pin) -> Position:
    return pin.bound if world.rules.pin_holds_bound else next_position(segment, owner)


@ACTIONS("recover.header", "read", "the header of a found pin is read (a member's group first)")
def recover_header(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        # Outside of recovery: a pin that a scan found for GC.
        if work.stage != "seen" or owner.phase not in ("headers", "serving"):
            continue
        done, said = look(world, state, txn, work.peeked)
        place = f"t{txn} at {_place(number, owner)}: {said or 'missing'}"
        if not done:
            yield place, with_work(state, number, at, txn, work._replace(peeked=said))
            continue
        after, finished = _judged(world, work._replace(peeked=UNKNOWN), said)
        moved = _done(world, owner, txn, after) if finished else None
        # Open or missing: one more step is needed before this phase is done for it.
        if moved is None:
            yield place, with_work(state, number, at, txn, after)
        else:
            yield place, with_owner(state, number, at, moved)


def _judged(world: World, work: Work, said: str) -> tuple[Work, bool]:
    # Three answers: open is adopted, decided is materialised once serving; missing is either a
    # finished transaction whose pin has just gone, or a late write.
    if said == OPEN:
        adopts = world.rules.adopt_pins and world.rules.adopt_only_open
        return work._replace(stage="open" if adopts else "pinned"), not adopts
    if said != MISSING:
        return work._replace(stage="pinned", decision=said), True
    if world.rules.reread_pin:
        return work._replace(stage="missing"), False
    return work._replace(stage="pinned", decision=ABORTED, late=True), True


@ACTIONS("recover.adopt", "write", "the pin of an open transaction gets the new owner's epoch")
def recover_adopt(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        if work.stage != "open":
            continue
        segment = state.segments[number]
        found = segment.pins[txn]
        place = f"t{txn} at {_place(number, owner)}"
        unread = owner.phase == "pins"
        # By compare-and-set, with three ends: a later owner was here, it is as it
        # was read, or it is gone.
        if found.epoch > owner.epoch:
            yield f"{place} stops", without_owner(state, number, at)
        elif found == work.pin:
            pin = Pin(owner.epoch, work.pin.bound)
            adopted = with_segment(
                state, number, segment._replace(pins=put(segment.pins, txn, pin))
            )
            after = work._replace(stage="seen" if unread else "pinned", pin=pin)
            yield place, with_owner(adopted, number, at, _done(world, owner, txn, after))
        else:
            # Its former owner deleted it: the header is final by now, or gone.
            again = work._replace(stage="seen")
            kept = owner._replace(work=put(owner.work, txn, again))
            after_loss = _done(world, owner, txn, again) if unread else kept
            yield f"{place}: gone", with_owner(state, number, at, after_loss)


@ACTIONS("recover.reread", "read", "a pin without header is read again: aborted, or it is gone")
def recover_reread(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        if work.stage != "missing":
            continue
        found = state.segments[number].pins[txn]
        late = work._replace(stage="pinned", decision=ABORTED, pin=found, late=True)
        # Gone: its former owner has materialised it, and the aborted record tells how. Still there:
        # a late write, which aborts what its writer's epoch could append.
        after = Work() if found == NO_PIN else late
        place = f"t{txn} at {_place(number, owner)}: {'gone' if found == NO_PIN else 'there'}"
        yield place, with_owner(state, number, at, _done(world, owner, txn, after))


@ACTIONS("recover.aborted", "read", "an aborted record of this segment is read")
def recover_aborted(world: World, state: State) -> Steps:
    for number, at, segment, owner in _owners(state, "aborted"):
        for txn in _left(owner):
            # Read last: an abort that was recorded while pins were read is not missed.
            known = max(owner.aborted[txn], segment.aborted[txn])
            read = owner._replace(aborted=put(owner.aborted, txn, known))
            after = _done(world, read, txn, owner.work[txn])
            yield f"t{txn} at {_place(number, owner)}", with_owner(state, number, at, after)


@ACTIONS("rescan", "read", "GC asked: the owner finds a pin that it does not know")
def rescan(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        segment = state.segments[number]
        pin = segment.pins[txn]
        # What this owner tracks it finishes by itself; the scan is for what others left here.
        known = work.stage != "idle" or work.flying or pin == NO_PIN
        if known or owner.phase != "serving" or segment.epoch != owner.epoch:
            continue
        if is_final(state.headers[txn]):
            after = Work("seen", pin.bound, pin)
            yield f"t{txn} at {_place(number, owner)}", with_work(state, number, at, txn, after)


@ACTIONS("publish.plain", "write", "a plain message is appended, during recovery too")
def publish_plain(world: World, state: State) -> Steps:
    if not state.budget.plains:
        return
    sent = state._replace(budget=state.budget._replace(plains=state.budget.plains - 1))
    for number, segment in enumerate(state.segments):
        for at, owner in enumerate(segment.owners):
            ledger = ledger_of(segment, owner.ledger)
            if ledger is None or ledger.fenced:
                continue
            after = with_segment(sent, number, appended(segment, ledger, PLAIN))
            # (The failure that the rule is about: a publish works the ceiling
            # out, and so opens the gate.)
            if not world.rules.plain_publish_keeps_gate:
                after = with_owner(after, number, at, owner._replace(gate=True))
            yield _place(number, owner), after


@ACTIONS("trim", "write", "the first ledger goes: closed, and below everything that is pinned")
def trim(world: World, state: State) -> Steps:
    if not state.budget.trims:
        return
    for number, segment, owner in _present(state):
        first = segment.ledgers[0] if segment.ledgers else None
        if first is None or first.number == owner.ledger or not first.fenced:
            continue
        # In memory every tracked transaction has its bound, also one whose pin is still on its way.
        bounds = [work.bound for work in owner.work if work.stage != "idle"]
        if world.rules.trim_below_pins and bounds and min(bounds) <= (first.number, ENTRY_MAX):
            continue
        shorter = with_segment(state, number, segment._replace(ledgers=segment.ledgers[1:]))
        budget = state.budget._replace(trims=state.budget.trims - 1)
        yield f"segment {number}, ledger {first.number}", shorter._replace(budget=budget)


@ACTIONS("sweep", "write", "an aborted record is deleted whose entries were trimmed")
def sweep(world: World, state: State) -> Steps:
    for number, segment, owner in _present(state):
        kept = segment.ledgers[0].number if segment.ledgers else ENTRY_MAX
        # Only below what is really gone: an entry without pin and aborted
        # record counts as committed.
        limit = kept if world.rules.trim_data_first else max(kept, owner.ledger)
        for txn, last in enumerate(segment.aborted):
            if last == NOWHERE or last[0] >= limit:
                continue
            swept = segment._replace(aborted=put(segment.aborted, txn, NOWHERE))
            yield f"t{txn} at {_place(number, owner)}", with_segment(state, number, swept)


@ACTIONS("seal", "write", "a split or merge seals the segment: its appends are done, no more come")
def seal(world: World, state: State) -> Steps:
    if not state.budget.seals:
        return
    for number, segment, owner in _present(state):
        # Sealing waits for appends, not for transactions: an open one stays pinned
        # ('sealing is irrelevant').
        if segment.sealed or number or any(work.flying for work in owner.work):
            continue
        ledgers = tuple(ledger._replace(fenced=True) for ledger in segment.ledgers)
        sealed = segment._replace(ledgers=ledgers, sealed=True)
        at = len(segment.owners) - 1
        after = with_owner(
            with_segment(state, number, sealed), number, at, owner._replace(ledger=0)
        )
        budget = state.budget._replace(seals=state.budget.seals - 1)
        yield f"segment {number}", after._replace(budget=budget)


@ACTIONS("dispatch", "read", "a woken dispatcher reads up to the ceiling and goes to sleep there")
def dispatch(world: World, state: State) -> Steps:
    if not world.scenario.dispatch:
        return
    for number, segment, owner in _present(state):
        if owner.awake:
            seen = readable_end(world, segment, owner)
            asleep = owner._replace(seen=seen, awake=False)
            yield _place(number, owner), with_owner(state, number, len(segment.owners) - 1, asleep)


def readable_end(world: World, segment: Segment, owner: Owner) -> Position:
    """The ceiling, or just past the last entry if that is lower."""
    last = last_position(segment)
    return min(ceiling(world, owner), (last[0], last[1] + 1))


def _owners(state: State, phase: str) -> Iterator[tuple[int, int, Segment, Owner]]:
    for number, segment in enumerate(state.segments):
        for at, owner in enumerate(segment.owners):
            if owner.phase == phase:
                yield number, at, segment, owner


def _present(state: State) -> Iterator[tuple[int, Segment, Owner]]:
    for number, segment in enumerate(state.segments):
        if segment.owners:
            owner = segment.owners[-1]
            if owner.phase == "serving" and owner.epoch == segment.epoch:
                yield number, segment, owner


def _left(owner: Owner) -> list[int]:
    return [txn for txn, left in enumerate(owner.left) if left]


def _done(world: World, owner: Owner, txn: int, work: Work) -> Owner:
    """The owner after its phase is done for one transaction."""
    done = owner._replace(work=put(owner.work, txn, work))
    if owner.phase == "serving":
        return done
    return _advanced(world, done._replace(left=put(owner.left, txn, False)))


def _advanced(world: World, owner: Owner) -> Owner:
    """The owner in its next phase, if nothing is left of this one."""
    if any(owner.left):
        return owner
    order = phases(world)
    phase = order[order.index(owner.phase) + 1]
    # The gate opens here and nowhere else ('gate').
    if phase == "serving":
        return owner._replace(phase=phase, gate=True)
    # Only found pins have a header to read; with none of them the phase is over at once.
    if phase == "headers":
        left = tuple(work.stage == "seen" for work in owner.work)
        return _advanced(world, owner._replace(phase=phase, left=left))
    return owner._replace(phase=phase, left=(True,) * len(owner.left))


def _place(number: int, owner: Owner) -> str:
    return f"segment {number}, owner epoch {owner.epoch}"
