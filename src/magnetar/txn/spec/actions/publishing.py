"""A segment's owner and the messages of a transaction: publish, learn, materialise (pure).

Owns: the life of a `Work`, which the table `STAGES` describes, and `ceiling`: how far a segment may
be read. All of it is one writer's work, but every read, write and append it waits for is a step of
its own, so that a decision or a new owner may come in between.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from magnetar.txn.spec.state import (
    ABORTED,
    COMMITTED,
    ENTRY_MAX,
    EVERYTHING,
    NO_PIN,
    NOWHERE,
    OPEN,
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
from magnetar.txn.spec.world import Actions, Steps, World, is_final, look, truth

ACTIONS = Actions("segment owner")


class Edge(NamedTuple):
    """A change of stage, for the diagram."""

    before: str
    after: str
    action: str


STAGES: Final = {
    "idle": "nothing is known of the transaction here",
    "tracked": "a message came; the ceiling is held; the header is being read",
    "cleared": "the header was OPEN; the pin is on its way",
    "pinned": "the pin is durable; messages are appended",
    "recorded": "aborted, and the aborted record is durable",
    "seen": "recovery: a pin was found; its header is to be read",
    "open": "recovery: the header is OPEN; the pin is to be adopted",
    "missing": "recovery: there is no header; the pin is to be read again",
}
EDGES: Final = (
    Edge("idle", "tracked", "publish.track"),
    Edge("tracked", "cleared", "publish.read: OPEN"),
    Edge("tracked", "idle", "publish.read: refused"),
    Edge("cleared", "pinned", "publish.pin"),
    Edge("cleared", "idle", "publish.pin-fails"),
    Edge("pinned", "pinned", "publish.submit, publish.land, learn"),
    Edge("pinned", "idle", "unpin (committed)"),
    Edge("pinned", "recorded", "abort.record"),
    Edge("recorded", "idle", "unpin"),
    Edge("idle", "seen", "recover.pin, rescan"),
    Edge("seen", "open", "recover.header: OPEN"),
    Edge("open", "pinned", "recover.adopt"),
    Edge("open", "seen", "recover.adopt: gone"),
    Edge("seen", "pinned", "recover.header: decided"),
    Edge("seen", "missing", "recover.header: missing"),
    Edge("missing", "pinned", "recover.reread: still there"),
    Edge("missing", "idle", "recover.reread: gone"),
)
# All stages in which entries may stand, or come to stand, at the bound: from `tracked` on, before
# the header is even read. The last two exist only without a rule.
HOLDING: Final = frozenset(
    {"tracked", "cleared", "pinned", "seen", "open", "missing", "stranded", "unpinned"}
)


def holds(world: World, work: Work) -> bool:
    """Does this transaction keep the ceiling below its bound?"""
    # Committed: its entries are to be seen, though the pin is still there.
    if work.stage not in HOLDING or work.decision == COMMITTED:
        return False
    # Aborted: held until the aborted record can hide its entries ('aborted stays known').
    return work.decision != ABORTED or world.rules.aborted_before_unpin


def ceiling(world: World, owner: Owner) -> Position:
    """What lies below this position may be read; `EVERYTHING` if nothing holds it."""
    if not owner.gate:
        return NOWHERE
    bounds = [work.bound for work in owner.work if holds(world, work)]
    return min(bounds, default=EVERYTHING)


@ACTIONS("publish.track", "memory", "a message of a transaction comes: track it, hold the ceiling")
def publish_track(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        # Idle, though an append of it still flies: it was ended here a moment ago.
        if work.stage != "idle" or work.flying or not _takes(world, state, number, txn, owner):
            continue
        bound = next_position(state.segments[number], owner)
        # ("peeking" is what an owner does that reads the header before it tracks.)
        stage = "tracked" if world.rules.track_before_read else "peeking"
        after = Work(stage, bound, waiting=True)
        yield (
            _place(number, owner, txn),
            _sent(with_work(state, number, at, txn, after), txn, number),
        )


@ACTIONS("publish.more", "memory", "a later message of a pinned transaction is submitted at once")
def publish_more(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        free = work.stage == "pinned" and work.decision == UNKNOWN and not work.waiting
        if free and not work.flying and _takes(world, state, number, txn, owner):
            after = with_work(state, number, at, txn, work._replace(flying=True))
            yield _place(number, owner, txn), _sent(after, txn, number)


def _takes(world: World, state: State, number: int, txn: int, owner: Owner) -> bool:
    if not state.sends[txn][number] or owner.phase != "serving" or not owner.ledger:
        return False
    # Producers go to a child only after the split has sealed its parent.
    return number == 0 or not world.scenario.child or state.segments[0].sealed


def _sent(state: State, txn: int, number: int) -> State:
    sends = put(state.sends[txn], number, state.sends[txn][number] - 1)
    return state._replace(sends=put(state.sends, txn, sends))


@ACTIONS("publish.read", "read", "the header is read: OPEN, or the message is refused")
def publish_read(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        if work.stage not in ("tracked", "peeking"):
            continue
        done, said = look(world, state, txn, work.peeked)
        if not done:
            after = work._replace(peeked=said)
        # Decided, or no such transaction: nothing was stored, nothing is to be undone.
        elif said != OPEN:
            after = Work()
        else:
            stage = "cleared" if work.stage == "tracked" else "peeked"
            after = work._replace(stage=stage, peeked=UNKNOWN)
        yield f"{_place(number, owner, txn)}: {said}", with_work(state, number, at, txn, after)


@ACTIONS("publish.join", "memory", "(only without track_before_read) tracked after the read")
def publish_join(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        if work.stage == "peeked":
            after = work._replace(stage="cleared")
            yield _place(number, owner, txn), with_work(state, number, at, txn, after)


@ACTIONS("publish.pin", "write", "the pin is created; an older one found there is adopted")
def publish_pin(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        if work.stage != "cleared":
            continue
        segment = state.segments[number]
        found = segment.pins[txn]
        # A later owner has adopted it: this one is a zombie that has not noticed ('fence').
        if found.epoch > owner.epoch and world.rules.stale_owner_never_adopts:
            yield f"{_place(number, owner, txn)} stops", without_owner(state, number, at)
            continue
        # Never raised: a former owner's entries may stand at the lower bound.
        bound = work.bound if found == NO_PIN else min(work.bound, found.bound)
        pin = Pin(owner.epoch, bound)
        after = work._replace(stage="pinned", bound=bound, pin=pin)
        pinned = with_segment(state, number, segment._replace(pins=put(segment.pins, txn, pin)))
        yield _place(number, owner, txn), with_work(pinned, number, at, txn, after)


@ACTIONS("publish.pin-fails", "fault", "the store refuses the pin; so is the message")
def publish_pin_fails(world: World, state: State) -> Steps:
    if not state.budget.failures:
        return
    failed = state._replace(budget=state.budget._replace(failures=state.budget.failures - 1))
    for number, at, txn, owner, work in works(state):
        if work.stage == "cleared" and not work.flying:
            stranded = work._replace(stage="stranded", waiting=False)
            # The client was refused, so nothing of it will come: to hold the
            # ceiling would be a leak.
            after = Work() if world.rules.untrack_when_pin_fails else stranded
            yield _place(number, owner, txn), with_work(failed, number, at, txn, after)


@ACTIONS("publish.submit", "memory", "pinned and still undecided: the message enters the ledger")
def publish_submit(world: World, state: State) -> Steps:
    ready = ("pinned",) if world.rules.pin_before_entry else ("pinned", "cleared")
    for number, at, txn, owner, work in works(state):
        if work.stage not in ready or not work.waiting:
            continue
        # The one check between the durable pin and the append: a decision that came while the pin
        # was written ends it here ('fence').
        decided = work.decision != UNKNOWN and world.rules.recheck_after_pin
        goes = bool(owner.ledger) and not decided
        after = work._replace(waiting=False, flying=goes)
        told = "" if goes else ": refused"
        yield _place(number, owner, txn) + told, with_work(state, number, at, txn, after)


@ACTIONS("publish.land", "write", "an entry becomes durable; in a fenced ledger the owner stops")
def publish_land(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        if not work.flying:
            continue
        segment = state.segments[number]
        ledger = ledger_of(segment, owner.ledger)
        # How a zombie learns that it is one: its ledger was fenced or is gone, and nothing it had
        # in flight is ever durable.
        if ledger is None or ledger.fenced:
            yield f"{_place(number, owner, txn)} stops", without_owner(state, number, at)
            continue
        landed = with_segment(state, number, appended(segment, ledger, txn))
        # Landed after its transaction was ended here: the decision covers it ('fence').
        after = Work() if work.stage == "idle" else work._replace(flying=False)
        yield _place(number, owner, txn), with_work(landed, number, at, txn, after)


def appended(segment: Segment, ledger: Ledger, txn: int) -> Segment:
    """The segment with one more entry in that ledger."""
    place = segment.ledgers.index(ledger)
    longer = ledger._replace(entries=(*ledger.entries, txn))
    return segment._replace(ledgers=put(segment.ledgers, place, longer))


@ACTIONS("learn", "read", "a decision is learnt (watch or re-reading) by an owner that tracks it")
def learn(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        if work.decision != UNKNOWN or work.told or owner.phase != "serving":
            continue
        if not is_final(truth(world, state, txn)):
            continue
        # Not tracked yet, so the news meets nobody; the ghost `told` remembers that it came.
        if work.stage == "peeked":
            after = work._replace(told=True)
            yield _place(number, owner, txn), with_work(state, number, at, txn, after)
        # From `cleared` on it is learnt, whatever is waited for; `tracked` is about to read it
        # anyway. A member takes two reads.
        elif work.stage in ("cleared", "pinned", "stranded"):
            done, said = look(world, state, txn, work.peeked)
            if done and not is_final(said):
                continue
            after = work._replace(decision=said, peeked=UNKNOWN)
            after = after if done else work._replace(peeked=said)
            yield f"{_place(number, owner, txn)}: {said}", with_work(state, number, at, txn, after)


@ACTIONS("abort.record", "write", "the aborted record: last position = the segment's end")
def abort_record(world: World, state: State) -> Steps:
    first = ("pinned",) if world.rules.aborted_before_unpin else ("unpinned",)
    for number, at, txn, owner, work in works(state):
        if work.stage not in first or work.decision != ABORTED or not _is_settled(world, work):
            continue
        # What recovery finds decided is materialised once it is over.
        if owner.phase != "serving":
            continue
        segment = state.segments[number]
        # The segment's end, not its own last entry: above it nothing of this transaction can stand.
        last = last_position(segment)
        # It outlived its header: what later epochs wrote under that id is
        # not what this pin is about.
        if work.late and world.rules.late_pin_covers_its_epoch:
            last = min(last, (work.pin.epoch, ENTRY_MAX))
        if world.rules.aborted_record_is_maximum:
            last = max(last, segment.aborted[txn])
        stored = segment._replace(aborted=put(segment.aborted, txn, last))
        known = owner._replace(aborted=put(owner.aborted, txn, max(last, owner.aborted[txn])))
        after = with_owner(with_segment(state, number, stored), number, at, known)
        done = work._replace(stage="recorded") if work.stage == "pinned" else Work()
        yield _place(number, owner, txn), with_work(after, number, at, txn, done)


@ACTIONS("unpin", "write", "the pin is deleted, if it is still as this owner knows it")
def unpin(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        if owner.phase != "serving" or not _may_unpin(world, work):
            continue
        segment = state.segments[number]
        after = state
        # Another version is a later owner's: it stays, and this owner is done all the same.
        if segment.pins[txn] == work.pin or not world.rules.conditional_delete:
            pins = put(segment.pins, txn, NO_PIN)
            after = with_segment(state, number, segment._replace(pins=pins))
        early = work.stage == "pinned" and work.decision == ABORTED
        done = work._replace(stage="unpinned") if early else Work(flying=work.flying)
        yield _place(number, owner, txn), with_work(after, number, at, txn, done)


def _may_unpin(world: World, work: Work) -> bool:
    if work.stage == "recorded":
        return True
    if work.stage != "pinned" or work.waiting:
        return False
    # A commit needs no record: without pin and aborted record an entry is committed.
    if work.decision == COMMITTED:
        return True
    early = work.decision == ABORTED and not world.rules.aborted_before_unpin
    return early and _is_settled(world, work)


def _is_settled(world: World, work: Work) -> bool:
    flies = work.flying and world.rules.abort_waits_for_appends
    return not work.waiting and not flies


@ACTIONS("unstrand", "memory", "(only without untrack_when_pin_fails) forgotten once decided")
def unstrand(world: World, state: State) -> Steps:
    for number, at, txn, owner, work in works(state):
        if work.stage == "stranded" and work.decision != UNKNOWN:
            yield _place(number, owner, txn), with_work(state, number, at, txn, Work())


def _place(number: int, owner: Owner, txn: int) -> str:
    return f"t{txn} at segment {number}, owner epoch {owner.epoch}"
