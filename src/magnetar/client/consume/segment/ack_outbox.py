"""Acknowledgements of one segment on their way to the broker.

Owns: `AckOutbox`: who waits for which, plain ones and those in transactions.

Invariants:
1. Everything that gathered while a command was under way goes with the next one: there is no timer.
2. Whoever waits hears of success only when the broker has confirmed everything that waited with it;
   a lost connection only prolongs the wait.
3. A transaction's acknowledgements are sent after the transaction knows the subscription. One that
   the broker refuses fails its transaction.
4. What the broker refuses for good is not sent again.

Relies on: one `send` at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from magnetar.client.connection.server_errors import is_lost, is_passing
from magnetar.client.consume.segment.ack_state import AckItem, all_of
from magnetar.client.consume.segment.acknowledged import Acknowledged
from magnetar.errors import MagnetarError, RequestError
from magnetar.runtime.logs import logger
from magnetar.wire.messages import TxnId

# Far below what a frame may hold, batch-index sets included.
ACKS_PER_COMMAND: Final = 1000

_LOG: Final = logger(__name__)


class AckTransaction(Protocol):
    """The part of a transaction that a consumer needs."""

    @property
    def txn_id(self) -> TxnId: ...

    async def enlist_subscription(self, topic: str, subscription: str) -> None:
        """Called before acknowledgements are sent; does nothing if it knows the subscription."""
        ...

    def acking(self, done: asyncio.Future[None], on_end: Callable[[bool], None]) -> None:
        """Called with each group of acknowledgements; raises if the transaction takes no more.

        `on_end` is called once the transaction is over: with True if it was committed.
        """
        ...


class Acks(Protocol):
    """The acknowledgements that wait: the segment's consumer knows them."""

    @property
    def has_acks(self) -> bool: ...

    def take_acks(self) -> tuple[list[AckItem], bool]:
        """What is to be sent, and whether it is cumulative."""
        ...

    def confirm_acks(self, items: Sequence[AckItem]) -> None: ...


@dataclass(slots=True, eq=False)
class _TxnGroup:
    txn: AckTransaction
    items: dict[tuple[int, int], AckItem]
    cumulative: bool
    on_end: list[Callable[[bool], None]]
    done: asyncio.Future[None]
    is_sent: bool = False
    """It is under way: what comes now is a group of its own."""

    def takes(self, txn: AckTransaction) -> bool:
        return self.txn is txn and not self.cumulative and not self.is_sent

    def ended(self, committed: bool) -> None:
        for each in self.on_end:
            each(committed)


class Ask(Protocol):
    """Sends acknowledgements, and waits until the broker has them."""

    def __call__(
        self, items: Sequence[AckItem], /, *, cumulative: bool, txn: TxnId | None = None
    ) -> Awaitable[Any]: ...


class AckOutbox:
    """The acknowledgements of one segment that are not confirmed."""

    def __init__(self, acks: Acks, topic: str, subscription: str) -> None:
        self._acks = acks
        self._topic = topic
        self._subscription = subscription
        self._loop = asyncio.get_running_loop()
        self._group: asyncio.Future[None] | None = None
        self.joined: Acknowledged | None = None
        """What `join` gave: others may have it too, until the next command takes it along."""
        self._sent: list[asyncio.Future[None]] = []
        self._txn_groups: list[_TxnGroup] = []

    @property
    def has_work(self) -> bool:
        """There is something to send, or somebody to tell that there is nothing any more."""
        return self._acks.has_acks or self.is_waited_for

    @property
    def is_waited_for(self) -> bool:
        return bool(self._group is not None or self._sent or self._txn_groups)

    def join(self) -> Acknowledged:
        """Wait with others for what was just acknowledged: done when the broker has it."""
        if self.joined is None:
            self._group = self._loop.create_future()
            self.joined = Acknowledged((self._group,))
        return self.joined

    def join_txn(
        self,
        txn: AckTransaction,
        items: Sequence[AckItem],
        *,
        cumulative: bool,
        on_end: Callable[[bool], None],
    ) -> Acknowledged:
        """Acknowledge something in a transaction; raises if that takes no more."""
        # What gathers while the transaction's subscription is made known, or while another command
        # is under way, goes together. A cumulative one is a command of its own: it is not a set.
        group = next((each for each in self._txn_groups if each.takes(txn)), None)
        if group is None or cumulative:
            group = _TxnGroup(txn, {}, cumulative, [], self._loop.create_future())
            txn.acking(group.done, group.ended)
            self._txn_groups.append(group)
        group.on_end.append(on_end)
        for item in items:
            # Two messages of one entry: the broker is to keep what neither of them acknowledged.
            before = group.items.get(item.position)
            unacked = item.unacked if before is None else item.unacked & before.unacked
            group.items[item.position] = item._replace(unacked=unacked)
        return Acknowledged((group.done,))

    async def send(self, ask: Ask) -> None:
        """Send everything that waits, and wait until the broker has it."""
        # Transactions first: commits wait for theirs.
        while self._txn_groups:
            await self._send_group(ask, self._txn_groups[0])
        # Whoever joins from here on waits for the next command: this one may not have theirs.
        if self._group is not None:
            self._sent.append(self._group)
            self._group = self.joined = None
        items, cumulative = self._acks.take_acks()
        try:
            for part in _parts(items):
                await ask(part, cumulative=cumulative)
                self._acks.confirm_acks(part)
        except RequestError as error:
            # The broker is not ready, say: the next connection sends them again (invariant 2).
            if is_passing(error):
                raise
            # Sent again it would be refused again.
            self._acks.confirm_acks(items)
            self._end_sent(error)
        else:
            self._end_sent(None)

    async def _send_group(self, ask: Ask, group: _TxnGroup) -> None:
        # Invariant 3: the coordinator must know the subscription before the broker has an
        # acknowledgement that it might have to roll back.
        txn_id = group.txn.txn_id
        try:
            await group.txn.enlist_subscription(self._topic, self._subscription)
            group.is_sent = True
            for part in _parts(list(group.items.values())):
                items = part
                if not group.cumulative:
                    items = [each for item in part for each in _named(item)]
                await ask(items, cumulative=group.cumulative, txn=txn_id)
                for item in part:  # the next connection repeats what has no answer
                    del group.items[item.position]
        except MagnetarError as error:
            # Unanswered, it stays the first: the next connection repeats it.
            # Its place at the head is kept, so that the order of groups is.
            if is_lost(error) or is_passing(error):
                raise
            _fail(group.done, error)
        self._txn_groups.remove(group)
        if not group.done.done():
            group.done.set_result(None)

    def end(self, error: MagnetarError) -> None:
        """Nothing more will be sent: whoever waits hears why."""
        if self._group is not None:
            self._sent.append(self._group)
            self._group = self.joined = None
        self._sent += [each.done for each in self._txn_groups]
        self._txn_groups.clear()
        self._end_sent(error)

    def _end_sent(self, error: MagnetarError | None) -> None:
        sent, self._sent = self._sent, []
        for each in sent:
            if error is not None:
                _fail(each, error)
            elif not each.done():
                each.set_result(None)


def _fail(done: asyncio.Future[None], error: MagnetarError) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # nobody needs to await it
        _LOG.warning("acknowledgement-failed", reason=str(error))


def _parts(items: Sequence[AckItem]) -> Iterator[Sequence[AckItem]]:
    """What goes into one command each: a broker takes frames up to a limit."""
    for start in range(0, len(items), ACKS_PER_COMMAND):
        yield items[start : start + ACKS_PER_COMMAND]


def _named(item: AckItem) -> list[AckItem]:
    """All messages of a batch, but each of them named.

    Who acknowledges an entry as a whole is not refused if another transaction has acknowledged one
    of its messages: that message would have two results.
    """
    if item.unacked or item.batch_size < 2:
        return [item]
    first = 1
    return [item._replace(unacked=all_of(item.batch_size) & ~first), item._replace(unacked=first)]
