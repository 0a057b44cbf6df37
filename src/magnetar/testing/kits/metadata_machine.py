"""Conformance item 62: random operations against a dictionary, for any backend.

Owns: `run_machine`, which plays a hypothesis state machine on the worlds of a kit. It needs
hypothesis, which the rest of the kit does not.

The model is a dictionary from key to what was last put there. Versions are opaque, so the model
keeps those that the store gave and checks that none comes back. Every run is derandomised: a
failure repeats, and hypothesis prints the shortest list of operations that shows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from magnetar.errors import BadVersion
from magnetar.metadata.api import ABSENT, Index, MetadataStore, Record, Stat
from magnetar.metadata.judge import parse_sequence, split_key
from magnetar.testing.kits.metadata_base import MetadataKitBase, refuses

# Of one run; a failure is shrunk, which takes longer the longer the run is.
STEPS = 40

# Few names, chosen to collide: one directory is a prefix of another, one name
# of another, and two have more bytes than characters.
_PARENTS = ["", "/d", "/d/s", "/d0"]
_NAMES = ["a", "a-", "a0", "b", "é", "\U00010000"]
_PREFIXES = ["a", "a-0", "b"]
_INDEX_NAMES = ["i", "j"]
_INDEX_KEYS = ["", "k", "k0", "kk", "m"]

_parents = st.sampled_from(_PARENTS)
_keys = st.builds("{}/{}".format, _parents, st.sampled_from(_NAMES))
_values = st.binary(max_size=8)
_bounds = st.one_of(st.none(), st.sampled_from([*_NAMES, "", "a1", "c"]))
_indexes = st.lists(
    st.builds(Index, st.sampled_from(_INDEX_NAMES), st.sampled_from(_INDEX_KEYS)), max_size=3
)
_index_bounds = st.one_of(st.none(), st.sampled_from(_INDEX_KEYS))
_deltas = st.one_of(st.tuples(st.integers(1, 3)), st.tuples(st.integers(1, 3), st.integers(0, 3)))

Result = TypeVar("Result")


class _Known(NamedTuple):
    """A record as the model knows it."""

    value: bytes
    version: int
    mods: int
    indexes: tuple[Index, ...]

    def matches(self, index: str, low: str | None, high: str | None) -> bool:
        return any(
            entry.name == index
            and (low is None or low <= entry.key)
            and (high is None or entry.key <= high)
            for entry in self.indexes
        )


class MetadataMachine(RuleBasedStateMachine):
    """One run: a store in a world of its own, and the dictionary that it must equal."""

    def __init__(self, kit: MetadataKitBase, folder: Path) -> None:
        super().__init__()
        self.kit = kit
        self.model: dict[str, _Known] = {}
        # Every (key, version) ever given, and the last version that is out of date of each key.
        self.given: set[tuple[str, int]] = set()
        self.stale: dict[str, int] = {}
        self.loop = kit.new_loop()
        self.world = kit.make_world(folder)
        self.store: MetadataStore = self.wait(self.world.connect())

    def wait(self, main: Coroutine[Any, Any, Result]) -> Result:
        """The synchronous façade: one operation at a time on a loop of its own."""
        return self.loop.run_until_complete(main)

    def teardown(self) -> None:
        try:
            self.wait(self.world.close())
            # Tasks of the backend may outlive its store objects; a
            # loop must not be closed under them.
            self.wait(_end_tasks())
            self.wait(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    # --- writes

    @rule(key=_keys, value=_values, indexes=_indexes)
    def put(self, key: str, value: bytes, indexes: list[Index]) -> None:
        self._note(key, value, indexes, self._put(key, value, None, indexes))

    @rule(key=_keys, value=_values, indexes=_indexes)
    def create(self, key: str, value: bytes, indexes: list[Index]) -> None:
        # Compare-and-set that loses: the version in the error is the one that is there.
        if key in self.model:
            with refuses(BadVersion) as caught:
                self._put(key, value, ABSENT, indexes)
            assert caught.error.actual == self.model[key].version
        else:
            self._note(key, value, indexes, self._put(key, value, ABSENT, indexes))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), value=_values, indexes=_indexes)
    def replace(self, data: st.DataObject, value: bytes, indexes: list[Index]) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        stat = self._put(key, value, self.model[key].version, indexes)
        self._note(key, value, indexes, stat)

    @precondition(lambda self: self.stale)
    @rule(data=st.data(), value=_values, indexes=_indexes)
    def replace_stale(self, data: st.DataObject, value: bytes, indexes: list[Index]) -> None:
        key = data.draw(st.sampled_from(sorted(self.stale)))
        # A version of the past, of a record that is changed, gone or made anew: never accepted.
        with refuses(BadVersion) as caught:
            self._put(key, value, self.stale[key], indexes)
        known = self.model.get(key)
        assert caught.error.actual == (None if known is None else known.version)
        with refuses(BadVersion):
            self.wait(_await(self.store, "delete", key, expected=self.stale[key]))

    @rule(parent=_parents, prefix=st.sampled_from(_PREFIXES), deltas=_deltas, indexes=_indexes)
    def append(
        self, parent: str, prefix: str, deltas: tuple[int, ...], indexes: list[Index]
    ) -> None:
        path = f"{parent}/{prefix}"
        options: dict[str, Any] = {"deltas": deltas, "indexes": indexes}
        stat: Stat = self.wait(_await(self.store, "append", path, b"appended", **options))
        # Only keys of the same sequence count: `a` must not take `a-0` for its own.
        same = [key for key in self.model if parse_sequence(path, key, len(deltas))]
        assert parse_sequence(path, stat.key, len(deltas)) is not None
        assert stat.key > max(same, default="")
        assert stat.key not in self.model
        self._note(stat.key, b"appended", indexes, stat)

    @rule(key=_keys)
    def delete(self, key: str) -> None:
        assert self.wait(_await(self.store, "delete", key)) is (key in self.model)
        self._forget(key)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete_expected(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        version = self.model[key].version
        assert self.wait(_await(self.store, "delete", key, expected=version)) is True
        self._forget(key)

    @rule(parent=_parents, start=st.sampled_from(["", *_NAMES]), end=_bounds)
    def delete_range(self, parent: str, start: str, end: str | None) -> None:
        self.wait(self.store.delete_range(parent, start, end))
        # A list: forgetting changes the dictionary that is walked.
        for key in list(self._children(parent, start, end)):
            self._forget(key)

    # --- reads

    @rule(key=_keys)
    def get(self, key: str) -> None:
        record = self.wait(self.store.get(key))
        assert (record is not None) == (key in self.model)
        if record is not None:
            self._check(record)

    @rule(
        parent=_parents,
        start=st.sampled_from(["", *_NAMES]),
        end=_bounds,
        limit=st.one_of(st.none(), st.integers(0, 4)),
    )
    def scan(self, parent: str, start: str, end: str | None, limit: int | None) -> None:
        keys = self.wait(self.store.scan_keys(parent, start, end, limit=limit))
        # By UTF-8 bytes, which is what backends compare.
        assert keys == sorted(self._children(parent, start, end), key=str.encode)[:limit]

    @rule(index=st.sampled_from(_INDEX_NAMES), low=_index_bounds, high=_index_bounds)
    def scan_index(self, index: str, low: str | None, high: str | None) -> None:
        records = self.wait(_collect(self.store, index, low, high))
        expected = [key for key, known in self.model.items() if known.matches(index, low, high)]
        assert sorted(record.key for record in records) == sorted(expected)
        for record in records:
            self._check(record)

    @precondition(lambda self: self.kit.durable)
    @rule()
    def restart(self) -> None:
        self.wait(self.world.restart())
        self.store = self.wait(self.world.connect())

    @invariant()
    def every_directory_is_as_modelled(self) -> None:
        for parent in _PARENTS:
            records = self.wait(_scan(self.store, parent))
            assert [record.key for record in records] == sorted(self._children(parent, "", None))
            for record in records:
                self._check(record)

    # --- the model

    def _put(self, key: str, value: bytes, expected: int | None, indexes: list[Index]) -> Stat:
        options: dict[str, Any] = {"expected": expected, "indexes": indexes}
        stat: Stat = self.wait(_await(self.store, "put", key, value, **options))
        return stat

    def _note(self, key: str, value: bytes, indexes: list[Index], stat: Stat) -> None:
        before = self.model.get(key)
        assert stat.key == key
        assert stat.mods == (0 if before is None else before.mods + 1)
        # Versions are opaque, but never repeat: a stale compare-and-set must not win by chance.
        assert (key, stat.version) not in self.given, "a version came back"
        self.given.add((key, stat.version))
        if before is not None:
            self.stale[key] = before.version
        self.model[key] = _Known(value, stat.version, stat.mods, tuple(indexes))

    def _forget(self, key: str) -> None:
        known = self.model.pop(key, None)
        if known is not None:
            self.stale[key] = known.version

    def _check(self, record: Record) -> None:
        known = self.model[record.key]
        found = (record.value, record.version, record.stat.mods)
        assert found == (known.value, known.version, known.mods)
        assert not record.stat.ephemeral

    def _children(self, parent: str, start: str, end: str | None) -> Iterator[str]:
        for key in self.model:
            directory, name = split_key(key)
            if directory == parent and start <= name and (end is None or name < end):
                yield key


async def _await(store: MetadataStore, method: str, /, *args: Any, **options: Any) -> Any:
    """Writes are submitted when called, and that must be inside the loop."""
    return await getattr(store, method)(*args, **options)


async def _scan(store: MetadataStore, parent: str) -> list[Record]:
    return [record async for record in store.scan(parent)]


async def _collect(
    store: MetadataStore, index: str, low: str | None, high: str | None
) -> list[Record]:
    return [record async for record in store.scan_index(index, low, high)]


async def _end_tasks() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def run_machine(kit: MetadataKitBase, folder: Path, *, examples: int) -> None:
    """Play `examples` random runs, each in a folder of its own below `folder`."""
    runs = 0

    class Run(MetadataMachine):
        def __init__(self) -> None:
            nonlocal runs
            runs += 1
            # Hypothesis makes the machine anew for each run, and shrinking does so, too.
            own = folder / f"run-{runs}"
            own.mkdir()
            super().__init__(kit, own)

    run_state_machine_as_test(
        Run,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
