"""What a restarted server has, against what it told its clients before it was killed.

Owns: reading every topic and subscription back through the protocol (`check_server`), the
comparison with a `ServerHistory`, and its settling: what was read is certain from then on.

The end of a topic is marked by a message of the check itself (`SENTINEL`). One consumer gets
everything in the order of the log, so whatever comes before that message is all there is.

Invariants:
1. What has a receipt is in the log, at the place that the receipt named; what is in the log was
   sent; a producer's messages stand in the order in which it sent them; with dedup each stands
   there once.
2. A subscription delivers every message that nobody acknowledged, and none whose acknowledgement
   was answered. One that was sent and not answered may have counted or not, message by message.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from harness.crash.server.history import (
    AUDIT,
    SENTINEL,
    Entry,
    Sent,
    ServerHistory,
    SubscriptionHistory,
    TopicHistory,
    all_bits,
)
from harness.crash.server.load import HOST, next_entry, next_receipt, open_producer, send, subscribe
from harness.patient_clients import PatientDriver
from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType

_PERMITS = 10_000_000


class ServerFault(Enum):
    """What can be wrong after a restart."""

    LOST = "lost"
    DOUBLED = "doubled"
    UNEXPLAINED = "unexplained"
    DISORDERED = "disordered"
    CAME_BACK = "came back"
    SKIPPED = "skipped"
    FAILED = "failed"


class ServerViolation(NamedTuple):
    fault: ServerFault
    text: str


@dataclass(slots=True)
class ServerVerdict:
    """The result of one comparison."""

    messages: int = 0
    """Entries with a receipt, or seen before, that were looked for."""
    acknowledged: int = 0
    """Entries of which an acknowledgement was answered, or is known to hold, by subscription."""
    violations: list[ServerViolation] = field(default_factory=list)

    def add(self, fault: ServerFault, text: str) -> None:
        self.violations.append(ServerViolation(fault, text))


async def check_server(history: ServerHistory, port: int) -> ServerVerdict:
    """Read everything back, compare, and let the history go on from what was found."""
    verdict = ServerVerdict()
    for topic in history.topics:
        end = await _mark_end(topic, port, history.life)
        audit = SubscriptionHistory(AUDIT, SubscriptionType.EXCLUSIVE)
        found = await asyncio.gather(
            *[_read(topic, each, port, end) for each in (audit, *topic.subscriptions)]
        )
        log = compare_log(topic, found[0], verdict)
        for subscription, delivered in zip(topic.subscriptions, found[1:], strict=True):
            compare_subscription(topic, subscription, log, delivered, verdict)
        topic.certain = log
    return verdict


# --- reading


async def _mark_end(topic: TopicHistory, port: int, life: int) -> Position:
    """Publish a message; its place is the end of the topic."""
    producer = topic.producers[SENTINEL]
    driver = await PatientDriver.connect(HOST, port)
    try:
        await open_producer(driver, topic, SENTINEL)
        owed = [sent._replace(attempt=life) for sent in producer.unreceipted.values()]
        marks = [*owed, Sent(SENTINEL, producer.next_sequence_id, 1, life)]
        position: Position | None = None
        for sent in marks:
            send(driver, topic, sent)
            _, position = await next_receipt(driver)
            topic.receipt(sent, position)
    finally:
        await driver.close()
    assert position is not None, "the last mark is new, so its receipt names its place"
    return position


async def _read(
    topic: TopicHistory, subscription: SubscriptionHistory, port: int, end: Position
) -> list[Entry]:
    """Everything that the subscription delivers up to `end`, in the order in which it came."""
    driver = await PatientDriver.connect(HOST, port)
    try:
        await subscribe(driver, topic, subscription, 1)
        driver.send("FLOW", consumer_id=1, messagePermits=_PERMITS)
        found: list[Entry] = []
        while not found or found[-1].position != end:
            found.append((await next_entry(driver))[1])
        return found
    finally:
        await driver.close()


# --- comparing


def compare_log(
    topic: TopicHistory, entries: list[Entry], verdict: ServerVerdict
) -> dict[Position, Sent]:
    """The log by position, without what is damaged."""
    log: dict[Position, Sent] = {}
    for position, sent, _ in entries:
        if sent is None or sent.producer not in topic.producers:
            verdict.add(ServerFault.UNEXPLAINED, f"{topic.name} {position} is nobody's")
        elif log.setdefault(position, sent) is not sent:
            verdict.add(ServerFault.DOUBLED, f"{topic.name} {position} was delivered twice")
    for position, sent in topic.certain.items():
        verdict.messages += 1
        if log.get(position) != sent:
            text = f"{topic.name} {position} is {log.get(position)}, receipted {sent}"
            verdict.add(ServerFault.LOST, text)
    _compare_copies(topic, log, verdict)
    _compare_order(topic, log, verdict)
    return log


def _compare_copies(topic: TopicHistory, log: dict[Position, Sent], verdict: ServerVerdict) -> None:
    copies = Counter((sent.producer, sent.sequence_id) for sent in log.values())
    for (name, sequence_id), count in copies.items():
        sends = topic.producers[name].sends[sequence_id]
        text = f"{topic.name} {name} {sequence_id} is there {count} times, sent {sends} times"
        if not sends:
            verdict.add(ServerFault.UNEXPLAINED, text)
        elif count > (1 if topic.deduplicates else sends):
            verdict.add(ServerFault.DOUBLED, text)
    for name, producer in topic.producers.items():
        for sequence_id in producer.receipted:
            if not copies[name, sequence_id]:
                text = f"{topic.name} {name} {sequence_id} has a receipt and is not there"
                verdict.add(ServerFault.LOST, text)


def _compare_order(topic: TopicHistory, log: dict[Position, Sent], verdict: ServerVerdict) -> None:
    """Of one connection, or with dedup of all, a producer's sequence ids ascend."""
    last: dict[tuple[str, int], int] = {}
    for position in sorted(log):
        sent = log[position]
        stream = (sent.producer, 0 if topic.deduplicates else sent.attempt)
        if sent.sequence_id <= last.get(stream, -1):
            text = f"{topic.name} {position}: {sent} stands behind {last[stream]}"
            verdict.add(ServerFault.DISORDERED, text)
        last[stream] = sent.sequence_id
    if [*log] != sorted(log):
        verdict.add(ServerFault.DISORDERED, f"{topic.name} was not delivered in its order")


def compare_subscription(
    topic: TopicHistory,
    subscription: SubscriptionHistory,
    log: dict[Position, Sent],
    entries: list[Entry],
    verdict: ServerVerdict,
) -> None:
    """Compare what came with what was acknowledged, and take it for the state from now on."""
    where = f"{topic.name} {subscription.name}"
    delivered = {entry.position: entry.unacked for entry in entries}
    if len(delivered) != len(entries):
        verdict.add(ServerFault.DOUBLED, f"{where} delivered an entry twice, unasked")
    for position in delivered.keys() - log.keys():
        verdict.add(ServerFault.UNEXPLAINED, f"{where} delivered {position}, not in the log")
    acked: dict[Position, int] = {}
    for position, sent in log.items():
        came, whole = delivered.get(position, 0), all_bits(sent.messages)
        sure = subscription.surely_acked(position, sent.messages)
        perhaps = subscription.perhaps_acked(position, sent.messages)
        verdict.acknowledged += sure != 0
        if came & sure:
            text = f"{where} {position}: {came & sure:b} of {whole:b} was acknowledged and is back"
            verdict.add(ServerFault.CAME_BACK, text)
        if missing := whole & ~perhaps & ~came:
            text = f"{where} {position}: {missing:b} of {whole:b} was never acknowledged, is gone"
            verdict.add(ServerFault.SKIPPED, text)
        if acked_now := whole & ~came:
            acked[position] = acked_now
    subscription.settle(acked)
