"""Ownership of a subscription: take-over, recovery, seek (pure).

Owns: the phases of a cursor's recovery (`phases`). Fence the cursor by compare-and-set with the
new epoch; read the ack ops; read their headers; read the cursor. An op without a header was
dealt with by a former owner, and then the cursor holds it, or it came too late and counts for
nothing: it is dropped either way.
"""

from __future__ import annotations

from collections.abc import Iterator

from magnetar.txn.spec.state import (
    ABORTED,
    MISSING,
    OPEN,
    UNKNOWN,
    AckWork,
    Cursor,
    CursorOwner,
    State,
    ack_works,
    put,
    with_ack_work,
    with_cursor_owner,
    without_cursor_owner,
)
from magnetar.txn.spec.world import Actions, Steps, World, is_final, truth

ACTIONS = Actions("subscription owner")


def phases(world: World) -> tuple[str, ...]:
    """The order of a recovery."""
    # Ops first: a former owner merges an op, writes the cursor, deletes the op. Whoever reads the
    # cursor before that and the ops after it finds the ack in neither.
    if not world.rules.ops_before_cursor:
        return ("cursor", "fence", "ops", "headers", "serving")
    return ("fence", "ops", "headers", "cursor", "serving")


def new_owner(world: World, epoch: int) -> CursorOwner:
    txns = world.scenario.txns
    return CursorOwner(
        epoch=epoch,
        phase=phases(world)[0],
        left=(True,) * txns,
        incarnation=0,
        acked=(),
        work=(AckWork(),) * txns,
        flush=(),
        numbered=0,
    )


@ACTIONS("cursor.load", "write", "a broker takes the subscription: its lease has a new epoch")
def cursor_load(world: World, state: State) -> Steps:
    subscription = state.subscription
    # This scenario has no subscription.
    if not subscription.epoch:
        return
    owned = subscription.owners[-1:] and subscription.owners[-1].epoch == subscription.epoch
    wanted = any(is_final(state.headers[op.txn]) for op in subscription.ops)
    # GC found ops of a finished transaction and nobody who serves them: it loads the owner.
    asked = world.rules.gc_loads_owner and not owned and wanted
    if not state.budget.cursor_loads and not asked:
        return
    after = state
    # One zombie at most keeps the world small.
    while len(after.subscription.owners) > int(world.scenario.zombies):
        after = without_cursor_owner(after, 0)
    epoch = subscription.epoch + 1
    owners = (*after.subscription.owners, new_owner(world, epoch))
    taken = after.subscription._replace(epoch=epoch, owners=owners)
    budget = state.budget._replace(cursor_loads=max(0, state.budget.cursor_loads - 1))
    yield f"epoch {epoch}", after._replace(subscription=taken, budget=budget)


@ACTIONS("cursor.crash", "fault", "the present owner is gone; its clients see errors")
def cursor_crash(world: World, state: State) -> Steps:
    subscription = state.subscription
    if not state.budget.cursor_crashes or not subscription.owners:
        return
    at = len(subscription.owners) - 1
    owner = subscription.owners[at]
    if owner.epoch != subscription.epoch:
        return
    budget = state.budget._replace(cursor_crashes=state.budget.cursor_crashes - 1)
    yield f"epoch {owner.epoch}", without_cursor_owner(state._replace(budget=budget), at)


@ACTIONS("cursor.fence", "write", "the cursor record gets the new epoch: former owners lose")
def cursor_fence(world: World, state: State) -> Steps:
    for at, owner in _owners(state, "fence"):
        subscription = state.subscription
        cursor = subscription.cursor
        # An owner that was superseded before it came to fence must not lower the epoch.
        if cursor.epoch > owner.epoch:
            yield f"epoch {owner.epoch} stops", without_cursor_owner(state, at)
            continue
        fenced = subscription._replace(cursor=cursor._replace(epoch=owner.epoch))
        done = owner._replace(incarnation=cursor.incarnation, left=(False,) * len(owner.left))
        after = with_cursor_owner(state._replace(subscription=fenced), at, _advanced(world, done))
        yield f"epoch {owner.epoch}", after


@ACTIONS("cursor.ops", "read", "the ack ops of a transaction are read")
def cursor_ops(world: World, state: State) -> Steps:
    for at, owner in _owners(state, "ops"):
        for txn in _left(owner):
            found = _found(world, state, owner, txn)
            done = _done(world, owner, txn, _joined(owner.work[txn], found))
            yield f"t{txn}, epoch {owner.epoch}", with_cursor_owner(state, at, done)


def _found(world: World, state: State, owner: CursorOwner, txn: int) -> AckWork:
    ops = [op for op in state.subscription.ops if op.txn == txn]
    if not ops:
        return AckWork()
    pending = tuple(
        sorted(
            op.message
            for op in ops
            # From before a seek: the key is kept, so that the op is deleted, but
            # its message is not held.
            if op.incarnation == owner.incarnation or not world.rules.incarnation_checked
        )
    )
    keys = tuple(sorted((op.epoch, op.number) for op in ops))
    return AckWork("found", pending if world.rules.rebuild_pending_acks else (), keys)


def _joined(work: AckWork, found: AckWork) -> AckWork:
    """What was found, beside an ack that was let in before (only without the rule against it)."""
    if work.stage == "idle" or found.stage == "idle":
        return found if work.stage == "idle" else work
    pending = tuple(sorted({*work.pending, *found.pending}))
    keys = tuple(sorted({*work.keys, *found.keys}))
    return work._replace(stage="found", pending=pending, keys=keys)


@ACTIONS("cursor.header", "read", "the header of a transaction with ops is read")
def cursor_header(world: World, state: State) -> Steps:
    for at, txn, owner, work in ack_works(state):
        if work.stage != "found" or owner.phase not in ("headers", "serving"):
            continue
        said = truth(world, state, txn)
        # Missing: whoever finished it has deleted its ops, or the op came too late to count.
        decision = ABORTED if said == MISSING else UNKNOWN if said == OPEN else said
        after = _done(world, owner, txn, work._replace(stage="pending", decision=decision))
        yield f"t{txn}, epoch {owner.epoch}: {said}", with_cursor_owner(state, at, after)


@ACTIONS("cursor.read", "read", "the cursor is read")
def cursor_read(world: World, state: State) -> Steps:
    for at, owner in _owners(state, "cursor"):
        cursor = state.subscription.cursor
        done = owner._replace(
            acked=cursor.acked, incarnation=cursor.incarnation, left=(False,) * len(owner.left)
        )
        yield f"epoch {owner.epoch}", with_cursor_owner(state, at, _advanced(world, done))


@ACTIONS("ack.rescan", "read", "GC asked: the owner finds ops that it does not know")
def ack_rescan(world: World, state: State) -> Steps:
    for at, txn, owner, work in ack_works(state):
        if work.stage != "idle" or owner.phase != "serving":
            continue
        present = owner.epoch == state.subscription.epoch
        # Only of finished transactions: those are what GC asks about.
        if present and is_final(state.headers[txn]):
            found = _found(world, state, owner, txn)
            if found.keys:
                yield f"t{txn}, epoch {owner.epoch}", with_ack_work(state, at, txn, found)


@ACTIONS("cursor.seek", "write", "a seek: the cursor begins anew, as another incarnation")
def cursor_seek(world: World, state: State) -> Steps:
    subscription = state.subscription
    if not state.budget.seeks or not subscription.owners:
        return
    at = len(subscription.owners) - 1
    owner = subscription.owners[at]
    # A cursor write or an intent in flight belongs to the old incarnation: it is waited for.
    busy = owner.flush or any(work.command != "none" for work in owner.work)
    if busy or owner.phase != "serving" or subscription.cursor.epoch != owner.epoch:
        return
    incarnation = owner.incarnation + 1
    cursor = Cursor(owner.epoch, incarnation, ())
    work = tuple(
        # The seek is a durable cursor write, so merged acks are settled by it; held ones are void.
        done._replace(stage="durable") if done.stage == "merged" else done._replace(pending=())
        for done in owner.work
    )
    sought = owner._replace(incarnation=incarnation, acked=(), work=work)
    budget = state.budget._replace(seeks=state.budget.seeks - 1)
    after = state._replace(subscription=subscription._replace(cursor=cursor), budget=budget)
    yield f"epoch {owner.epoch}", with_cursor_owner(after, at, sought)


def _owners(state: State, phase: str) -> Iterator[tuple[int, CursorOwner]]:
    for at, owner in enumerate(state.subscription.owners):
        if owner.phase == phase:
            yield at, owner


def _left(owner: CursorOwner) -> list[int]:
    return [txn for txn, left in enumerate(owner.left) if left]


def _done(world: World, owner: CursorOwner, txn: int, work: AckWork) -> CursorOwner:
    done = owner._replace(work=put(owner.work, txn, work))
    if owner.phase == "serving":
        return done
    return _advanced(world, done._replace(left=put(owner.left, txn, False)))


def _advanced(world: World, owner: CursorOwner) -> CursorOwner:
    """The owner in its next phase, if nothing is left of this one."""
    if any(owner.left):
        return owner
    order = phases(world)
    phase = order[order.index(owner.phase) + 1]
    if phase == "headers":
        # Only those with ops have a header to read; with none of them the phase is over at once.
        left = tuple(work.stage == "found" for work in owner.work)
        return _advanced(world, owner._replace(phase=phase, left=left))
    left = (phase != "serving",) * len(owner.left)
    return owner._replace(phase=phase, left=left)
