"""What Spark's workers have loaded is not searched for garbage after every task."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from magnetar.spark import worker_heap


@pytest.fixture(autouse=True)
def _thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_heap, "_modules_kept", 0)
    gc.unfreeze()
    yield
    gc.unfreeze()


def _main_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, "__main__", main)


def test_a_worker_keeps_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    _main_is("pyspark.daemon", monkeypatch)
    worker_heap.keep_loaded()
    assert gc.get_freeze_count() > 0


class _Node:
    """Something that can be a part of a cycle, and watched."""

    me: _Node


def test_garbage_of_later_tasks_is_still_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    _main_is("pyspark.daemon", monkeypatch)
    worker_heap.keep_loaded()
    node = _Node()
    node.me = node
    watched = weakref.ref(node)
    worker_heap.keep_loaded()  # nothing was loaded since: the cycle is not kept
    del node
    gc.collect()
    assert watched() is None


def test_what_is_loaded_later_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _main_is("pyspark.daemon", monkeypatch)
    worker_heap.keep_loaded()
    kept = gc.get_freeze_count()
    monkeypatch.setitem(sys.modules, "loaded_since", ModuleType("loaded_since"))
    worker_heap.keep_loaded()
    assert gc.get_freeze_count() > kept


@pytest.mark.parametrize("name", ["pytest.__main__", "magnetar.cli.main"])
def test_other_processes_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _main_is(name, monkeypatch)
    worker_heap.keep_loaded()
    assert gc.get_freeze_count() == 0
