"""What many transactions leave behind: `python -m harness.crash.txn.soak --transactions 100000`.

Owns: a server with short retentions, a load of transactions that commit, abort or are left alone
over topics and subscriptions of which some are deleted meanwhile, and the count of records before
and after. The exit code is 0 only if every directory of the store has as many records as before the
load, and nearly all transactions did what they were to do.

The records are counted in the database file, by a connection that only reads: what the server says
of itself is not asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console

from harness.crash.server.process import ServerProcess
from harness.limits import PATIENCE_S, expire, reported
from harness.patient_clients import PatientDriver as Driver
from magnetar.errors import DeadlineExceeded, InvariantBroken, MagnetarError, RequestError
from magnetar.testing.virtual.driver import build_message
from magnetar.txn.records import ABORTED_RECORDS, HEADERS, OPS
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb

NAMESPACE: Final = "persistent://public/default"
KEPT: Final = ("kept-0", "kept-1", "kept-2")
SUBSCRIPTION: Final = "s"

SETTINGS: Final = {
    "MAGNETAR_TXN_RETENTION_SECONDS": "2",
    "MAGNETAR_TXN_COLLECT_SECONDS": "1",
}
WORKERS: Final = 64
CONNECTIONS: Final = 8
CHURN_EVERY: Final = 500
"""Transactions after which the topic that is not kept is replaced by another."""

_COMMIT_SHARE: Final = 0.7
_ABORT_SHARE: Final = 0.2
"""The rest is left alone until its deadline."""

_LONG_MS: Final = 600_000
_SHORT_MS: Final = 1500
_COORDINATORS: Final = 16
_EARLIEST: Final = 1
_SHARED: Final = 1
_RECEIPT_SECONDS: Final = 1.0
"""A send that crosses the end of its topic gets none."""

_DONE_SHARE: Final = 0.8
"""Of the transactions: others meet a topic that is being deleted."""

_LOOK_SECONDS: Final = 65.0
_LEFT_SECONDS: Final = 2 * PATIENCE_S
"""For retention, collection and the next look at every topic, which is once a minute."""


def counted(folder: Path) -> Counter[str]:
    """How many records each directory of the store has."""
    path = folder / "metadata" / "records.db"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT parent, count(*) FROM records GROUP BY parent").fetchall()
    return Counter(dict(rows))


# --- the load


class Client:
    """A connection: producers of all topics, and a consumer of each that only acknowledges."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handles = 0
        self._open: dict[str, asyncio.Task[int]] = {}
        self._sequences: Counter[int] = Counter()

    async def request(self, name: str, **fields: Any) -> Any:
        return await self._driver.request(name, **fields)

    async def use(self, topic: str) -> int:
        """The number of both handles on a topic, once they are open."""
        opening = self._open.get(topic)
        if opening is None:
            opening = self._open[topic] = asyncio.create_task(self._opened(topic))
        return await asyncio.shield(opening)

    async def _opened(self, topic: str) -> int:
        self._handles += 1
        number, name = self._handles, f"{NAMESPACE}/{topic}"
        await self.request(
            "SUBSCRIBE",
            topic=name,
            subscription=SUBSCRIPTION,
            subType=_SHARED,
            consumer_id=number,
            initialPosition=_EARLIEST,
        )
        await self.request("PRODUCER", topic=name, producer_id=number)
        return number

    def forget(self, topic: str) -> None:
        self._open.pop(topic, None)

    async def publish(self, topic: str, ids: dict[str, Any]) -> dict[str, int]:
        number = await self.use(topic)
        self._sequences[number] += 1
        sequence = self._sequences[number]
        message = build_message(b"soak", sequence_id=sequence, **ids)
        receipt = await self._driver.publish(
            number, sequence, message, timeout_s=_RECEIPT_SECONDS, **ids
        )
        place = receipt.message_id
        return {"ledgerId": place.ledgerId, "entryId": place.entryId}

    async def acknowledge(self, topic: str, place: dict[str, int], ids: dict[str, Any]) -> None:
        number = await self.use(topic)
        await self.request("ACK", consumer_id=number, ack_type=0, message_id=[place], **ids)


class Soak:
    """So many transactions on one server."""

    def __init__(self, port: int, admin_url: str, seed: int) -> None:
        self._port = port
        self._admin_url = admin_url
        self._random = Random(seed)
        self._left = 0
        self._passing = "passing-0"
        self._clients: list[Client] = []
        self.outcomes: Counter[str] = Counter()

    async def connect(self) -> None:
        for _ in range(CONNECTIONS):
            driver = await Driver.connect("127.0.0.1", self._port)
            client = Client(driver)
            self._clients.append(client)

    async def run(self, transactions: int) -> None:
        self._left = transactions
        async with asyncio.TaskGroup() as group:
            for number in range(WORKERS):
                group.create_task(self._work(self._clients[number % CONNECTIONS]))

    async def _work(self, client: Client) -> None:
        while self._left > 0:
            self._left -= 1
            number = self._left
            if number % CHURN_EVERY == 0:
                await self._churn(number)
            topics = self._random.sample([*KEPT, self._passing], 2)
            try:
                await self._transact(client, number, topics)
            except RequestError as error:
                # Its topic or subscription went away under it.
                self.outcomes[f"refused: {pb.ServerError.Name(error.wire_code or 0)}"] += 1
                client.forget(self._passing)
            except DeadlineExceeded:
                self.outcomes["no answer"] += 1

    async def _transact(self, client: Client, number: int, topics: Sequence[str]) -> None:
        chance = self._random.random()
        ends = chance < _COMMIT_SHARE + _ABORT_SHARE
        answer = await client.request(
            "NEW_TXN",
            tc_id=number % _COORDINATORS,
            txn_ttl_millis=_LONG_MS if ends else _SHORT_MS,
            scalable=True,
        )
        txn = TxnId(answer.txnid_most_bits, answer.txnid_least_bits)
        ids = {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}
        commit = chance < _COMMIT_SHARE
        try:
            place = await client.publish(topics[0], {})
            await asyncio.gather(
                client.acknowledge(topics[0], place, ids),
                *(client.publish(topic, ids) for topic in topics),
            )
        finally:
            if ends:
                action = pb.COMMIT if commit else pb.ABORT
                await client.request("END_TXN", txn_action=action, **ids)
        self.outcomes["committed" if commit else "aborted" if ends else "left alone"] += 1

    async def _churn(self, number: int) -> None:
        """Another topic takes the place of the one that is not kept."""
        gone, self._passing = self._passing, f"passing-{number}"
        for client in self._clients:
            client.forget(gone)
        if number % (2 * CHURN_EVERY):
            await self._admin("DELETE", f"{gone}/subscription/{SUBSCRIPTION}?force=true")
        await self._admin("DELETE", f"{gone}?force=true")
        self.outcomes["topics deleted"] += 1

    # --- the end

    async def finish(self) -> None:
        """Nothing that is kept holds a message, so everything may be trimmed; the rest goes."""
        await asyncio.sleep(3 * _SHORT_MS / 1000)  # nothing is open any more
        names = {each.rpartition("/")[2] for each in json.loads(await self._admin("GET", ""))}
        for topic in sorted(names - set(KEPT)):
            await self._admin("DELETE", f"{topic}?force=true")
        for topic in KEPT:
            await self._admin("POST", f"{topic}/subscription/{SUBSCRIPTION}/skip_all")
            await self._admin("PUT", f"{topic}/unload")  # which begins a new ledger
            for client in self._clients:
                client.forget(topic)
                await client.use(topic)

    async def _admin(self, method: str, path: str) -> bytes:
        url = f"{self._admin_url}/admin/v2/{NAMESPACE.replace('://', '/')}/{path}".rstrip("/")

        def ask() -> bytes:
            with urlopen(Request(url, method=method), timeout=PATIENCE_S) as answer:
                body: bytes = answer.read()
                return body

        try:
            return await asyncio.to_thread(ask)
        except HTTPError as error:  # it is gone already, or was never made
            self.outcomes[f"{method}: {error}"] += 1
            return b""


async def soaked(folder: Path, transactions: int, seed: int, console: Console) -> int:
    """Load a server; how many records are left over, or gone that were there before."""
    os.environ.update(SETTINGS)
    process = ServerProcess.start(folder)
    try:
        if not await process.until_ready():
            raise InvariantBroken(f"the server did not start; see {folder}.stderr")
        soak = Soak(process.port, process.admin_url, seed)
        await soak.connect()
        await soak.run(WORKERS)  # every coordinator has its block of ids, every cursor its record
        await soak.finish()
        before = await _at_rest(folder)
        for parent in (HEADERS, OPS, ABORTED_RECORDS):
            del before[parent]  # a server without transactions has none
        began = time.monotonic()
        await soak.run(transactions)
        console.print(f"{transactions:,} transactions in {time.monotonic() - began:.0f} s")
        console.print(f"records: {before.total():,} before, {counted(folder).total():,} under load")
        for outcome, count in sorted(soak.outcomes.items()):
            console.print(f"  {count:8,} {outcome}")
        done = sum(soak.outcomes[each] for each in ("committed", "aborted", "left alone"))
        if done < _DONE_SHARE * transactions:
            raise InvariantBroken(f"only {done} of {transactions} transactions came to their end")
        await soak.finish()
        after = await _settled(folder, before, _LEFT_SECONDS)
    finally:
        process.kill()
    for parent in sorted(before.keys() | after.keys()):
        if after[parent] != before[parent]:
            console.print(f"  {parent}: {before[parent]:,} before, {after[parent]:,} after")
    return (after - before).total() + (before - after).total()


async def _at_rest(folder: Path) -> Counter[str]:
    """The count, once it has not changed for longer than between two looks at a topic."""
    found, since = counted(folder), time.monotonic()
    end = since + _LEFT_SECONDS
    while time.monotonic() - since < _LOOK_SECONDS:
        await asyncio.sleep(1.0)
        present = counted(folder)
        if present != found:
            found, since = present, time.monotonic()
        if time.monotonic() > end:
            expire("the records of an idle server stay as they are", _LEFT_SECONDS)
    return found


async def _settled(folder: Path, wanted: Counter[str], seconds: float) -> Counter[str]:
    """The count, once it is as wanted, or at the end."""
    end = time.monotonic() + seconds
    while True:
        await asyncio.sleep(1.0)
        found = counted(folder)
        if found == wanted or time.monotonic() > end:
            return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.crash.txn.soak")
    parser.add_argument("--transactions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    console.print(f"seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="magnetar-soak-") as folder:
        try:
            work = soaked(Path(folder) / "data", options.transactions, options.seed, console)
            left = asyncio.run(work)
        except MagnetarError as error:
            console.print(f"error: {error}")
            return 1
    console.print("nothing is left behind" if not left else f"{left:,} records too many or too few")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(reported(main))
