"""Clients of transactions in a simulation: one connection, producer or consumer at a time.

Owns: `Outlet`, a producer of one topic on one connection; `Inlet`, a consumer; `Outlets`, which
makes outlets again after they are lost; and the commands of coordinators (`begin`, `end`,
`open_group`, `commit_group`).

Invariants:
1. Nothing is sent again by itself: whoever lost an answer decides that, with the same ids.
2. What arrives at an inlet is told to the history in the step in which it arrives.

Relies on: `scalable_links` for connections and lookups.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from harness.simulation.scalable.feeds import position_of, wire_id
from harness.simulation.scalable.links import CLIENT_ERRORS, Line, Links, refusal
from magnetar.errors import DeadlineExceeded, RequestError, WireCode
from magnetar.model.batch_indexes import unacked_of, words_of
from magnetar.model.ids import Position
from magnetar.runtime.signal import Signal
from magnetar.testing.virtual.driver import build_message
from magnetar.testing.virtual.network import End
from magnetar.txn.coordinator_partitions import partition_of
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Command, Delivered, Received, TxnId, layout_of
from magnetar.wire.pb import pulsar_pb2 as pb

if TYPE_CHECKING:
    from harness.simulation.txn.history import TxnHistory

ANSWER_SECONDS: Final = 8.0
PERMITS: Final = 1000

_ASSIGN: Final = "persistent://pulsar/system/transaction_coordinator_assign-partition-{}"
_EARLIEST: Final = {"ledgerId": 2**64 - 1, "entryId": 2**64 - 1}
_ALL_WORDS: Final = 64


def txn_fields(txn: TxnId | None) -> dict[str, Any]:
    return {} if txn is None else {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}


class Outlet:
    """A producer."""

    def __init__(self, line: Line, name: str) -> None:
        self.failure: Exception | None = None
        self._line = line
        self._name = name
        self._number = line.register("producer_id", self)
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def open(self, topic: str) -> None:
        await self._line.request(
            "PRODUCER",
            topic=topic,
            producer_id=self._number,
            producer_name=self._name,
            user_provided_producer_name=True,
            timeout_s=ANSWER_SECONDS,
        )

    async def send(self, sequence: int, numbers: Sequence[int], txn: TxnId | None) -> None:
        """Await the receipt; RequestError: it was refused. Any other error: nobody knows."""
        if self.failure is not None:
            raise self.failure
        batch: dict[str, Any] = {"num_messages_in_batch": len(numbers)} if len(numbers) > 1 else {}
        payload = " ".join(map(str, numbers)).encode()
        entry = build_message(
            payload, producer_name=self._name, sequence_id=sequence, **batch, **txn_fields(txn)
        )
        receipt = self._waiting[sequence] = asyncio.get_running_loop().create_future()
        ids = {"producer_id": self._number, "sequence_id": sequence, "num_messages": len(numbers)}
        try:
            self._line.send("SEND", entry, **ids, **txn_fields(txn))
            async with asyncio.timeout(ANSWER_SECONDS):
                await receipt
        except TimeoutError as error:
            self._line.abort()
            raise DeadlineExceeded(f"no receipt of {sequence}") from error
        finally:
            self._waiting.pop(sequence, None)

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        if command.type == TYPES["SEND_RECEIPT"]:
            waiting = self._waiting.get(body.sequence_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        elif command.type == TYPES["SEND_ERROR"]:
            waiting = self._waiting.get(body.sequence_id)
            if waiting is not None and not waiting.done():
                waiting.set_exception(refusal("SEND", body.error, body.message))
        else:
            self.lost(DeadlineExceeded(f"{self._name} was closed by the broker"))

    def lost(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            self._line.unregister("producer_id", self._number)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)


class Outlets:
    """The producers of one client, by topic."""

    def __init__(self, links: Links, name: str) -> None:
        self._links = links
        self._name = name
        self._by_topic: dict[str, Outlet] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def get(self, topic: str) -> Outlet:
        async with self._turns.setdefault(topic, asyncio.Lock()):
            outlet = self._by_topic.get(topic)
            if outlet is None or outlet.failure is not None:
                outlet = Outlet(await self._links.lookup(topic), _name_on(topic, self._name))
                try:
                    await outlet.open(topic)
                except CLIENT_ERRORS as error:
                    outlet.lost(error)
                    raise
                self._by_topic[topic] = outlet
            return outlet


def _name_on(topic: str, name: str) -> str:
    """On a segment a producer says which one it is."""
    if not topic.startswith("segment://"):
        return name
    return f"{name}-seg-{int(topic.rsplit('-', 1)[1])}"


# --- consumers


class Taken(NamedTuple):
    """An entry as it was delivered."""

    topic: str
    position: Position
    numbers: tuple[int, ...]
    open_bits: int
    """Messages of a batch that are to be consumed."""
    sent_at: float


class Ack(NamedTuple):
    """Messages of one entry that are acknowledged."""

    position: Position
    size: int
    bits: int

    def wire(self) -> list[dict[str, Any]]:
        """As clients say it: of a batch, each message for itself."""
        place: dict[str, Any] = dict(wire_id(self.position))
        if self.size == 1:
            return [place]
        every = (1 << self.size) - 1
        return [
            place | {"ack_set": words_of(every & ~(1 << index)), "batch_size": self.size}
            for index in range(self.size)
            if self.bits >> index & 1
        ]


class Inlet:
    """A consumer on one connection."""

    def __init__(self, line: Line, history: TxnHistory, topic: str, subscription: str) -> None:
        self.failure: Exception | None = None
        self.topic = topic
        self.subscription = subscription
        self.waiting: deque[Taken] = deque()
        self.session: object = None
        """Of a reader: what it has read, in order."""
        self._line = line
        self._history = history
        self._number = line.register("consumer_id", self)
        self._news = Signal()
        self._unflowed = 0

    @classmethod
    async def open(
        cls,
        links: Links,
        history: TxnHistory,
        topic: str,
        subscription: str,
        kind: int = pb.CommandSubscribe.Exclusive,
        *,
        durable: bool = True,
    ) -> Inlet:
        """Subscribe, from the earliest message."""
        line = await links.lookup(topic)
        inlet = cls(line, history, topic, subscription)
        start = {} if durable else {"start_message_id": _EARLIEST}
        if not durable:
            inlet.session = history.reading(topic)
        try:
            await line.request(
                "SUBSCRIBE",
                topic=topic,
                subscription=subscription,
                subType=kind,
                consumer_id=inlet._number,
                consumer_name=f"{subscription}-{inlet._number}",
                initialPosition=pb.CommandSubscribe.Earliest,
                durable=durable,
                timeout_s=ANSWER_SECONDS,
                **start,
            )
            line.send("FLOW", consumer_id=inlet._number, messagePermits=PERMITS)
        except CLIENT_ERRORS as error:
            inlet.lost(error)
            raise
        return inlet

    async def next(self, seconds: float) -> Taken | None:
        """The next entry, or None; raises why there will be none."""
        try:
            async with asyncio.timeout(seconds):
                while not self.waiting:
                    if self.failure is not None:
                        raise self.failure
                    await self._news.past(self._news.version)
        except TimeoutError:
            return None
        taken = self.waiting.popleft()
        self._unflowed += max(taken.open_bits.bit_count(), 1)
        if self._unflowed >= PERMITS // 2 and self.failure is None:
            self._line.send("FLOW", consumer_id=self._number, messagePermits=self._unflowed)
            self._unflowed = 0
        return taken

    async def arrival(self) -> None:
        """Wait until something is there, or it is lost."""
        while not self.waiting and self.failure is None:
            await self._news.past(self._news.version)

    async def ack(
        self, acks: Sequence[Ack], txn: TxnId | None = None, *, cumulative: bool = False
    ) -> None:
        kind = pb.CommandAck.Cumulative if cumulative else pb.CommandAck.Individual
        ids = [wire for each in acks for wire in each.wire()]
        if cumulative:
            ids = [wire_id(acks[-1].position)]
        if self.failure is not None:
            raise self.failure
        await self._line.request(
            "ACK",
            consumer_id=self._number,
            ack_type=kind,
            message_id=ids,
            timeout_s=ANSWER_SECONDS,
            **txn_fields(txn),
        )

    async def close(self) -> None:
        """Give back what is not acknowledged."""
        if self.failure is None:
            try:
                await self._line.request(
                    "CLOSE_CONSUMER", consumer_id=self._number, timeout_s=ANSWER_SECONDS
                )
            except CLIENT_ERRORS as error:
                self._line.abort()
                self.lost(error)
        self.lost(DeadlineExceeded("it was closed"))

    def take(self, command: Command) -> None:
        if isinstance(command, Delivered):
            body, data = command.body, command.headers_and_payload
            text = bytes(data[layout_of(data).payload :]).decode()
            numbers = tuple(map(int, text.split()))
            words = unacked_of(body.ack_set, _ALL_WORDS) if body.ack_set else 0
            transport = self._line.detach()
            assert isinstance(transport, End)
            taken = Taken(
                self.topic,
                position_of(body.message_id),
                numbers,
                words or (1 << len(numbers)) - 1,
                transport.sent_at,
            )
            self._history.delivered(taken, self.subscription, self.session)
            self.waiting.append(taken)
        elif isinstance(command, Received) and command.type == TYPES["CLOSE_CONSUMER"]:
            self.lost(DeadlineExceeded(f"{self.subscription} was closed by the broker"))
        self._news.advance()

    def lost(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            self._line.unregister("consumer_id", self._number)
            self._history.read_until(self.session)
        self._news.advance()


# --- coordinators


async def begin(
    links: Links, coordinator: int, timeout_ms: int, group: dict[str, Any] | None = None
) -> TxnId:
    line = await links.lookup(_ASSIGN.format(coordinator))
    fields: dict[str, Any] = {} if group is None else {"group": group}
    answer = await line.request(
        "NEW_TXN",
        tc_id=coordinator,
        txn_ttl_millis=timeout_ms,
        scalable=True,
        timeout_s=ANSWER_SECONDS,
        **fields,
    )
    return TxnId(answer.txnid_most_bits, answer.txnid_least_bits)


async def end(links: Links, txn: TxnId, *, commit: bool) -> WireCode | None:
    """None: it was accepted; else why it was refused. Errors: nobody knows."""
    line = await links.lookup(_ASSIGN.format(txn.most))
    try:
        await line.request(
            "END_TXN",
            txn_action=pb.COMMIT if commit else pb.ABORT,
            scalable=True,
            timeout_s=ANSWER_SECONDS,
            **txn_fields(txn),
        )
    except RequestError as error:
        if error.wire_code is None:
            raise
        return WireCode(error.wire_code)
    return None


async def open_group(links: Links, application: str, generation: str, run: str) -> tuple[int, int]:
    """Epoch, and the last sequence that was committed."""
    line = await links.lookup(_ASSIGN.format(partition_of(application)))
    answer = await line.request(
        "OPEN_GROUP",
        application=application,
        generation=generation,
        run=run,
        timeout_s=ANSWER_SECONDS,
    )
    return answer.epoch, answer.committed_sequence


async def commit_group(
    links: Links, application: str, epoch: int, sequence: int, txns: Sequence[TxnId]
) -> bool:
    """Whether it was committed before."""
    line = await links.lookup(_ASSIGN.format(partition_of(application)))
    answer = await line.request(
        "COMMIT_GROUP",
        application=application,
        epoch=epoch,
        sequence=sequence,
        transactions=[{"most_bits": each.most, "least_bits": each.least} for each in txns],
        timeout_s=ANSWER_SECONDS,
    )
    return bool(answer.replayed)
