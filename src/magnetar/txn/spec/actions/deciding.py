"""Decisions on transactions outside groups, and GC of headers (pure).

Owns: END_TXN, deadlines and the collection of finished headers. The coordinator keeps nothing in
memory: any broker may do each of these steps.

Relies on: the retention of finished headers (at least 15 minutes) being longer than the present
owner, or one that can still append, works on one message. Others may be later than that.
"""

from __future__ import annotations

from magnetar.txn.spec.state import ABORTED, COMMITTED, MISSING, OPEN, State, ledger_of, put
from magnetar.txn.spec.world import Actions, Steps, World, has_ops, is_final

ACTIONS = Actions("coordinator")


@ACTIONS("end.commit", "write", "END_TXN commit: header OPEN -> COMMITTED by compare-and-set")
def end_commit(world: World, state: State) -> Steps:
    # Members are decided by their group's record alone, see `groups`.
    if world.scenario.members:
        return
    for txn, header in enumerate(state.headers):
        # A client that saw an error, or waits for an answer, does not commit. It may still abort.
        if header == OPEN and not state.failed[txn] and not _awaits_answer(state, txn):
            yield f"t{txn}", state._replace(headers=put(state.headers, txn, COMMITTED))


@ACTIONS("end.abort", "write", "END_TXN abort or deadline: header OPEN -> ABORTED")
def end_abort(world: World, state: State) -> Steps:
    if world.scenario.members:
        return
    for txn, header in enumerate(state.headers):
        if header == OPEN:
            yield f"t{txn}", state._replace(headers=put(state.headers, txn, ABORTED))


@ACTIONS("gc.check", "read", "the ops of a finished transaction are listed: none is left")
def gc_check(world: World, state: State) -> Steps:
    for txn, header in enumerate(state.headers):
        # The retention, as far as the model has time: while somebody works on one of its messages a
        # header is not old enough.
        if not is_final(header) or state.collectable[txn] or _is_at_work(state, txn):
            continue
        if not (world.rules.gc_never_forces and has_ops(state, txn)):
            yield f"t{txn}", state._replace(collectable=put(state.collectable, txn, True))


@ACTIONS("gc.delete", "write", "the header of a finished transaction is deleted")
def gc_delete(world: World, state: State) -> Steps:
    for txn, header in enumerate(state.headers):
        if state.collectable[txn] and is_final(header):
            headers = put(state.headers, txn, MISSING)
            collectable = put(state.collectable, txn, False)
            yield f"t{txn}", state._replace(headers=headers, collectable=collectable)


def _is_at_work(state: State, txn: int) -> bool:
    for segment in state.segments:
        for owner in segment.owners:
            ledger = ledger_of(segment, owner.ledger)
            appends = ledger is not None and not ledger.fenced
            busy = owner.work[txn].waiting or owner.work[txn].flying
            # A zombie whose ledger is fenced may take forever: nothing that it
            # appends becomes durable.
            if busy and (appends or owner.epoch == segment.epoch):
                return True
    return any(owner.work[txn].command != "none" for owner in state.subscription.owners[-1:])


def _awaits_answer(state: State, txn: int) -> bool:
    return any(owner.work[txn].command != "none" for owner in state.subscription.owners)
