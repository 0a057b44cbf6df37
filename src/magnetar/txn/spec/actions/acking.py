"""A subscription's owner and the acks of a transaction: ask, learn, materialise (pure).

Owns: the life of an `AckWork`, which the table `STAGES` describes. An ack command goes from asked
to reading (the header), putting (the intent), landed (durable) and its answer; a committed
transaction's acks go into the cursor in memory, into a snapshot, into the durable cursor, and only
then are its ops deleted.
"""

from __future__ import annotations

from typing import Final

from magnetar.txn.spec.actions.publishing import Edge
from magnetar.txn.spec.state import (
    ABORTED,
    COMMITTED,
    MISSING,
    OPEN,
    UNKNOWN,
    AckOp,
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

STAGES: Final = {
    "idle": "nothing is known of the transaction here",
    "found": "recovery: ops were read; the header is to be read",
    "pending": "its messages are withheld from dispatch and from other transactions",
    "merged": "committed: the cursor in memory holds its acks",
    "snapped": "a cursor write is on its way whose snapshot holds them",
    "durable": "the durable cursor holds them; its ops are being deleted",
    "dropped": "aborted: its messages are given out again; its ops are being deleted",
}
EDGES: Final = (
    Edge("idle", "pending", "ack.ask"),
    Edge("pending", "pending", "ack.read, ack.put, ack.answer, ack.learn"),
    Edge("pending", "idle", "ack.read: refused, ack.put-fails"),
    Edge("pending", "merged", "ack.merge"),
    Edge("merged", "snapped", "flush.start"),
    Edge("snapped", "durable", "flush.land"),
    Edge("merged", "durable", "cursor.seek"),
    Edge("durable", "idle", "ack.delete"),
    Edge("pending", "dropped", "ack.drop"),
    Edge("dropped", "idle", "ack.delete"),
    Edge("idle", "found", "cursor.ops, ack.rescan"),
    Edge("found", "pending", "cursor.header"),
)


@ACTIONS("ack.ask", "memory", "an ack comes for a free message: pending from now on")
def ack_ask(world: World, state: State) -> Steps:
    for at, txn, owner, work in ack_works(state):
        # One command at a time for each transaction keeps the world small.
        free = work.stage in ("idle", "pending") and work.decision == UNKNOWN
        if not free or work.command != "none" or not state.acks[txn]:
            continue
        # Before recovery nobody knows which messages former owners' transactions hold.
        if owner.phase != "serving" and (
            world.rules.subscription_recovers_first or owner.phase == "fence"
        ):
            continue
        # Acknowledged, or held by any transaction, the own one included: a conflict (PIP-31).
        taken = {*owner.acked, *(message for other in owner.work for message in other.pending)}
        asked = state._replace(acks=put(state.acks, txn, state.acks[txn] - 1))
        for message in range(world.scenario.messages):
            if message in taken:
                continue
            pending = tuple(sorted((*work.pending, message)))
            after = work._replace(
                stage="pending",
                pending=pending,
                asked=(owner.numbered, message),
                command="reading",
            )
            numbered = owner._replace(numbered=owner.numbered + 1, work=put(owner.work, txn, after))
            yield f"t{txn} m{message} {_place(owner)}", with_cursor_owner(asked, at, numbered)


@ACTIONS("ack.read", "read", "the header is read: OPEN, or the ack is refused")
def ack_read(world: World, state: State) -> Steps:
    for at, txn, owner, work in ack_works(state):
        if work.command == "reading":
            said = truth(world, state, txn)
            after = work._replace(command="putting") if said == OPEN else _refused(work)
            yield f"t{txn} {_place(owner)}: {said}", with_ack_work(state, at, txn, after)


@ACTIONS("ack.put", "write", "the intent is durable; a put under the same key is the same put")
def ack_put(world: World, state: State) -> Steps:
    for at, txn, owner, work in ack_works(state):
        if work.command != "putting":
            continue
        number, message = work.asked
        # The epoch makes keys of different owners different; without it both would begin with 0.
        epoch = owner.epoch if world.rules.named_op_keys else 0
        ops = state.subscription.ops
        stored = state
        # A put under a key that exists is the same put again, after a lost answer.
        if all((op.txn, op.epoch, op.number) != (txn, epoch, number) for op in ops):
            op = AckOp(txn, epoch, number, owner.incarnation, message)
            kept = state.subscription._replace(ops=tuple(sorted((*ops, op))))
            intents = tuple(sorted({*state.intents[txn], (owner.incarnation, message)}))
            stored = state._replace(subscription=kept, intents=put(state.intents, txn, intents))
        keys = tuple(sorted({*work.keys, (epoch, number)}))
        after = work._replace(command="landed", keys=keys)
        yield f"t{txn} m{message} {_place(owner)}", with_ack_work(stored, at, txn, after)


@ACTIONS(
    "ack.put-fails", "fault", "the store refuses the intent; the ack is answered with an error"
)
def ack_put_fails(world: World, state: State) -> Steps:
    if not state.budget.failures:
        return
    budget = state.budget._replace(failures=state.budget.failures - 1)
    for at, txn, owner, work in ack_works(state):
        if work.command == "putting":
            failed = state._replace(budget=budget, failed=put(state.failed, txn, True))
            kept = work._replace(command="none")
            # The client got an error: a message that stayed held would be delivered to nobody.
            after = _refused(work) if world.rules.unpend_when_ack_fails else kept
            yield f"t{txn} {_place(owner)}", with_ack_work(failed, at, txn, after)


@ACTIONS("ack.answer", "memory", "the lease is checked, then the ack is answered")
def ack_answer(world: World, state: State) -> Steps:
    for at, txn, owner, work in ack_works(state):
        if work.command != "landed":
            continue
        done = with_ack_work(state, at, txn, work._replace(command="none"))
        # The lease, not the cursor: a new owner may have read the ops before this intent landed,
        # and then it gives the message to somebody else.
        holds = owner.epoch == state.subscription.epoch
        if holds or not world.rules.lease_check_before_answer:
            ack = (owner.incarnation, work.asked[1])
            told = tuple(sorted({*state.answered[txn], ack}))
            after = done._replace(answered=put(state.answered, txn, told))
            yield f"t{txn} m{ack[1]} {_place(owner)}: ok", after
        else:
            after = done._replace(failed=put(state.failed, txn, True))
            yield f"t{txn} {_place(owner)}: error", after


@ACTIONS("ack.learn", "read", "a decision is learnt by an owner with pending acks")
def ack_learn(world: World, state: State) -> Steps:
    for at, txn, owner, work in ack_works(state):
        # A command under way is finished first: `_is_settled` keeps merge and drop waiting for it.
        if work.stage == "pending" and work.decision == UNKNOWN and owner.phase == "serving":
            said = truth(world, state, txn)
            if said == MISSING and world.rules.missing_header_drops_acks:
                # A committed one would still have its ops: only this owner can have deleted them.
                said = ABORTED
            if is_final(said):
                after = work._replace(decision=said)
                yield f"t{txn} {_place(owner)}: {said}", with_ack_work(state, at, txn, after)


@ACTIONS("ack.merge", "memory", "committed: its acks enter the cursor in memory")
def ack_merge(world: World, state: State) -> Steps:
    for at, txn, owner, work in ack_works(state):
        if _is_settled(owner, work) and work.decision == COMMITTED:
            acked = tuple(sorted({*owner.acked, *work.pending}))
            after = with_cursor_owner(state, at, owner._replace(acked=acked))
            merged = work._replace(stage="merged", pending=())
            yield f"t{txn} {_place(owner)}", with_ack_work(after, at, txn, merged)


@ACTIONS("ack.drop", "memory", "aborted: its messages are given out again")
def ack_drop(world: World, state: State) -> Steps:
    for at, txn, owner, work in ack_works(state):
        if _is_settled(owner, work) and work.decision == ABORTED:
            after = work._replace(stage="dropped", pending=())
            yield f"t{txn} {_place(owner)}", with_ack_work(state, at, txn, after)


def _is_settled(owner: CursorOwner, work: AckWork) -> bool:
    return work.stage == "pending" and work.command == "none" and owner.phase == "serving"


@ACTIONS("flush.start", "memory", "a snapshot of the cursor is taken, one cursor write at a time")
def flush_start(world: World, state: State) -> Steps:
    for at, owner in enumerate(state.subscription.owners):
        # One at a time; what merges meanwhile is in the next snapshot.
        if owner.flush or all(work.stage != "merged" for work in owner.work):
            continue
        snapped = tuple(
            work._replace(stage="snapped") if work.stage == "merged" else work
            for work in owner.work
        )
        after = owner._replace(flush=(owner.acked,), work=snapped)
        yield _place(owner), with_cursor_owner(state, at, after)


@ACTIONS("flush.land", "write", "the cursor record by compare-and-set; a former owner stops")
def flush_land(world: World, state: State) -> Steps:
    # `merged` during the write is not in its snapshot ('ack intents outlive the cursor').
    counted = ("snapped",) if world.rules.snapshot_after_merge else ("snapped", "merged")
    for at, owner in enumerate(state.subscription.owners):
        if not owner.flush:
            continue
        subscription = state.subscription
        # A new owner has fenced the cursor: this snapshot lacks what that one has merged.
        if subscription.cursor.epoch != owner.epoch and world.rules.cursor_fence:
            yield f"{_place(owner)} stops", without_cursor_owner(state, at)
            continue
        cursor = Cursor(subscription.cursor.epoch, owner.incarnation, owner.flush[0])
        durable = tuple(
            work._replace(stage="durable") if work.stage in counted else work for work in owner.work
        )
        landed = state._replace(subscription=subscription._replace(cursor=cursor))
        after = owner._replace(flush=(), work=durable)
        yield _place(owner), with_cursor_owner(landed, at, after)


@ACTIONS("ack.delete", "write", "an op whose acks are durable, or were dropped, is deleted")
def ack_delete(world: World, state: State) -> Steps:
    ready = {"durable", "dropped"}
    if not world.rules.flush_before_ack_delete:
        ready |= {"merged", "snapped"}
    for at, txn, owner, work in ack_works(state):
        if work.stage not in ready:
            continue
        # No op is known of it: a former owner has deleted them.
        if not work.keys:
            yield f"t{txn} {_place(owner)}: none", with_ack_work(state, at, txn, AckWork())
            continue
        key = (txn, *work.keys[0])
        subscription = state.subscription
        ops = tuple(op for op in subscription.ops if (op.txn, op.epoch, op.number) != key)
        deleted = state._replace(subscription=subscription._replace(ops=ops))
        # One op per step: a crash between two deletes must be harmless, too.
        after = work._replace(keys=work.keys[1:]) if work.keys[1:] else AckWork()
        yield f"t{txn} {_place(owner)}", with_ack_work(deleted, at, txn, after)


def _refused(work: AckWork) -> AckWork:
    """The work without the ack that was asked for."""
    pending = tuple(message for message in work.pending if message != work.asked[1])
    if not pending and not work.keys:
        return AckWork()
    return work._replace(pending=pending, command="none")


def _place(owner: CursorOwner) -> str:
    return f"at the subscription, owner epoch {owner.epoch}"
