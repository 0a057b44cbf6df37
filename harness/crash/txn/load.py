"""Workers that consume, transform and produce in transactions, over all lives of a server.

Owns: `TxnLoad`: workers, each with a connection of its own, and a consumer of each output that
reads along. Whoever kills the server says when it is up (`up`, `life`).

A transaction takes up to three inputs, sends the transformed messages, acknowledges the inputs, and
is committed, aborted or left alone: then, or if its client lost the connection, it must time out or
be ended later. An END_TXN whose answer was lost is repeated until there is one. Some transactions
acknowledge first; one of these that lost its connection while it sent is continued: all is sent
again with the same sequence ids, as it may be stored already, and committed.

Invariants:
1. COMMIT is asked for only after every receipt and every answer to an acknowledgement has come.
   A legacy transaction sends and acknowledges only where it was added before.
2. A worker that holds inputs that no transaction will give back drops its connection.
3. Whatever breaks while the server is up, and every answer that no rule explains, is a violation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from random import Random
from typing import Any, Final, NamedTuple

from harness.crash.txn.history import (
    ALONG,
    INPUT,
    OUTPUTS,
    SUBSCRIPTION,
    Attempt,
    Output,
    TxnFault,
    TxnHistory,
)
from harness.limits import PATIENCE_S
from harness.patient_clients import PatientDriver as Driver
from magnetar.errors import (
    DeadlineExceeded,
    MagnetarError,
    RemoteProtocolError,
    RequestError,
    WireCode,
)
from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType
from magnetar.testing.virtual.driver import build_message
from magnetar.txn.coordinator_partitions import PARTITIONS
from magnetar.txn.ids import is_metadata
from magnetar.wire.commands import NAMES, TYPES
from magnetar.wire.messages import Delivered, Received, TxnId, payload_offset
from magnetar.wire.pb import pulsar_pb2 as pb

HOST: Final = "127.0.0.1"
WORKERS: Final = 64

_TAKEN_MAX: Final = 3
"""Inputs of one transaction."""
_IDLE_SECONDS: Final = 0.3
_PAUSE_SECONDS: Final = 0.05
_THINK_SECONDS: Final = 0.2
"""Before the end of some transactions: so many more are open when the server dies."""
_SHORT_TIMEOUT_MS: Final = 1500
"""Of a third of all transactions: over when a killed server is back."""
_LONG_TIMEOUT_MS: Final = 4000
"""Of the others; those that may be continued have more on a slow machine, to outlive a kill."""
_STARTS_OUTLIVED: Final = 5
"""Times a start: clients have to notice, to connect, and to be let in, too."""
_DRAIN_TIMEOUT_MS: Final = 60_000
"""In the end all inputs must be transformed, however slow the machine is."""
_LEFT_ALONE_MS: Final = 1000
_PERMITS: Final = 1_000_000
_EARLIEST: Final = 1
_IN_FLIGHT_MAX: Final = 200

_COMMIT_SHARE: Final = 0.8
_ABORT_SHARE: Final = 0.1
"""The rest is left alone."""


_NOT_READY: Final = (WireCode.SERVICE_NOT_READY, WireCode.TRANSACTION_COORDINATOR_NOT_FOUND)
"""A topic is being loaded, or a coordinator reads its log: clients try again."""

_Step = Callable[[], Awaitable[bool]]
"""A command of a transaction; False: it was refused, and may have been."""


class _Torn(NamedTuple):
    """A transaction that has acknowledged, and sends."""

    attempt: Attempt
    sequences: dict[int, int]
    """By input: the sequence id of what is sent."""


class Message(NamedTuple):
    """A message as it was delivered."""

    position: Position
    payload: bytes


# --- commands that the load and the check share


def txn_fields(txn: TxnId) -> dict[str, int]:
    return {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}


async def subscribe(
    driver: Driver, topic: str, subscription: str, kind: SubscriptionType, **fields: Any
) -> None:
    await driver.request(
        "SUBSCRIBE",
        topic=topic,
        subscription=subscription,
        subType=kind.value,
        consumer_id=1,
        consumer_name=subscription,
        initialPosition=_EARLIEST,
        **fields,
    )


async def open_producer(driver: Driver, topic: str, producer_id: int, name: str) -> None:
    await driver.request(
        "PRODUCER",
        topic=topic,
        producer_id=producer_id,
        producer_name=name,
        user_provided_producer_name=True,
    )


async def publish_all(port: int, topic: str, name: str, payloads: Iterable[bytes]) -> None:
    """Publish outside of transactions, and await all receipts."""
    driver = await Driver.connect(HOST, port)
    try:
        await open_producer(driver, topic, 1, name)
        room = asyncio.Semaphore(_IN_FLIGHT_MAX)

        async def publish(number: int, payload: bytes) -> None:
            async with room:
                entry = build_message(payload, producer_name=name, sequence_id=number)
                await driver.publish(1, number, entry)

        await asyncio.gather(*(publish(*each) for each in enumerate(payloads)))
    finally:
        await driver.close()


async def next_message(driver: Driver, seconds: float = PATIENCE_S) -> Message:
    while True:
        push = await driver.pushes.get(seconds)
        if isinstance(push, Delivered):
            place, data = push.body.message_id, push.headers_and_payload
            position = Position(place.ledgerId, place.entryId)
            return Message(position, bytes(data[payload_offset(data) :]))
        if not isinstance(push, Received) or push.type != TYPES["ACTIVE_CONSUMER_CHANGE"]:
            what = f"{NAMES[push.type]} {push.body}" if isinstance(push, Received) else repr(push)
            raise RequestError(f"a consumer got {what}")


async def end_transaction(driver: Driver, txn: TxnId, *, commit: bool) -> WireCode | None:
    """None: it was accepted; else why it was refused."""
    try:
        await driver.request(
            "END_TXN",
            txn_action=pb.COMMIT if commit else pb.ABORT,
            **txn_fields(txn),
        )
    except RequestError as error:
        if error.wire_code is None:
            raise
        return WireCode(error.wire_code)
    return None


def _place(position: Position) -> dict[str, int]:
    return {"ledgerId": position.ledger_id, "entryId": position.entry_id}


# --- the load


class TxnLoad:
    """All clients. They run until `ending` is set and nothing is owed to them."""

    def __init__(
        self,
        history: TxnHistory,
        port: int,
        seed: int,
        *,
        workers: int = WORKERS,
        legacy_share: float = 0.0,
    ) -> None:
        self.up = asyncio.Event()
        self.life = 0
        self.long_timeout_ms = _LONG_TIMEOUT_MS
        self.draining = False
        self.ending = False
        self.commit_sent = asyncio.Event()
        self.commit_answered = asyncio.Event()
        self.history = history
        self.port = port
        self.legacy_share = legacy_share
        """Of transactions that are begun as v4 clients do."""
        self._workers = [
            _Worker(self, number, Random(f"{seed} worker {number}")) for number in range(workers)
        ]

    def outlive_start(self, seconds: float) -> None:
        """What is open when the server dies must be open when the next one has started."""
        self.long_timeout_ms = max(_LONG_TIMEOUT_MS, round(_STARTS_OUTLIVED * seconds * 1000))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for topic in OUTPUTS:
                group.create_task(self.client(partial(self._see, topic)))
            for worker in self._workers:
                group.create_task(self.client(worker.work))

    async def client(self, work: Callable[[Driver], Awaitable[bool]]) -> None:
        """Give `work` one connection after the other until it says that it is done."""
        is_done = False
        while not is_done:
            await self.up.wait()
            life, driver = self.life, None
            try:
                driver = await Driver.connect(HOST, self.port)
                is_done = await work(driver)
            except (RemoteProtocolError, OSError) as error:
                if self.up.is_set() and self.life == life:
                    self.history.fault(TxnFault.FAILED, f"a connection broke: {error!r}")
            except RequestError as error:
                self._refused(error)
            except MagnetarError as error:
                self.history.fault(TxnFault.FAILED, repr(error))
            finally:
                if driver is not None:
                    driver.abort()
            if not is_done:
                await asyncio.sleep(_PAUSE_SECONDS)

    def _refused(self, error: RequestError) -> None:
        self.history.events["refused"] += 1
        if error.wire_code not in _NOT_READY:
            self.history.fault(TxnFault.FAILED, f"refused: {error!r}")

    async def _see(self, topic: str, driver: Driver) -> bool:
        await subscribe(driver, topic, ALONG, SubscriptionType.EXCLUSIVE)
        driver.send("FLOW", consumer_id=1, messagePermits=_PERMITS)
        while not self.ending:
            try:
                message = await next_message(driver, _IDLE_SECONDS)
            except DeadlineExceeded:
                continue
            self.history.saw(topic, message.position, Output.of(message.payload))
            driver.send(
                "ACK",
                consumer_id=1,
                ack_type=pb.CommandAck.Individual,
                message_id=[_place(message.position)],
            )
        return True


class _Worker:
    """One transaction after the other."""

    def __init__(self, load: TxnLoad, number: int, chance: Random) -> None:
        self._load = load
        self._history = load.history
        self._number = number
        self._chance = chance
        self._opened = 0
        self._sequence = 0
        self._owed: Attempt | None = None
        """What END_TXN was sent for, and no answer came."""
        self._torn: _Torn | None = None
        """What is to be continued if the connection is lost."""

    @property
    def _name(self) -> str:
        return f"worker-{self._number}-{self._opened}"

    async def work(self, driver: Driver) -> bool:
        """Serve a connection; True: the load ends, and all answers are there."""
        if self._owed is not None:
            self._history.events["repeated END_TXN"] += 1
            await self._end(driver, self._owed)
        if self._load.ending:
            return True
        if self._torn is None:
            self._opened += 1
            self._sequence = 0
        for number, topic in enumerate(OUTPUTS):
            await open_producer(driver, topic, number, self._name)
        if self._torn is not None:
            await self._continue(driver, self._torn)
        await subscribe(driver, INPUT, SUBSCRIPTION, SubscriptionType.SHARED)
        driver.send("FLOW", consumer_id=1, messagePermits=_TAKEN_MAX)
        while not self._load.ending:
            messages = await self._take(driver)
            if messages and not await self._transform(driver, messages):
                return False
            driver.send("FLOW", consumer_id=1, messagePermits=len(messages))
        return True

    async def _take(self, driver: Driver) -> list[Message]:
        try:
            found = [await next_message(driver, _IDLE_SECONDS)]
        except DeadlineExceeded:
            return []
        wanted = self._chance.randint(1, _TAKEN_MAX)
        while len(driver.pushes) and len(found) < wanted:
            found.append(await next_message(driver))
        return found

    async def _transform(self, driver: Driver, messages: list[Message]) -> bool:
        """One transaction; False: the connection must be dropped, to give inputs back."""
        draw = self._chance.random()
        leave = draw >= _COMMIT_SHARE + _ABORT_SHARE
        acks_first = not leave and self._chance.random() < 0.5
        timeout_ms = _LEFT_ALONE_MS if leave else self._timeout_ms(acks_first)
        attempt = await self._begin(driver, messages, timeout_ms)
        if not is_metadata(attempt.txn) and not await self._add(driver, attempt):
            return False
        acks: list[_Step] = [partial(self._ack, driver, attempt, each) for each in messages]
        sequences = {number: self._next_sequence() for number in attempt.numbers}
        sends = self._sends(driver, attempt, sequences)
        if leave:
            return await self._leave_alone(self._mixed(sends, acks))
        if acks_first:
            is_whole = await self._all_accepted(acks)
            self._torn = _Torn(attempt, sequences) if is_whole else None
            is_whole = await self._all_accepted(sends) and is_whole
            await asyncio.sleep(self._chance.random() * _THINK_SECONDS)
            await driver.drain()  # a connection that was lost meanwhile is noticed here
        else:
            is_whole = await self._all_accepted(self._mixed(sends, acks))
        await self._end_first(driver, attempt, commit=is_whole and draw < _COMMIT_SHARE)
        return is_whole

    def _timeout_ms(self, acks_first: bool) -> int:
        """How long one that is to end may take."""
        if self._load.draining:
            return _DRAIN_TIMEOUT_MS
        long_ms = self._load.long_timeout_ms if acks_first else _LONG_TIMEOUT_MS
        return self._chance.choice((_SHORT_TIMEOUT_MS, long_ms, long_ms))

    async def _leave_alone(self, steps: list[_Step]) -> bool:
        """Do some of it, or all, and no more; whether no input must be given back."""
        self._history.events["left alone"] += 1
        if self._chance.random() < 0.5:
            await self._all_accepted(steps[: self._chance.randrange(len(steps))])
            return False
        return await self._all_accepted(steps) and self._chance.random() < 0.5

    async def _continue(self, driver: Driver, torn: _Torn) -> None:
        """On another connection, perhaps to a server that knows it from its records alone."""
        self._history.events["continued"] += 1
        is_whole = await self._all_accepted(self._sends(driver, torn.attempt, torn.sequences))
        await self._end_first(driver, torn.attempt, commit=is_whole)
        if torn.attempt.known == "COMMITTED":
            self._history.events["continued and committed"] += 1

    def _sends(self, driver: Driver, attempt: Attempt, sequences: dict[int, int]) -> list[_Step]:
        return [partial(self._send, driver, attempt, *each) for each in sequences.items()]

    def _mixed(self, sends: list[_Step], acks: list[_Step]) -> list[_Step]:
        """In any order that keeps that of sends: sequence ids ascend."""
        turns = [iter(sends)] * len(sends) + [iter(acks)] * len(acks)
        self._chance.shuffle(turns)
        return [next(turn) for turn in turns]

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    async def _end_first(self, driver: Driver, attempt: Attempt, *, commit: bool) -> None:
        attempt.asked = "COMMITTED" if commit else "ABORTED"
        self._torn, self._owed = None, attempt
        await self._end(driver, attempt)

    async def _begin(self, driver: Driver, messages: list[Message], timeout_ms: int) -> Attempt:
        deadline = time.time() + timeout_ms / 1000
        answer = await driver.request(
            "NEW_TXN",
            tc_id=self._chance.randrange(PARTITIONS),
            txn_ttl_millis=timeout_ms,
            scalable=self._chance.random() >= self._load.legacy_share,
        )
        txn = TxnId(answer.txnid_most_bits, answer.txnid_least_bits)
        attempt = Attempt(txn, [int(each.payload) for each in messages], deadline)
        self._history.began(attempt)
        self._history.events["begun"] += 1
        return attempt

    async def _add(self, driver: Driver, attempt: Attempt) -> bool:
        """Say where a legacy transaction takes part, as its clients do before they do anything."""
        fields: dict[str, Any] = dict(txn_fields(attempt.txn))
        place = {"topic": INPUT, "subscription": SUBSCRIPTION}
        try:
            await driver.request("ADD_PARTITION_TO_TXN", partitions=OUTPUTS, **fields)
            await driver.request("ADD_SUBSCRIPTION_TO_TXN", subscription=[place], **fields)
        except RequestError as error:
            if error.wire_code != WireCode.INVALID_TXN_STATUS or not attempt.may_be_over:
                raise
            self._history.events["late ADD refused"] += 1
            return False
        return True

    async def _all_accepted(self, steps: Iterable[_Step]) -> bool:
        """All at once, or one after the other."""
        if self._chance.random() < 0.5:
            return all([await step() for step in steps])
        results = await asyncio.gather(*(step() for step in steps), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return all(results)

    async def _send(self, driver: Driver, attempt: Attempt, number: int, sequence: int) -> bool:
        output = Output(attempt.name, number)
        fields: dict[str, Any] = dict(txn_fields(attempt.txn))
        entry = build_message(
            output.payload(), producer_name=self._name, sequence_id=sequence, **fields
        )
        producer = OUTPUTS.index(output.topic)
        try:
            await driver.publish(producer, sequence, entry, **fields)
        except RequestError as error:
            if error.wire_code != WireCode.NOT_ALLOWED or not attempt.may_be_over:
                self._history.fault(TxnFault.FAILED, f"SEND of {attempt}: {error!r}")
            self._history.events["late SEND refused"] += 1
            return False
        return True

    async def _ack(self, driver: Driver, attempt: Attempt, message: Message) -> bool:
        try:
            await driver.request(
                "ACK",
                consumer_id=1,
                ack_type=pb.CommandAck.Individual,
                message_id=[_place(message.position)],
                **txn_fields(attempt.txn),
            )
        except RequestError as error:
            # It may be late, or another transaction that is still open has acknowledged it.
            if error.wire_code != WireCode.TRANSACTION_CONFLICT:
                self._history.fault(TxnFault.FAILED, f"ACK of {attempt}: {error!r}")
            self._history.events["ACK refused"] += 1
            return False
        return True

    async def _end(self, driver: Driver, attempt: Attempt) -> None:
        commit = attempt.asked == "COMMITTED"
        ending = asyncio.ensure_future(end_transaction(driver, attempt.txn, commit=commit))
        if commit:
            self._load.commit_sent.set()
        refusal = await ending
        if refusal in _NOT_READY:
            raise RemoteProtocolError("END_TXN must be repeated: the coordinator is not ready")
        self._owed = None
        if commit and refusal is None:
            self._load.commit_answered.set()
        if refusal is None:
            self._history.ended(attempt, attempt.asked)
        elif refusal == WireCode.INVALID_TXN_STATUS:
            self._history.events["late END_TXN refused"] += commit
            self._history.ended(attempt, "ABORTED" if commit else "COMMITTED")
        else:
            self._history.fault(TxnFault.FAILED, f"END_TXN of {attempt}: {refusal!r}")
