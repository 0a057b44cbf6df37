"""Conformance items 1-14: records, compare-and-set, keys and limits."""

from __future__ import annotations

import asyncio

from magnetar.errors import BadVersion, InvalidArgument, LimitExceeded
from magnetar.metadata.api import (
    ABSENT,
    INDEX_KEY_BYTES_MAX,
    INDEXES_PER_RECORD_MAX,
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    Index,
    MetadataStore,
)
from magnetar.testing.kits.metadata_base import (
    MetadataKitBase,
    MetadataWorld,
    entry,
    everything,
    item,
    names_of,
    refuses,
    value_of,
)

# Enough tasks for nearly every round to have losers.
INCREMENT_TASKS = 50
INCREMENTS_PER_TASK = 20
CONCURRENT_PUTS = 10_000


async def _increment(store: MetadataStore, key: str, times: int, won: list[int]) -> None:
    """CAS increments by hand; notes each value that it wrote."""
    for _ in range(times):
        while True:
            record = await store.get(key)
            assert record is not None
            number = int(record.value) + 1
            try:
                await store.put(key, b"%d" % number, expected=record.version)
            # Lost the race: read again and decide anew, which is what the error's hint says.
            except BadVersion:
                continue
            won.append(number)
            break


async def _only_what_was_seen_goes(store: MetadataStore) -> None:
    """`delete_seen` leaves alone what is gone by now, or was written since."""
    indexes = (Index("seen", "x"),)
    seen = [await store.put(f"/seen/{n}", b"", indexes=indexes) for n in range(600)]
    await store.delete("/seen/0")
    await store.put("/seen/1", b"new", indexes=indexes)
    places = [(each.key, each.version) for each in seen]
    # Submitted when called: what follows in the program comes after it.
    deletion = store.delete_seen([*places, places[5], ("/seen/never", 1)])
    later = store.put("/seen/2", b"later")
    gone = await deletion
    await later
    assert gone == [f"/seen/{n}" for n in range(2, 600)]
    assert await names_of(store, "/seen") == ["1", "2"]
    assert [each.key async for each in store.scan_index("seen")] == ["/seen/1"]
    assert await store.delete_seen(places) == []
    assert await store.delete_seen([]) == []
    assert await value_of(store, "/seen/1") == b"new"


async def _increments_are_exact(first: MetadataStore, second: MetadataStore) -> None:
    await first.put("/cas/n", b"0")
    won: list[int] = []
    half = INCREMENT_TASKS // 2
    await asyncio.gather(
        *(_increment(first, "/cas/n", INCREMENTS_PER_TASK, won) for _ in range(half)),
        *(_increment(second, "/cas/n", INCREMENTS_PER_TASK, won) for _ in range(half)),
    )
    total = INCREMENT_TASKS * INCREMENTS_PER_TASK
    assert await value_of(first, "/cas/n") == b"%d" % total
    # The sum alone would not show two writers that won with the same number.
    assert sorted(won) == list(range(1, total + 1)), "a round had no winner, or two"


class RecordItems(MetadataKitBase):
    """Records, compare-and-set, keys and limits."""

    @item
    async def test_01_get_absent(self, world: MetadataWorld) -> None:
        store = await world.connect()
        assert await store.get("/none") is None
        assert await store.get("/none/below") is None

    @item
    async def test_02_round_trip(self, world: MetadataWorld) -> None:
        store = await world.connect()
        values = [b"", b"plain", bytes(range(256)), b"\xff\xfe", b"x" * VALUE_BYTES_MAX]
        for number, value in enumerate(values):
            stat = await store.put(f"/v/{number}", value)
            record = await store.get(f"/v/{number}")
            assert record is not None
            assert record.value == value
            assert record.stat == stat

    @item
    async def test_03_create_once(self, world: MetadataWorld) -> None:
        store = await world.connect()
        stat = await store.put("/once", b"1", expected=ABSENT)
        with refuses(BadVersion) as caught:
            await store.put("/once", b"2", expected=ABSENT)
        assert caught.error.actual == stat.version
        assert await value_of(store, "/once") == b"1"

    @item
    async def test_04_put_with_expected(self, world: MetadataWorld) -> None:
        store = await world.connect()
        first = await store.put("/cas", b"1")
        second = await store.put("/cas", b"2", expected=first.version)
        with refuses(BadVersion) as caught:
            await store.put("/cas", b"3", expected=first.version)
        assert (caught.error.key, caught.error.actual) == ("/cas", second.version)
        assert await value_of(store, "/cas") == b"2"
        await store.put("/cas", b"4")
        assert await value_of(store, "/cas") == b"4"

    @item
    async def test_05_cas_on_absent(self, world: MetadataWorld) -> None:
        store = await world.connect()
        with refuses(BadVersion) as caught:
            await store.put("/absent", b"1", expected=7)
        assert caught.error.actual is None
        assert await store.get("/absent") is None

    @item
    async def test_06_delete(self, world: MetadataWorld) -> None:
        store = await world.connect()
        assert await store.delete("/d") is False
        # Without `expected` an absent record is fine; with one it is a lost compare-and-set.
        with refuses(BadVersion):
            await store.delete("/d", expected=3)
        old = await store.put("/d", b"1")
        new = await store.put("/d", b"2")
        with refuses(BadVersion):
            await store.delete("/d", expected=old.version)
        assert await value_of(store, "/d") == b"2"
        assert await store.delete("/d", expected=new.version) is True
        assert await store.get("/d") is None
        await store.put("/d", b"3")
        assert await store.delete("/d") is True
        await _only_what_was_seen_goes(store)

    @item
    async def test_07_recreated_record_has_another_version(self, world: MetadataWorld) -> None:
        store = await world.connect()
        old = await store.put("/again", b"1")
        await store.delete("/again")
        await store.put("/again", b"2")
        # Were versions counted from 0 again, a client of before
        # would overwrite the new record (ABA).
        with refuses(BadVersion):
            await store.put("/again", b"3", expected=old.version)
        with refuses(BadVersion):
            await store.delete("/again", expected=old.version)
        assert await value_of(store, "/again") == b"2"

    @item
    async def test_08_versions_and_stat(self, world: MetadataWorld) -> None:
        store = await world.connect()
        # Equal values: a put is a change all the same.
        stats = [await store.put("/s", b"same") for _ in range(5)]
        assert len({stat.version for stat in stats}) == len(stats)
        assert [stat.mods for stat in stats] == [0, 1, 2, 3, 4]
        assert len({stat.created_ms for stat in stats}) == 1
        for stat in stats:
            assert stat.created_ms <= stat.modified_ms
            assert (stat.key, stat.ephemeral, stat.mine) == ("/s", False, False)
        await store.delete("/s")
        assert (await store.put("/s", b"new")).mods == 0

    @item
    async def test_09_concurrent_increments(self, world: MetadataWorld) -> None:
        store = await world.connect()
        await _increments_are_exact(store, store)

    @item
    async def test_10_increments_of_two_clients(self, world: MetadataWorld) -> None:
        await _increments_are_exact(await world.connect(), await world.connect())

    @item
    async def test_11_program_order(self, world: MetadataWorld) -> None:
        store = await world.connect()
        for round_number in range(50):
            key = f"/order/{round_number}"
            # Submitted at the call, not at the await: the last of these needs the delete before it.
            submitted = [
                store.put(key, b"first"),
                store.delete(key),
                store.put(key, b"second", expected=ABSENT),
            ]
            await asyncio.gather(*submitted)
            assert await value_of(store, key) == b"second"
        # Not awaited, but called: it comes before what is called later.
        early = store.put("/order/early", b"1")
        await store.put("/order/early", b"2")
        await early
        assert await value_of(store, "/order/early") == b"2"

    @item
    async def test_12_many_concurrent_puts(self, world: MetadataWorld) -> None:
        store = await world.connect()
        before = world.batches()
        await asyncio.gather(
            *(store.put(f"/many/{n:05d}", b"%d" % n) for n in range(CONCURRENT_PUTS))
        )
        after = world.batches()
        # Group commit: one sync for many writes, where it can be seen.
        if before is not None and after is not None:
            assert after - before < CONCURRENT_PUTS // 10, "writes were not batched"
        found = await everything(store, "/many")
        assert {key: record.value for key, record in found.items()} == {
            f"/many/{n:05d}": b"%d" % n for n in range(CONCURRENT_PUTS)
        }

    @item
    async def test_13_invalid_arguments(self, world: MetadataWorld) -> None:
        store = await world.connect()
        for key in (
            "",
            "/",
            "a",
            "a/b",
            "/a/",
            "//a",
            "/a//b",
            "/a\x00b",
            "/a\nb",
            "/\x7f",
            "/\ud800",
        ):
            with refuses(InvalidArgument):
                await store.put(key, b"")
            with refuses(InvalidArgument):
                await store.get(key)
        # Limits are in bytes of UTF-8: half as many `é` fit.
        longest = "/" + "k" * (KEY_BYTES_MAX - 1)
        with refuses(LimitExceeded):
            await store.put(longest + "k", b"")
        with refuses(LimitExceeded):
            await store.put("/" + "é" * (KEY_BYTES_MAX // 2), b"")
        with refuses(LimitExceeded):
            await store.put("/big", b"x" * (VALUE_BYTES_MAX + 1))
        for index in ("", "UPPER", "a b", "x" * 65):
            with refuses(InvalidArgument):
                await store.put("/i", b"", indexes=entry(index, "k"))
        for index_key in ("a/b", "a\x00", "\x01"):
            with refuses(InvalidArgument):
                await store.put("/i", b"", indexes=entry("i", index_key))
        with refuses(LimitExceeded):
            await store.put("/i", b"", indexes=entry("i", "k" * (INDEX_KEY_BYTES_MAX + 1)))
        with refuses(LimitExceeded):
            indexes = [Index("i", str(n)) for n in range(INDEXES_PER_RECORD_MAX + 1)]
            await store.put("/i", b"", indexes=indexes)
        with refuses(InvalidArgument):
            await store.put("/i", b"", indexes=entry("i", "k"), ephemeral=True)
        # The connection has survived all this, and the limits themselves are allowed.
        await store.put(longest, b"", indexes=entry("i", "k" * INDEX_KEY_BYTES_MAX))
        assert await value_of(store, longest) == b""

    @item
    async def test_14_odd_names_stay_in_their_directory(self, world: MetadataWorld) -> None:
        store = await world.connect()
        names = sorted(
            ["%2F", "a:b", "a-b", "a.b", "~", "é", "日本", "\U0001f30c", "\uffff", "0", " "]
        )
        # Neighbours in byte order on both sides of `/dir/`, which
        # a careless prefix scan would include.
        for parent in ("/dir", "/dir/0", "/dir0", "/dir.", "/dir%", "/dir~", "/Dir"):
            for name in names:
                await store.put(f"{parent}/{name}", parent.encode())
        for parent in ("/dir", "/dir/0", "/dir0", "/dir.", "/dir%", "/dir~", "/Dir"):
            assert await names_of(store, parent) == names
            records = await everything(store, parent)
            assert {record.value for record in records.values()} == {parent.encode()}
        # Deleting ends at the directory, too: what is below or beside it stays.
        await store.delete_range("/dir")
        assert await names_of(store, "/dir") == []
        for parent in ("/dir/0", "/dir0", "/dir.", "/dir%", "/dir~", "/Dir"):
            assert await names_of(store, parent) == names
