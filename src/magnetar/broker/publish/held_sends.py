"""Sends of one producer that wait for their transactions.

Owns: `HeldSends`.

Invariants:
1. Sends go on in the order in which they came: behind one that waits everything waits.
2. Transactions of sends further back are asked about at once, so that they wait side by side.
3. What is refused goes on too: it is its producer that answers, in order.

Relies on: `forward`, which takes a send while `is_releasing`; `emptied`, called when nothing waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from magnetar.broker.publish.txn_writes import TransactionWrites
from magnetar.errors import NotAllowed
from magnetar.runtime.signal import Signal
from magnetar.wire.messages import Send, TxnId


class HeldSends:
    """A queue, most of the time empty."""

    def __init__(
        self,
        transactions: TransactionWrites,
        forward: Callable[[Send], None],
        emptied: Callable[[], None],
    ) -> None:
        self.is_releasing = False
        """A held send goes on just now."""
        self._transactions = transactions
        self._forward = forward
        self._emptied = emptied
        self._sends: deque[Send] = deque()
        self._refusal: tuple[TxnId, NotAllowed] | None = None
        """Why the transaction of the first one may not write."""
        self._empty = Signal()

    def __len__(self) -> int:
        return len(self._sends)

    def refusal_of(self, txn: TxnId) -> NotAllowed | None:
        """Why a send that goes on is refused, if it was asked about."""
        known = self._refusal
        return known[1] if known is not None and known[0] == txn else None

    def takes(self, send: Send) -> bool:
        """Whether a send waits; it may go on before this returns."""
        txn, sends, transactions = send.txn_id, self._sends, self._transactions
        # Nothing waits: admitted ones pass, and what is known to be refused is answered at once.
        if not sends:
            if txn is None or transactions.is_admitted(txn):
                return False
            if transactions.refusal(txn) is not None:
                return False
            sends.append(send)
            self._go_on()
            return True
        # Invariant 2: a pin per transaction is a write; they are made side by side.
        if txn is not None and txn != sends[-1].txn_id:
            self._ask_ahead(txn)
        sends.append(send)
        return True

    def clear(self) -> None:
        """Drop what is held: its client sends it again."""
        self._sends.clear()
        self._empty.advance()

    async def until_empty(self, seconds: float) -> None:
        """Wait until nothing waits any more, at most so long."""
        await self._empty.past_within(self._empty.version, seconds)

    def _ask_ahead(self, txn: TxnId) -> None:
        """Have a transaction admitted while those before it are."""
        try:
            self._transactions.ask(txn)
        except NotAllowed:
            return  # when its turn comes it is refused

    def _answered(self, txn: TxnId, refusal: NotAllowed | None) -> None:
        """The first one need not wait any more."""
        self._refusal = None if refusal is None else (txn, refusal)
        self._go_on()

    def _go_on(self) -> None:
        """Let sends go on, up to the first whose transaction is neither admitted nor refused."""
        sends = self._sends
        answered: TxnId | None = None
        # Tells the producer that this send has waited already, even if it was closed meanwhile.
        self.is_releasing = True
        try:
            while sends:
                txn = sends[0].txn_id
                # Nothing can change between the sends of one transaction: nobody else runs.
                if txn is not None and txn != answered and not self._is_answered(txn):
                    break
                answered = txn
                self._forward(sends.popleft())
        finally:
            self.is_releasing = False
        # The producer may take the plain way again.
        if not sends:
            self._refusal = None
            self._empty.advance()
            self._emptied()

    def _is_answered(self, txn: TxnId) -> bool:
        """Whether a send may go on; if not, its transaction is asked about."""
        if self.refusal_of(txn) is not None:
            return True
        try:
            return self._transactions.ask(txn, self._answered)
        except NotAllowed as error:
            self._refusal = (txn, error)
            return True
