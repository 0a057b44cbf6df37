"""Reads all of a topic as any client may: with a reader, from the first entry on.

Owns: `read_log`, for the log alone or with the compacted view before it. Nobody may write to the
topic meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Final

from harness.simulation.broker.world import BrokerWorld, Client
from magnetar.model.ids import Position
from magnetar.server.handlers.values import position_of
from magnetar.wire.messages import Command, Delivered
from magnetar.wire.pb import pulsar_pb2 as pb

_CONSUMER_ID: Final = 7
_EARLIEST: Final = {"ledgerId": 2**64 - 1, "entryId": 2**64 - 1}
_ENOUGH_PERMITS: Final = 1_000_000
_SECONDS: Final = 100.0
_SURPLUS_SECONDS: Final = 0.5


async def read_log(
    world: BrokerWorld,
    client: Client,
    topic: str,
    *,
    name: str = "log-reader",
    compacted: bool = False,
) -> list[tuple[Position, bytes]]:
    """Every entry up to the last one at the time of the call; closes the connection."""
    log: list[tuple[Position, bytes]] = []

    def take(command: Command, at: float) -> bool:
        if not isinstance(command, Delivered):
            return False
        log.append((position_of(command.body.message_id), command.headers_and_payload))
        return True

    client.take = take
    await world.ask(
        client,
        "SUBSCRIBE",
        topic=topic,
        subscription=name,
        subType=pb.CommandSubscribe.Exclusive,
        consumer_id=_CONSUMER_ID,
        consumer_name=name,
        durable=False,
        start_message_id=_EARLIEST,
        **({"read_compacted": True} if compacted else {}),
    )
    reply = await world.ask(client, "GET_LAST_MESSAGE_ID", consumer_id=_CONSUMER_ID)
    last = position_of(reply.last_message_id)
    client.send("FLOW", consumer_id=_CONSUMER_ID, messagePermits=_ENOUGH_PERMITS)
    deadline = world.now() + _SECONDS
    while last.ledger_id >= 0 and not (log and log[-1][0] >= last):
        if world.now() > deadline:
            world.findings.broken(f"{topic}: a reader does not get to {last}")
            break
        await asyncio.sleep(0.05)
    if compacted:
        await asyncio.sleep(_SURPLUS_SECONDS)
    await client.close()
    return log
