"""What must hold when a consume-transform-produce load has drained.

Owns: `check_served`, which asks a server that runs, `until_forgotten`, which waits until one with a
short retention has collected all transactions, and `check_records`, which opens the folder of one
that was stopped.

Invariants:
1. Every input stands in the outputs exactly once, of the transaction whose commit was answered; a
   new subscription and a reader read the same, and all that was seen before stands where it stood.
2. After a while no transaction is open, nothing of the input is unacknowledged, and the
   ceiling of every topic is its end. A message outside of transactions is seen at once.
3. Every transaction answers END_TXN by its outcome, and the opposite with InvalidTxnStatus.
4. Of the records under `/txn/op` none is left; headers are final; what is hidden was aborted.
   Legacy transactions have no headers: of these the log answers.
5. After the retention no header is left, and what is hidden stays hidden.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from harness.crash.server.process import SMALL_LIMITS
from harness.crash.txn.history import INPUT, OUTPUTS, SUBSCRIPTION, Output, TxnFault, TxnHistory
from harness.crash.txn.load import (
    HOST,
    end_transaction,
    next_message,
    publish_all,
    subscribe,
)
from harness.limits import PATIENCE_S, expire
from harness.patient_clients import PatientAdmin
from harness.patient_clients import PatientDriver as Driver
from magnetar.errors import MagnetarError, WireCode
from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType
from magnetar.server.config import load
from magnetar.server.embedded import open_storage
from magnetar.txn.ids import is_metadata
from magnetar.txn.records import ABORTED_RECORDS, HEADERS, OPS, Aborted, Header, decode

_POLL_SECONDS: Final = 0.2
_PERMITS: Final = 10_000_000
_SHOWN: Final = 10
_TRANSACTIONS: Final = "/admin/v3/transactions"
_FIRST_MESSAGE: Final = {"ledgerId": 2**64 - 1, "entryId": 2**64 - 1}
"""How the protocol writes the position before all others."""

Reading = dict[str, list[tuple[Position, Output]]]
"""By topic, in the order of delivery."""


class Server(NamedTuple):
    """Where to ask."""

    port: int
    admin_url: str


async def check_served(
    history: TxnHistory, server: Server, round_name: str, *, forgotten: bool = False
) -> None:
    """Everything that can be asked of a server; each round reads anew, by its name.

    Of transactions that are forgotten the outcomes are not asked.
    """
    await _until_quiet(server)
    mark = f"end {round_name}".encode()
    for topic in OUTPUTS:
        await publish_all(server.port, topic, f"mark-{round_name}", [mark])
    by_subscription = await _read(history, server.port, mark, durable=True)
    by_reader = await _read(history, server.port, mark, durable=False)
    if by_subscription != by_reader:
        history.fault(TxnFault.FAILED, "a new subscription and a reader read differently")
    compare_outputs(history, by_subscription)
    if not forgotten:
        await _check_outcomes(history, server.port)


# --- quiet


async def _until_quiet(server: Server) -> None:
    until = time.monotonic() + PATIENCE_S
    async with PatientAdmin(server.admin_url) as admin:
        while troubles := await _unquiet(admin):
            if time.monotonic() > until:
                expire(f"nothing is under way any more; {'; '.join(troubles)}")
            await asyncio.sleep(_POLL_SECONDS)


async def _unquiet(admin: PatientAdmin) -> list[str]:
    """What is still under way."""
    troubles = []
    found = await admin.get(f"{_TRANSACTIONS}/open")
    if found["total"]:
        troubles.append(f"{found['total']} transactions are open: {found['transactions'][:3]}")
    for topic in (INPUT, *OUTPUTS):
        path = topic.replace("://", "/")
        # Statistics load the topic, so what is blocked is known exactly.
        stats = await admin.get(f"{path}/stats")
        blocked = await admin.get(f"{_TRANSACTIONS}/blocked/{path}")
        troubles += [
            f"the ceiling does not reach the end: {each}"
            for each in blocked["segments"]
            if not each["loaded"] or each["entriesBehind"] or each["blocker"]
        ]
        records = await admin.get(f"{_TRANSACTIONS}/transactionBufferInternalStats/{path}")
        if records["pins"]:
            troubles.append(f"{len(records['pins'])} pins: {records['pins'][:3]}")
        if topic == INPUT:
            troubles += await _unacknowledged(admin, path, stats)
    return troubles


async def _unacknowledged(admin: PatientAdmin, path: str, stats: Any) -> list[str]:
    troubles = []
    backlog = stats["subscriptions"][SUBSCRIPTION]["msgBacklog"]
    if backlog:
        troubles.append(f"{backlog} inputs are not acknowledged")
    records = await admin.get(f"{_TRANSACTIONS}/pendingAckInternalStats/{path}/{SUBSCRIPTION}")
    if records["acks"]:
        troubles.append(f"{len(records['acks'])} ack records: {records['acks'][:3]}")
    return troubles


# --- outputs


async def _read(history: TxnHistory, port: int, mark: bytes, *, durable: bool) -> Reading:
    """All outputs, up to the mark."""
    kind = "subscription" if durable else "reader"
    name = f"{kind} {mark.decode()}"
    start = {} if durable else {"start_message_id": _FIRST_MESSAGE}
    found: Reading = {topic: [] for topic in OUTPUTS}
    for topic in OUTPUTS:
        driver = await Driver.connect(HOST, port)
        try:
            await subscribe(
                driver, topic, name, SubscriptionType.EXCLUSIVE, durable=durable, **start
            )
            driver.send("FLOW", consumer_id=1, messagePermits=_PERMITS)
            while (message := await next_message(driver)).payload != mark:
                if not message.payload.startswith(b"end "):
                    found[topic].append((message.position, Output.of(message.payload)))
            last = (await driver.request("GET_LAST_MESSAGE_ID", consumer_id=1)).last_message_id
            if Position(last.ledgerId, last.entryId) != message.position:
                text = f"{topic}: the last is {last}, and {message.position} was delivered"
                history.fault(TxnFault.STUCK, text)
        except MagnetarError as error:
            history.fault(TxnFault.STUCK, f"{topic}, read by a {kind}: {error!r}")
        finally:
            driver.abort()
    return found


def compare_outputs(history: TxnHistory, reading: Reading) -> None:
    """Rule 1, for everything that one consumer read."""
    places: dict[int, list[tuple[str, Position, Output]]] = defaultdict(list)
    for topic, outputs in reading.items():
        positions = [position for position, _ in outputs]
        if positions != sorted(set(positions)):
            history.fault(TxnFault.DOUBLED, f"{topic} was not delivered in its order")
        for position, output in outputs:
            places[output.number].append((topic, position, output))
            _compare_output(history, topic, position, output)
        present = dict(outputs)
        for position, output in history.seen.get(topic, {}).items():
            if present.get(position) != output:
                text = f"{topic} {position}: {output} was seen, now {present.get(position)}"
                history.fault(TxnFault.LOST, text)
    for number in range(history.inputs):
        found, told = places.pop(number, []), history.transformed.get(number)
        if not found:
            attempt = "nobody" if told is None else str(history.attempts[told])
            history.fault(TxnFault.LOST, f"{number} is not there; committed by {attempt}")
        elif len(found) > 1:
            history.fault(TxnFault.DOUBLED, f"{number} is there {len(found)} times: {found}")
        elif told != found[0][2].txn:
            text = f"{number} is there by {found[0][2].txn}, acknowledged by {told}"
            history.fault(TxnFault.DOUBLED, text)
    for number, found in places.items():
        history.fault(TxnFault.EXPOSED, f"{number} was no input: {found}")


def _compare_output(history: TxnHistory, topic: str, position: Position, output: Output) -> None:
    attempt = history.attempts.get(output.txn)
    if attempt is None or attempt.known != "COMMITTED":
        history.fault(TxnFault.EXPOSED, f"{topic} {position}: {output} of {attempt}")
    elif output.number not in attempt.numbers or output.topic != topic:
        history.fault(TxnFault.EXPOSED, f"{topic} {position}: {output} was not sent so")


# --- outcomes


async def _check_outcomes(history: TxnHistory, port: int) -> None:
    driver = await Driver.connect(HOST, port)
    try:
        for attempt in history.attempts.values():
            commit = attempt.known == "COMMITTED"
            same = await end_transaction(driver, attempt.txn, commit=commit)
            other = await end_transaction(driver, attempt.txn, commit=not commit)
            if same is not None or other != WireCode.INVALID_TXN_STATUS:
                text = f"{attempt}: the same end is {same!r}, the opposite {other!r}"
                history.fault(TxnFault.REVERSED, text)
    finally:
        driver.abort()


# --- records


async def until_forgotten(history: TxnHistory, server: Server) -> None:
    """Wait until a server knows none of the transactions any more."""
    until = time.monotonic() + PATIENCE_S
    async with PatientAdmin(server.admin_url) as admin:
        for attempt in history.attempts.values():
            path = f"{_TRANSACTIONS}/transactionMetadata/{attempt.txn.most}/{attempt.txn.least}"
            while await admin.get_or_none(path) is not None:
                if time.monotonic() > until:
                    expire(f"{attempt} is forgotten")
                await asyncio.sleep(_POLL_SECONDS)


async def check_records(history: TxnHistory, folder: Path, *, forgotten: bool = False) -> int:
    """What is stored of transactions after an orderly stop; the number of headers."""
    storage = await open_storage(folder, limits=load({"data": str(folder)}, SMALL_LIMITS).limits)
    try:
        async with storage.connect() as store:
            ops = [record.key async for record in store.scan(OPS)]
            headers = [decode(each, Header) async for each in store.scan(HEADERS)]
            hidden = [decode(each, Aborted) async for each in store.scan(ABORTED_RECORDS)]
    finally:
        await storage.close()
    if ops:
        history.fault(TxnFault.LEFT_BEHIND, f"{len(ops)} op records: {ops[:_SHOWN]}")
    if forgotten:
        if headers:
            history.fault(TxnFault.LEFT_BEHIND, f"{len(headers)} headers: {headers[:_SHOWN]}")
    else:
        _compare_records(history, headers, hidden)
    return len(headers)


def _compare_records(history: TxnHistory, headers: list[Header], hidden: list[Aborted]) -> None:
    states = {header.txn: header.state for header in headers}
    for name, each in history.attempts.items():
        if not is_metadata(each.txn):
            states[name] = "COMMITTED" if each.known == "COMMITTED" else "ABORTED"
    for header in headers:
        attempt = history.attempts.get(header.txn)
        expected = attempt.known if attempt and attempt.known != "OPEN" else "ABORTED"
        if header.state != expected:
            history.fault(TxnFault.REVERSED, f"{attempt or header.txn} is stored as {header.state}")
    for name in history.attempts.keys() - states.keys():
        history.fault(TxnFault.LOST, f"the header of {history.attempts[name]} is gone")
    for record in hidden:
        if states.get(record.txn) != "ABORTED":
            text = f"{record.txn} is hidden in {record.segment} and is {states.get(record.txn)}"
            history.fault(TxnFault.LEFT_BEHIND, text)
