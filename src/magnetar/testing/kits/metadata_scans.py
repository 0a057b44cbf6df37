"""Conformance items 15-24: scans, ranges and partitions."""

from __future__ import annotations

import asyncio

from magnetar.metadata.api import Index
from magnetar.testing.kits.metadata_base import (
    MetadataKitBase,
    MetadataWorld,
    entry,
    everything,
    index_is_consistent,
    indexed_keys,
    item,
    names_of,
    partition_of,
)

# Several pages of any backend.
LARGE_DIRECTORY = 25_000


class ScanItems(MetadataKitBase):
    """Scans, ranges and partitions."""

    @item
    async def test_15_direct_children_in_byte_order(self, world: MetadataWorld) -> None:
        store = await world.connect()
        names = ["b", "a", "a-", "a.", "a0", "aa", "B", "é", "z", "\uffff", "\U00010000", "-"]
        for name in names:
            await store.put(f"/s/{name}", name.encode())
            # Grandchildren, the directory's own record and a neighbour: none of them is a child.
            await store.put(f"/s/{name}/below", b"")
        await store.put("/s", b"the directory's own record")
        await store.put("/sa", b"a neighbour")
        records = [record async for record in store.scan("/s")]
        in_order = sorted(names, key=str.encode)
        assert [record.key for record in records] == [f"/s/{name}" for name in in_order]
        assert [record.value for record in records] == [name.encode() for name in in_order]
        assert await names_of(store, "") == ["s", "sa"]

    @item
    async def test_16_half_open_ranges(self, world: MetadataWorld) -> None:
        store = await world.connect()
        for name in "abcde":
            await store.put(f"/r/{name}", b"")
        assert await names_of(store, "/r", "b", "d") == ["b", "c"]
        assert await names_of(store, "/r", "b") == ["b", "c", "d", "e"]
        assert await names_of(store, "/r", "", "b") == ["a"]
        assert await names_of(store, "/r", "c", "c0") == ["c"]
        assert await names_of(store, "/r", "bb", "c") == []
        assert await names_of(store, "/r", "c", "c") == []
        assert await names_of(store, "/r", "d", "b") == []
        assert await names_of(store, "/r", "f") == []
        assert await names_of(store, "/nowhere") == []

    @item
    async def test_17_large_directory(self, world: MetadataWorld) -> None:
        store = await world.connect()
        value = b"v" * 64
        await asyncio.gather(*(store.put(f"/large/{n:05d}", value) for n in range(LARGE_DIRECTORY)))
        expected = [f"/large/{n:05d}" for n in range(LARGE_DIRECTORY)]
        assert await store.scan_keys("/large") == expected
        assert await store.scan_keys("/large", "10000", "20000") == expected[10_000:20_000]

    @item
    async def test_18_limit_and_early_close(self, world: MetadataWorld) -> None:
        store = await world.connect()
        await asyncio.gather(*(store.put(f"/l/{n:04d}", b"") for n in range(3000)))
        assert await store.scan_keys("/l", limit=3) == ["/l/0000", "/l/0001", "/l/0002"]
        assert await store.scan_keys("/l", "2999", limit=3) == ["/l/2999"]
        assert await store.scan_keys("/l", limit=0) == []
        # More than the snapshots that may be open at a time: a
        # closed scan has to give its own back.
        for _ in range(100):
            records = store.scan("/l")
            assert (await anext(records)).key == "/l/0000"
            await records.aclose()
        # Not begun, so they hold nothing: writers and other scans go on.
        unread = [store.scan("/l") for _ in range(100)]
        await store.put("/l/9999", b"after")
        for records in unread:
            await records.aclose()
        assert len(await store.scan_keys("/l")) == 3001

    @item
    async def test_19_scan_during_writes(self, world: MetadataWorld) -> None:
        store = await world.connect()
        total = 4000
        await asyncio.gather(*(store.put(f"/w/{n:05d}", b"0") for n in range(total)))
        seen: dict[str, bytes] = {}
        order = []
        async for record in store.scan("/w", "00100", "03900"):
            order.append(record.key)
            seen[record.key] = record.value
            # Ahead of the scan, between its records, outside its range, and a delete far ahead.
            if len(order) % 50 == 1:
                number = len(order) + 200
                await asyncio.gather(
                    store.put(f"/w/{number:05d}", b"1"),
                    store.put(f"/w/{number:05d}-between", b"1"),
                    store.put(f"/w/0{number % 10}", b"out of range"),
                    store.delete(f"/w/{total - 200 - number // 50:05d}"),
                )
        assert order == sorted(seen), "a duplicate, or out of order"
        assert all("/w/00100" <= key < "/w/03900" for key in order)
        before = {f"/w/{n:05d}": b"0" for n in range(100, 3900)}
        if store.capabilities.partitions == 1:
            # Its first record came before the first of these writes, and so did its snapshot.
            assert seen == before
        assert {f"/w/{n:05d}" for n in range(100, 3700)} <= set(seen)

    @item
    async def test_20_delete_range(self, world: MetadataWorld) -> None:
        store = await world.connect()
        for n in range(10):
            await store.put(f"/dr/{n}", b"", indexes=entry("dr", str(n)))
            await store.put(f"/dr/{n}/child", b"", indexes=entry("dr", f"child-{n}"))
        # Twice: the second finds nothing, and that is no error.
        # Index entries go with their records.
        for _ in range(2):
            await store.delete_range("/dr", "3", "7")
            left = [f"/dr/{n}" for n in (0, 1, 2, 7, 8, 9)]
            children = [f"/dr/{n}/child" for n in range(10)]
            assert await store.scan_keys("/dr") == left
            assert await indexed_keys(store, "dr") == sorted(left + children)
        await store.delete_range("/dr", "7", "3")
        assert len(await store.scan_keys("/dr")) == 6
        await store.delete_range("/dr")
        assert await store.scan_keys("/dr") == []
        assert await indexed_keys(store, "dr") == children

    @item
    async def test_21_delete_range_against_puts(self, world: MetadataWorld) -> None:
        store = await world.connect()
        other = await world.connect()
        for round_number in range(10):
            puts = [
                client.put(
                    f"/race/{n:03d}", b"%d" % round_number, indexes=entry("race", f"{n:03d}")
                )
                for n in range(100)
                for client in (store, other)
            ]
            # A put comes before the delete or after it; either way record and index entry agree.
            await asyncio.gather(store.delete_range("/race", "025", "075"), *puts)
            await index_is_consistent(store, "/race", "race")
            names = await names_of(store, "/race")
            assert {name for name in names if not "025" <= name < "075"} == {
                f"{n:03d}" for n in (*range(25), *range(75, 100))
            }

    @item
    async def test_22_a_partition_is_together(self, world: MetadataWorld) -> None:
        store = await world.connect()
        keys = [f"/part/{p}:{n:03d}" for p in ("k1", "k2", "k3", "k4") for n in range(50)]
        await asyncio.gather(*(store.put(key, b"") for key in keys))
        for partition in ("k1", "k2", "k3", "k4"):
            # `;` is the character behind `:`.
            bounds = (f"{partition}:", f"{partition};")
            found = await store.scan_keys("/part", *bounds, partition=partition)
            assert found == [key for key in keys if partition_of(key) == partition]

    @item
    async def test_23_scan_over_all_partitions(self, world: MetadataWorld) -> None:
        store = await world.connect()
        keys = [f"/fan/{p}:{n:03d}" for n in range(50) for p in ("k1", "k2", "k3", "k4")]
        await asyncio.gather(*(store.put(key, b"", indexes=entry("fan", "x")) for key in keys))
        assert await store.scan_keys("/fan") == sorted(keys)
        assert await indexed_keys(store, "fan") == sorted(keys)
        parts: set[str] = set()
        for partition in ("k1", "k2", "k3", "k4"):
            bounds = (f"{partition}:", f"{partition};")
            parts.update(await store.scan_keys("/fan", *bounds, partition=partition))
        assert parts == set(keys)

    @item
    async def test_24_found_by_index_then_used(self, world: MetadataWorld) -> None:
        store = await world.connect()
        for n in range(20):
            await store.put(f"/found/k{n % 4}:{n}", b"%d" % n, indexes=[Index("found", "x")])
        hits = [record async for record in store.scan_index("found", "x", "x")]
        assert len(hits) == 20
        for record in hits:
            # A hit names the record by its full key, partition
            # included, so it can be changed at once.
            assert await store.get(record.key) == record
            assert await store.delete(record.key, expected=record.version)
        assert await everything(store, "/found") == {}
        assert await indexed_keys(store, "found") == []
