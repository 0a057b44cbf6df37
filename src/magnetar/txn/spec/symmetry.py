"""Two transactions that may change places (pure).

Owns: `swapped`, a state with transaction 0 renamed to 1 and the other way round. In a symmetric
scenario both states have the same future, so only the lesser of the two is visited.
"""

from __future__ import annotations

from magnetar.txn.spec.state import (
    PLAIN,
    CursorOwner,
    Owner,
    Segment,
    State,
    Subscription,
    T,
)


def swapped(state: State) -> State:
    """The same state, with two transactions renamed."""
    return state._replace(
        headers=_turned(state.headers),
        outcomes=_turned(state.outcomes),
        collectable=_turned(state.collectable),
        sends=_turned(state.sends),
        acks=_turned(state.acks),
        failed=_turned(state.failed),
        intents=_turned(state.intents),
        answered=_turned(state.answered),
        segments=tuple(_segment(segment) for segment in state.segments),
        subscription=_subscription(state.subscription),
    )


def _turned(values: tuple[T, ...]) -> tuple[T, ...]:
    return values[::-1]


def _segment(segment: Segment) -> Segment:
    ledgers = tuple(
        ledger._replace(entries=tuple(_renamed(txn) for txn in ledger.entries))
        for ledger in segment.ledgers
    )
    return segment._replace(
        ledgers=ledgers,
        pins=_turned(segment.pins),
        aborted=_turned(segment.aborted),
        owners=tuple(_owner(owner) for owner in segment.owners),
    )


def _renamed(txn: int) -> int:
    return txn if txn == PLAIN else 1 - txn


def _owner(owner: Owner) -> Owner:
    return owner._replace(
        left=_turned(owner.left), work=_turned(owner.work), aborted=_turned(owner.aborted)
    )


def _subscription(subscription: Subscription) -> Subscription:
    ops = tuple(sorted(op._replace(txn=1 - op.txn) for op in subscription.ops))
    return subscription._replace(
        ops=ops, owners=tuple(_cursor_owner(owner) for owner in subscription.owners)
    )


def _cursor_owner(owner: CursorOwner) -> CursorOwner:
    return owner._replace(left=_turned(owner.left), work=_turned(owner.work))
