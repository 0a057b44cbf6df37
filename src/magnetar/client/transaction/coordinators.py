"""The coordinators of transactions: who leads them, and how they are asked.

Owns: `CoordinatorClients`. There are two kinds. Brokers with `supports_tc_metadata_discovery` tell
a watch (commands 79 to 81) which of them leads which coordinator. Of others the partitions of a
topic are asked for: partition n stands for coordinator n, and the broker that has it leads that
one.

Invariants:
1. A request goes to the leader of its coordinator, which was greeted (62) there before.
2. A request whose connection is lost, whose leader changes, or which is refused for not being led
   there is repeated, within the operation timeout. So a request must be one that can be repeated.
3. What is known of leaders is kept while the watch has no connection; a watch that lost its
   connection is opened again after a pause.
4. `scalable` is said in requests exactly if the coordinators were found by the watch.

Relies on: requests of one coordinator being independent of each other.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from magnetar.client.connection.connection import WATCH, BrokerConnection
from magnetar.client.connection.pool import Connections, retrying
from magnetar.client.connection.server_errors import is_passing, refusal
from magnetar.errors import (
    AlreadyClosed,
    DeadlineExceeded,
    MagnetarError,
    NotAllowed,
    NotConnected,
    ServiceNotReady,
    TransactionCoordinatorNotFound,
)
from magnetar.model.names import TopicName
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.wire.messages import Command, Received, TxnId

ASSIGN_TOPIC: Final = TopicName.parse("persistent://pulsar/system/transaction_coordinator_assign")
"""Its partitions stand for the coordinators of brokers that have no watch."""

_LOG: Final = logger(__name__)


class CoordinatorClients(Service):
    """The coordinators of one kind."""

    def __init__(self, connections: Connections, *, scalable: bool | None = None) -> None:
        """`scalable`: only those of this kind; None: those that the broker offers first."""
        timeout_s = connections.settings.operation_timeout
        super().__init__("transaction coordinators", stop_seconds=timeout_s)
        self._connections = connections
        self._wanted = scalable
        self._loop = asyncio.get_running_loop()
        self._news = Signal()
        self._count = 0
        self._urls: dict[int, str | None] = {}
        """Who leads which, as the watch said; without a watch each is looked up."""
        self._is_scalable = True
        self._failure: MagnetarError | None = None
        # Connections whose broker knows this client at that coordinator (invariant 1), and requests
        # under way, which are cut short when the coordinator moves.
        self._greeted: dict[int, BrokerConnection] = {}
        self._asking: dict[int, dict[asyncio.Timeout, None]] = {}
        self._turn = int(connections.chance.random() * 2**16)

    @property
    def connections(self) -> Connections:
        """The connections of its client."""
        return self._connections

    async def _start(self) -> None:
        self.spawn(self._follow(), "follow")

    async def _stop(self) -> None:
        self._news.close(AlreadyClosed("the client is closed"))

    # --- requests

    async def begin(self, timeout_s: float) -> TxnId:
        """Begin a transaction at one of the coordinators."""

        async def attempt() -> Any:
            number = await self._next()
            fields: dict[str, Any] = {"tc_id": number, "txn_ttl_millis": _milliseconds(timeout_s)}
            return await self._ask_once(number, "NEW_TXN", **await self._kind(), **fields)

        answer = await self._retrying("the beginning of a transaction", attempt)
        return TxnId(answer.txnid_most_bits, answer.txnid_least_bits)

    async def begin_member(
        self, number: int, timeout_s: float, application: str, epoch: int, sequence: int
    ) -> TxnId:
        """Begin a transaction of a group at the group's coordinator."""

        async def attempt() -> Any:
            group = {"application": application, "epoch": epoch, "sequence": sequence}
            fields: dict[str, Any] = {"tc_id": number, "txn_ttl_millis": _milliseconds(timeout_s)}
            kind = await self._kind()
            return await self._ask_once(number, "NEW_TXN", **kind, **fields, group=group)

        answer = await self._retrying("the beginning of a transaction", attempt)
        return TxnId(answer.txnid_most_bits, answer.txnid_least_bits)

    async def ask(self, txn_id: TxnId, what: str, /, **fields: Any) -> Any:
        """Ask the coordinator of a transaction something about it."""
        ids = {"txnid_most_bits": txn_id.most, "txnid_least_bits": txn_id.least}

        async def attempt() -> Any:
            kind = await self._kind()
            return await self._ask_once(txn_id.most, what, **kind, **ids, **fields)

        return await self._retrying(what, attempt)

    async def ask_group(self, number: int | None, what: str, /, **fields: Any) -> Any:
        """Ask the coordinator of a group; any broker says which one it is."""

        async def attempt() -> Any:
            nonlocal number
            # Any broker answers for a group that it leads, or names its coordinator.
            if number is None:
                service = await self._connections.service()
                try:
                    return await _with_groups(service).request(what, **fields)
                except TransactionCoordinatorNotFound as error:
                    if error.coordinator is None:
                        raise
                    number = error.coordinator
            _with_groups(await self._led_by(number))
            return await self._ask_once(number, what, **fields)

        return await self._retrying(what, attempt)

    async def _retrying(self, what: str, attempt: Any) -> Any:
        timeout_s = self._connections.settings.operation_timeout
        return await retrying(what, attempt, self._connections.backoff(), timeout_s)

    async def _ask_once(self, number: int, what: str, /, **fields: Any) -> Any:
        asking = self._asking.setdefault(number, {})
        try:
            # No deadline of its own: `led` sets it to now if the leader changes meanwhile.
            async with asyncio.timeout(None) as until_moved:
                asking[until_moved] = None
                try:
                    connection = await self._led_by(number)
                    return await connection.request(what, **fields)
                finally:
                    del asking[until_moved]
        except TimeoutError as error:
            raise TransactionCoordinatorNotFound(f"coordinator {number} has moved") from error
        except MagnetarError as error:
            # It may not lead there any more: the next attempt greets whoever does.
            if is_passing(error):
                self._greeted.pop(number, None)
            raise

    async def _kind(self) -> dict[str, Any]:
        """What requests say of the kind of coordinators: it is not known before these are."""
        await self._until_known()
        return {"scalable": True} if self._is_scalable else {}

    # --- who leads

    async def _until_known(self) -> None:
        if not self._count:
            if self._failure is not None:
                # What it was may be over while `_follow` still pauses: then it is tried again.
                if isinstance(self._failure, NotConnected):
                    await self._connections.service()
                    raise NotConnected("the coordinators are not known yet")
                raise self._failure.with_traceback(None)
            # Woken by a failure too: then it is raised, not waited out.
            await self._news.past(0)
            await self._until_known()

    async def _next(self) -> int:
        """The coordinators take turns, those without a leader are left out."""
        await self._until_known()
        led = sorted(self._urls)
        if not led:
            raise ServiceNotReady("no coordinator of transactions has a leader now")
        self._turn += 1
        return led[self._turn % len(led)]

    async def _led_by(self, number: int) -> BrokerConnection:
        """The connection to the leader of a coordinator, which knows us there."""
        await self._until_known()
        # The short way: asked before every request.
        greeted = self._greeted.get(number)
        if greeted is not None and greeted.is_open:
            return greeted
        if number not in self._urls:
            raise TransactionCoordinatorNotFound(f"nobody leads coordinator {number} now")
        url = self._urls[number]
        if self._is_scalable:
            leader = await self._connections.at(url)
        else:
            leader = await self._connections.lookup(str(ASSIGN_TOPIC.with_partition(number)))
        await leader.request("TC_CLIENT_CONNECT_REQUEST", tc_id=number, **await self._kind())
        # Only if it still leads: the watch may have told of another one while it was greeted.
        if self._urls.get(number) == url:
            self._greeted[number] = leader
        return leader

    async def _follow(self) -> None:
        backoff = self._connections.backoff()
        while True:
            # Two kinds (see the head): a watch, which ends with its connection, or a number that
            # does not change.
            known = self._news.version
            try:
                if await self._are_watched():
                    watch = _Watch(self, await self._connections.service())
                    await watch.run(self._connections.settings.operation_timeout)
                else:
                    await self._count_older()
                    return
            except MagnetarError as error:
                _LOG.info("coordinators-not-watched", reason=str(error))
                self._failure = error
                # Whoever waits for the first news hears why there is none; later what is known is
                # kept (invariant 3).
                if self._count == 0:
                    self._news.advance()
            if self._news.version > known and self._count:
                backoff.reset()
            await asyncio.sleep(backoff.next())

    async def _are_watched(self) -> bool:
        if self._wanted is False:
            return False
        service = await self._connections.service()
        offers = service.features.supports_tc_metadata_discovery
        if self._wanted and not offers:
            raise NotAllowed(f"{service.address} has no transactions of scalable topics")
        return offers

    async def _count_older(self) -> None:
        count = await self._connections.partitions(str(ASSIGN_TOPIC), create=False)
        if count == 0:
            hint = "transactions are switched on in the broker's configuration"
            raise NotAllowed("the broker has no coordinators of transactions", hint=hint)
        self._is_scalable = False
        self._urls = dict.fromkeys(range(count))
        self._count = count
        self._news.advance()

    def led(self, snapshot: Any) -> None:
        """The watch told who leads which coordinator now."""
        urls: dict[int, str | None] = {}
        for each in snapshot.assignments:
            url = self._connections.url_of(each.broker_service_url, each.broker_service_url_tls)
            if url is not None:
                urls[each.tc_id] = url
        # Leaders that changed: requests to the old ones would only time out.
        moved = [number for number, url in self._urls.items() if urls.get(number) != url]
        self._urls, self._count = urls, snapshot.parallelism
        for number in moved:
            self._greeted.pop(number, None)
            for asking in list(self._asking.get(number, ())):
                asking.reschedule(self._loop.time())
        self._news.advance()


class _Watch:
    """The watch on one connection."""

    def __init__(self, home: CoordinatorClients, connection: BrokerConnection) -> None:
        self._home = home
        self._connection = connection
        self._updates = Signal()

    async def run(self, timeout_s: float) -> None:
        """Until the connection is lost or the broker ends the watch: raises why."""
        number = self._connection.register(WATCH, self)
        try:
            self._connection.tell("WATCH_TC_ASSIGNMENTS", watch_id=number)
            async with asyncio.timeout(timeout_s):
                version = await self._updates.past(0)
            while True:
                version = await self._updates.past(version)
        except TimeoutError as error:
            raise DeadlineExceeded("the coordinators were not told") from error
        finally:
            self._connection.unregister(WATCH, number)
            if self._connection.is_open:
                self._connection.tell("WATCH_TC_ASSIGNMENTS_CLOSE", watch_id=number)

    # --- the connection's side

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        if body.HasField("error"):
            self.lost(refusal("the coordinators", body.error, body.message))
        else:
            self._home.led(body.snapshot)
            self._updates.advance()

    def lost(self, error: MagnetarError) -> None:
        self._updates.close(error)


def _with_groups(broker: BrokerConnection) -> BrokerConnection:
    if not broker.features.supports_transaction_groups:
        hint = "use transactions on their own, or a server that has transaction groups"
        raise NotAllowed(f"{broker.address} has no transaction groups", hint=hint)
    return broker


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
