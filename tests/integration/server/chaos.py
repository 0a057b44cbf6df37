"""Clients that send any valid command at any time, and keep account of the replies.

Owns: `ChaosClient`. Everything it does is drawn from a seeded source; only the timing is the
machine's. It sends to producers that it believes open alone, because a send without a producer
rightly ends the connection.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any, Final

from harness.limits import PATIENCE_S, within
from magnetar.errors import MagnetarError
from magnetar.server.app import Server
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import NAMES
from magnetar.wire.messages import Delivered, Received

TOPICS: Final = ("a", "b", "parts", "parts-partition-1", "non-persistent://public/default/n", "x/y")
_INT64_MAX: Final = 2**63 - 1
_SPECIAL_IDS: Final = (
    {"ledgerId": 2**64 - 1, "entryId": 2**64 - 1},
    {"ledgerId": _INT64_MAX, "entryId": _INT64_MAX},
    {"ledgerId": 2**64 - 5, "entryId": 3},
    {"ledgerId": 0, "entryId": 0},
    {"ledgerId": 3, "entryId": 2**63},
)
_PAUSE_SECONDS: Final = 0.02


class ChaosClient:
    """One connection at a time, and another one when that is cut."""

    def __init__(self, random: Random, connect: Any) -> None:
        self._random = random
        self._connect = connect
        self._driver: Driver
        self._request_id = 0
        self._sequence_id = 0
        self._replies: Counter[int] = Counter()
        self._asked: dict[int, str] = {}
        self._producers: dict[int, str] = {}
        """Those that were opened, by the reply, and not closed since."""
        self._opening: dict[int, int] = {}
        self._closing: dict[int, int] = {}
        """The request by which it was last asked for, or closed."""
        self._seen: list[dict[str, Any]] = list(_SPECIAL_IDS)

    async def run(self, steps: int) -> None:
        self._driver = await self._connect()
        for _ in range(steps):
            await self._step()
        await self._settle()
        await self._driver.close()

    async def _step(self) -> None:
        roll = self._random.random()
        if roll < 0.01:
            self._driver.abort()
            await self._driver.lost()
            await self._begin_again()
        elif roll < 0.03:
            await self._settle()
        elif roll < 0.15:
            await asyncio.sleep(self._random.choice((0, 0.001)))
            self._read()
        else:
            self._read()
            self._say()

    async def _begin_again(self) -> None:
        self._asked.clear()
        self._replies.clear()
        self._producers.clear()
        self._opening.clear()
        self._closing.clear()
        self._driver = await self._connect()

    async def _settle(self) -> None:
        """Wait until everything that was asked is answered, and answered once."""
        while missing := {self._asked[each] for each in self._asked.keys() - self._replies.keys()}:
            async with within(f"answers to {missing}"):
                self._take(await self._driver.pushes.get(2 * PATIENCE_S))
        self._driver.send("PING")
        while self._take(await self._driver.pushes.get()) != "PONG":
            pass
        unasked = self._replies.keys() - self._asked.keys()
        assert not unasked, f"answers to what was not asked: {unasked}"
        twice = [self._asked[each] for each, count in self._replies.items() if count > 1]
        assert not twice, f"answered more than once: {twice}"
        self._asked.clear()
        self._replies.clear()

    # --- what comes

    def _read(self) -> None:
        while len(self._driver.pushes):
            self._take(self._driver.pushes.get_nowait())
        if self._driver.failure is not None:
            raise self._driver.failure

    def _take(self, push: Any) -> str:
        if isinstance(push, Delivered):
            here = push.body.message_id
            self._seen.append({"ledgerId": here.ledgerId, "entryId": here.entryId})
            return "MESSAGE"
        assert isinstance(push, Received)
        name, body = NAMES[push.type], push.body
        self._note(name, body)
        return name

    def _note(self, name: str, body: Any) -> None:
        if name == "CLOSE_PRODUCER":
            self._producers.pop(body.producer_id, None)
        request_id = getattr(body, "request_id", 2**64 - 1)
        if request_id == 2**64 - 1:
            return
        if name == "PRODUCER_SUCCESS":
            for producer_id, asked in list(self._opening.items()):
                if asked == request_id:
                    self._producers[producer_id] = body.producer_name
            if body.producer_ready and (request_id not in self._asked or self._replies[request_id]):
                return  # one that waited is told a second time
        self._closing = {key: each for key, each in self._closing.items() if each != request_id}
        self._replies[request_id] += 1

    # --- what is said

    def _say(self) -> None:
        name = self._random.choice(_COMMANDS)
        getattr(self, f"_say_{name}")()

    def _ask(self, command: str, **fields: Any) -> int:
        self._request_id += 1
        self._asked[self._request_id] = command
        self._driver.send(command, request_id=self._request_id, **fields)
        return self._request_id

    def _number(self) -> int:
        return self._random.randrange(3)

    def _topic(self) -> str:
        return self._random.choice(TOPICS)

    def _id(self) -> dict[str, Any]:
        found = dict(self._random.choice(self._seen[-50:] + list(_SPECIAL_IDS)))
        if self._random.random() < 0.1:
            found["ack_set"] = [self._random.getrandbits(63)]
        return found

    def _say_producer(self) -> None:
        number = self._number()
        if number in self._closing:
            return
        fields: dict[str, Any] = {}
        if self._random.random() < 0.3:
            fields["producer_name"] = self._random.choice(("p", "q"))
        if self._random.random() < 0.3:
            fields["producer_access_mode"] = self._random.randrange(4)
        if self._random.random() < 0.1:
            fields["initial_subscription_name"] = "s1"
        if self._random.random() < 0.2:
            fields["schema"] = self._schema()
        self._producers.pop(number, None)
        self._opening[number] = self._ask(
            "PRODUCER",
            topic=self._topic(),
            producer_id=number,
            epoch=self._random.randrange(3),
            **fields,
        )

    def _say_close_producer(self) -> None:
        number = self._number()
        self._producers.pop(number, None)
        self._opening.pop(number, None)
        self._closing[number] = self._ask("CLOSE_PRODUCER", producer_id=number)

    def _say_send(self) -> None:
        for number in list(self._producers):
            for _ in range(self._random.randrange(4)):
                self._sequence_id += 1
                fields: dict[str, Any] = {"sequence_id": self._sequence_id}
                count = self._random.choice((1, 1, 5))
                batch: dict[str, Any] = {} if count == 1 else {"num_messages_in_batch": count}
                entry = build_message(b"x" * self._random.randrange(100), **batch, **fields)
                if self._random.random() < 0.05:
                    entry = entry[:-1] + b"!"
                self._driver.send("SEND", entry, producer_id=number, num_messages=count, **fields)

    def _say_subscribe(self) -> None:
        kind = self._random.randrange(4)
        fields: dict[str, Any] = {}
        if kind == 3 and self._random.random() < 0.5:
            ends = sorted(self._random.randrange(70_000) for _ in range(2))
            spans = [{"start": ends[0], "end": ends[1]}]
            fields["keySharedMeta"] = {"keySharedMode": 1, "hashRanges": spans}
        if self._random.random() < 0.2:
            fields["start_message_id"] = self._id() | {"ack_set": []}
        if self._random.random() < 0.1:
            fields["schema"] = self._schema()
        self._ask(
            "SUBSCRIBE",
            topic=self._topic(),
            subscription=self._random.choice(("s1", "s2", "")),
            subType=kind,
            consumer_id=self._number(),
            durable=self._random.random() < 0.7,
            initialPosition=self._random.randrange(2),
            priority_level=self._random.randrange(2),
            **fields,
        )

    def _schema(self) -> dict[str, Any]:
        kind = self._random.choice((0, 2, 4))
        data = self._random.choice((b"%d" % self._number(), b'"int"', b'"long"', b"[" * 5000))
        return {"name": "s", "schema_data": data, "type": kind}

    def _say_flow(self) -> None:
        permits = self._random.choice((0, 1, 10, 1000, 2**32 - 1))
        self._driver.send("FLOW", consumer_id=self._number(), messagePermits=permits)

    def _say_ack(self) -> None:
        fields = {
            "consumer_id": self._number(),
            "ack_type": self._random.randrange(2),
            "message_id": [self._id() for _ in range(self._random.choice((0, 1, 1, 3)))],
        }
        if self._random.random() < 0.5:
            self._ask("ACK", **fields)
        else:
            self._driver.send("ACK", **fields)

    def _say_redeliver(self) -> None:
        ids = [self._id() for _ in range(self._random.randrange(3))]
        self._driver.send(
            "REDELIVER_UNACKNOWLEDGED_MESSAGES", consumer_id=self._number(), message_ids=ids
        )

    def _say_seek(self) -> None:
        if self._random.random() < 0.5:
            self._ask("SEEK", consumer_id=self._number(), message_id=self._id())
        else:
            moment = self._random.choice((0, 1, 2**63, 2**64 - 1))
            self._ask("SEEK", consumer_id=self._number(), message_publish_time=moment)

    def _say_of_consumer(self) -> None:
        command = self._random.choice(
            ("UNSUBSCRIBE", "CLOSE_CONSUMER", "GET_LAST_MESSAGE_ID", "CONSUMER_STATS")
        )
        self._ask(command, consumer_id=self._number())

    def _say_of_topic(self) -> None:
        command = self._random.choice(("LOOKUP", "PARTITIONED_METADATA", "GET_SCHEMA"))
        self._ask(command, topic=self._topic())

    def _say_schema(self) -> None:
        self._ask("GET_OR_CREATE_SCHEMA", topic=self._topic(), schema=self._schema())

    def _say_watch(self) -> None:
        pattern = self._random.choice(("public/default/.*", "(", "x" * 51))
        self._ask(
            "WATCH_TOPIC_LIST",
            watcher_id=self._number(),
            namespace="public/default",
            topics_pattern=pattern,
        )

    def _say_unwatch(self) -> None:
        self._ask("WATCH_TOPIC_LIST_CLOSE", watcher_id=self._number())

    def _say_list(self) -> None:
        self._ask(
            "GET_TOPICS_OF_NAMESPACE", namespace="public/default", mode=self._random.randrange(3)
        )

    def _say_unbuilt(self) -> None:
        self._ask(self._random.choice(("NEW_TXN", "END_TXN", "ADD_PARTITION_TO_TXN")))


_COMMANDS: Final = (
    *("producer", "producer", "close_producer", "send", "send", "send"),
    *("subscribe", "subscribe", "subscribe", "flow", "flow", "ack", "ack", "redeliver", "seek"),
    *("of_consumer", "of_consumer", "of_topic", "schema", "watch", "unwatch", "list", "unbuilt"),
)


async def disturb(server: Server, random: Random, stop: asyncio.Event) -> None:
    """What an operator may do meanwhile: unload, delete and end topics."""
    while not stop.is_set():
        await asyncio.sleep(_PAUSE_SECONDS)
        loaded = list(server.topics.loaded)
        if not loaded:
            continue
        name = random.choice(loaded)
        try:
            deed = random.randrange(4)
            if deed == 0:
                await server.topics.delete(name, force=random.random() < 0.5)
            elif deed == 1:
                topic = await server.topics.get(name)
                await topic.terminate()
            else:
                await server.topics.unload(name)
        except MagnetarError:
            continue  # refused, or it was gone
