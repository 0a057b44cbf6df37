"""Pure: the states of a transaction as its client sees them, and what leads from one to another.

Owns: `TransactionState`, `TxnEvent`, `after`.

Invariants:
1. COMMITTED, ABORTED and TIMED_OUT are final. What is repeated there changes nothing; what
   contradicts them is refused.
2. COMMITTED is reached only by the word of a coordinator, and only after a commit was asked for.
3. ERROR means that nobody here knows the outcome; asking again, for either, may tell.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from magnetar.errors import InvalidTxnStatus


class TransactionState(Enum):
    """The state of a transaction, as its client knows it."""

    OPEN = "open"
    """It takes messages and acknowledgements."""
    COMMITTING = "committing"
    """A commit was asked for (of a member of a group: it is prepared), and is not known."""
    ABORTING = "aborting"
    """It is to be aborted, and the coordinator has not said so yet."""
    COMMITTED = "committed"
    """Everything of it is there for others."""
    ABORTED = "aborted"
    """Nothing of it will ever be seen."""
    ERROR = "error"
    """The coordinator did not answer: the transaction may have been committed or not."""
    TIMED_OUT = "timed out"
    """Its time was over before it was committed: it is aborted."""

    @property
    def is_final(self) -> bool:
        """Whether the outcome is known, and cannot change."""
        return self in _FINAL

    @property
    def is_aborted(self) -> bool:
        """Whether nothing of it will ever be seen."""
        return self in (TransactionState.ABORTED, TransactionState.TIMED_OUT)


class TxnEvent(Enum):
    """A step from one state to another, with the verb that an error message has for it."""

    COMMIT = "commit"
    ABORT = "abort"
    GIVE_UP = "give up"
    """A part of what is to be committed failed."""
    COMMITTED = "note the commit of"
    ABORTED = "note the abort of"
    LOST = "lose track of"
    """The coordinator did not answer."""
    EXPIRE = "time out"


_FINAL: Final = frozenset(
    {TransactionState.COMMITTED, TransactionState.ABORTED, TransactionState.TIMED_OUT}
)

_S = TransactionState
_E = TxnEvent
_NEXT: Final[dict[tuple[TransactionState, TxnEvent], TransactionState]] = {
    (_S.OPEN, _E.COMMIT): _S.COMMITTING,
    (_S.OPEN, _E.ABORT): _S.ABORTING,
    (_S.OPEN, _E.EXPIRE): _S.TIMED_OUT,
    (_S.OPEN, _E.ABORTED): _S.ABORTED,  # its group was committed without it
    (_S.COMMITTING, _E.GIVE_UP): _S.ABORTING,
    (_S.COMMITTING, _E.COMMITTED): _S.COMMITTED,
    (_S.COMMITTING, _E.ABORTED): _S.ABORTED,
    (_S.COMMITTING, _E.LOST): _S.ERROR,
    (_S.ABORTING, _E.ABORTED): _S.ABORTED,
    (_S.ABORTING, _E.COMMITTED): _S.COMMITTED,  # an earlier attempt had come through
    (_S.ABORTING, _E.LOST): _S.ERROR,
    (_S.ERROR, _E.COMMIT): _S.COMMITTING,
    (_S.ERROR, _E.ABORT): _S.ABORTING,
    (_S.COMMITTED, _E.COMMIT): _S.COMMITTED,
    (_S.COMMITTED, _E.COMMITTED): _S.COMMITTED,
    (_S.ABORTED, _E.ABORT): _S.ABORTED,
    (_S.ABORTED, _E.ABORTED): _S.ABORTED,
    (_S.TIMED_OUT, _E.ABORT): _S.TIMED_OUT,
    (_S.TIMED_OUT, _E.ABORTED): _S.TIMED_OUT,
    (_S.TIMED_OUT, _E.LOST): _S.TIMED_OUT,
}


def after(state: TransactionState, event: TxnEvent) -> TransactionState:
    """The next state; raises `InvalidTxnStatus` if there is none."""
    found = _NEXT.get((state, event))
    if found is None:
        raise InvalidTxnStatus(f"cannot {event.value} a transaction that is {state.value}")
    return found
