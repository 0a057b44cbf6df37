"""The durable side of acknowledgements in transactions: order of writes, owners, leftovers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar.errors import ManagedLedgerFenced, Unavailable
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.model.ids import Position
from magnetar.testing.virtual import virtual_time
from magnetar.txn.acks.ack_store import MetadataPendingAckStore
from magnetar.txn.acks.pending_acks import Acked
from magnetar.txn.ids import metadata_id
from magnetar.txn.records import OPS, AckOp
from magnetar.txn.store import StoredOp, TxnStore
from magnetar.wire.messages import TxnId
from tests.unit.managed_ledger.world import Broker, MemoryWorld

NAME = "orders"
SEGMENT = "segment://public/default/orders/0000-ffff-0"
T1, T2 = metadata_id(0, 1), metadata_id(0, 2)


class Owner:
    """A broker that owns the subscription, with entries to acknowledge."""

    def __init__(self, world: MemoryWorld, broker: Broker, ledger: ManagedLedger) -> None:
        self.world = world
        self.broker = broker
        self.ledger = ledger
        self.cursor: Cursor = ledger.cursor("s")
        self.ops = MetadataPendingAckStore(
            SEGMENT,
            self.cursor,
            TxnStore(broker.metadata),
            managed_ledger=NAME,
            epoch=ledger.epoch,
            clock=world.clock,
        )

    async def keys(self) -> list[str]:
        found = self.world.metadata.connect()
        return await found.scan_keys(OPS)

    async def merged(self, position: Position) -> StoredOp:
        """An op whose acknowledgement the cursor has in memory."""
        (op,) = await self.ops.write(T1, [Acked(position)], False)
        self.cursor.ack(position)
        self.ops.merged([op])
        return op


async def owner(world: MemoryWorld) -> Owner:
    broker = world.broker()
    ledger = await world.open(broker, NAME)
    if not ledger.cursor_names():
        await ledger.create_cursor("s", EARLIEST)
        for number in range(4):
            await ledger.append(b"%d" % number)
    return Owner(world, broker, ledger)


def play(scenario: Callable[[Owner], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(await owner(MemoryWorld()))

    virtual_time.run(main())


def at(owner: Owner, number: int) -> Position:
    return Position(owner.ledger.first_position().ledger_id, number)


def test_an_op_holds_what_was_acknowledged() -> None:
    async def scenario(owner: Owner) -> None:
        acks = [Acked(at(owner, 0)), Acked(at(owner, 1), 0b010, 3)]
        (op,) = await owner.ops.write(T1, acks, False)
        await owner.ops.write(T2, [Acked(at(owner, 3))], True)
        first, second = sorted(await owner.ops.found(), key=lambda each: each.ack.cumulative)
        assert first.op == op
        assert [(each.position, each.unacked_bits) for each in first.ack.entries] == [
            (at(owner, 0), 0),
            (at(owner, 1), 0b101),
        ]
        assert first.ack.incarnation == owner.cursor.incarnation
        assert second.ack.cumulative
        await owner.ops.delete_all()
        assert await owner.keys() == []

    play(scenario)


def test_what_one_record_has_no_room_for_goes_into_several() -> None:
    async def scenario(owner: Owner) -> None:
        many = [Acked(Position(2**62, 2**62 + number)) for number in range(12_000)]
        batches = [Acked(Position(1, number), 0b10, 64 * 2048) for number in range(40)]
        for acks in (many, batches):
            ops = await owner.ops.write(T1, acks, False)
            assert len(ops) > 1
            found = await owner.ops.found()
            assert {each.op for each in found} == set(ops)
            entries = [entry.position for each in found for entry in each.ack.entries]
            assert sorted(entries) == [each.position for each in acks]
            await owner.ops.delete_all()

    play(scenario)


def test_of_several_records_all_are_stored_or_none() -> None:
    async def scenario(owner: Owner) -> None:
        store, puts = owner.ops._store, 0
        write = store.write_ack

        async def second_fails(txn: TxnId, epoch: int, serial: int, ack: AckOp) -> StoredOp:
            nonlocal puts
            puts += 1
            if puts == 2:
                raise Unavailable("for a moment")
            return await write(txn, epoch, serial, ack)

        store.write_ack = second_fails  # type: ignore[method-assign]
        many = [Acked(Position(2**62, 2**62 + number)) for number in range(12_000)]
        with pytest.raises(Unavailable):
            await owner.ops.write(T1, many, False)
        assert puts > 2
        assert await owner.keys() == []

    play(scenario)


def test_ops_go_only_after_a_cursor_write_that_holds_the_merge() -> None:
    async def scenario(owner: Owner) -> None:
        await owner.merged(at(owner, 0))
        later = asyncio.create_task(owner.ops.settle())
        await asyncio.sleep(0)  # its snapshot is taken
        await owner.merged(at(owner, 1))
        await later
        assert len(await owner.keys()) == owner.ops.unsettled == 1
        await owner.ops.settle()
        assert await owner.keys() == []
        assert not owner.cursor.dirty
        assert owner.ops.unsettled == 0

    play(scenario)


def test_a_failed_cursor_write_keeps_the_ops() -> None:
    async def scenario(owner: Owner) -> None:
        await owner.merged(at(owner, 0))
        owner.world.metadata.cut(owner.broker.metadata)  # type: ignore[arg-type]
        settling = asyncio.create_task(owner.ops.settle_all())
        await asyncio.sleep(3)
        assert len(await owner.keys()) == owner.ops.unsettled == 1
        owner.world.metadata.heal(owner.broker.metadata)  # type: ignore[arg-type]
        await settling
        assert await owner.keys() == []

    play(scenario)


def test_a_former_owner_confirms_nothing_and_deletes_nothing() -> None:
    async def scenario(former: Owner) -> None:
        await former.ops.confirm()
        await former.merged(at(former, 0))
        present = await owner(former.world)
        with pytest.raises(ManagedLedgerFenced):
            await former.ops.confirm()
        await present.ops.confirm()
        await asyncio.wait_for(former.ops.settle_all(), 10)
        assert [each.op.key for each in await present.ops.found()] == await former.keys()
        assert len(await former.keys()) == 1

    play(scenario)


def test_owners_never_write_the_same_record() -> None:
    async def scenario(former: Owner) -> None:
        await former.ops.write(T1, [Acked(at(former, 0))], False)
        present = await owner(former.world)
        await present.ops.write(T1, [Acked(at(former, 1))], False)
        await former.ops.write(T1, [Acked(at(former, 2))], False)
        assert len(await present.keys()) == 3

    play(scenario)


def test_another_version_of_an_op_stays() -> None:
    async def scenario(owner: Owner) -> None:
        op = await owner.merged(at(owner, 0))
        owner.ops.dropped([StoredOp(op.key, op.version + 1000)])
        owner.ops._merged.clear()
        await owner.ops.settle()
        assert await owner.keys() == [op.key]

    play(scenario)


def test_an_intent_that_is_not_written_raises() -> None:
    async def scenario(owner: Owner) -> None:
        owner.world.metadata.cut(owner.broker.metadata)  # type: ignore[arg-type]
        with pytest.raises(Unavailable):
            await owner.ops.write(T1, [Acked(at(owner, 0))], False)

    play(scenario)
