"""What a power loss may leave, and what it may not."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.testing.virtual.disk_model import SECTOR_BYTES, DiskModel

IMAGES = 300


def _images(model: DiskModel) -> list[dict[str, bytes]]:
    return [model.survive(Random(seed)) for seed in range(IMAGES)]


def _with_file(content: bytes) -> DiskModel:
    return DiskModel({"a": content})


def test_synced_data_stays_and_unsynced_sectors_choose_for_themselves() -> None:
    model = _with_file(b"o" * 3 * SECTOR_BYTES)
    model.write("a", 0, b"n" * 3 * SECTOR_BYTES)
    found = {
        "".join(chr(image["a"][sector * SECTOR_BYTES]) for sector in range(3))
        for image in _images(model)
    }
    assert found == {"ooo", "oon", "ono", "onn", "noo", "non", "nno", "nnn"}
    model.sync("a")
    assert {image["a"] for image in _images(model)} == {b"n" * 3 * SECTOR_BYTES}


def test_a_sector_is_one_of_the_contents_that_it_had() -> None:
    model = _with_file(bytes(SECTOR_BYTES))
    model.write("a", 0, b"1")
    model.write("a", 1, b"2")
    assert {image["a"][:3] for image in _images(model)} == {b"\0\0\0", b"1\0\0", b"12\0"}


def test_a_size_may_or_may_not_have_grown() -> None:
    model = _with_file(b"x")
    model.write("a", 2 * SECTOR_BYTES, b"y")
    images = _images(model)
    assert {len(image["a"]) for image in images} == {1, 2 * SECTOR_BYTES + 1}
    assert {image["a"][-1:] for image in images} == {b"x", b"y", b"\0"}
    assert all(image["a"][:1] == b"x" for image in images)


def test_truncate_may_be_undone() -> None:
    model = _with_file(b"x" * 1000)
    model.truncate("a", 10)
    assert model.read("a", 0, 2000) == b"x" * 10
    model.truncate("a", 600)
    assert model.read("a", 0, 2000) == b"x" * 10 + bytes(590)
    images = _images(model)
    assert {len(image["a"]) for image in images} == {10, 600, 1000}
    assert all(image["a"][:10] == b"x" * 10 for image in images)


def test_a_new_name_may_vanish_until_its_folder_is_synced() -> None:
    model = DiskModel()
    model.open("a", create=True).write(0, b"data")
    model.sync("a")
    assert {tuple(image.items()) for image in _images(model)} == {(), (("a", b"data"),)}
    model.sync_folder("")
    assert all(image == {"a": b"data"} for image in _images(model))


def test_a_rename_happens_whole_or_not_at_all() -> None:
    model = DiskModel({"a": b"old", "a.new": b"new"})
    model.rename("a.new", "a")
    images = [tuple(sorted(image.items())) for image in _images(model)]
    assert set(images) == {(("a", b"old"), ("a.new", b"new")), (("a", b"new"),)}


def test_changes_of_one_name_keep_their_order() -> None:
    model = DiskModel({"a": b"first"})
    model.rename("a", "b")
    model.open("a", create=True).write(0, b"second")
    model.sync("a")
    # Without the rename, the second file would take the place of the first and lose it.
    assert all(b"first" in image.values() for image in _images(model))


def test_a_removed_file_may_come_back_and_its_handle_goes_on() -> None:
    model = _with_file(b"x")
    handle = model.open("a")
    model.remove("a")
    handle.write(0, b"y")
    handle.sync()
    assert not model.exists("a")
    assert {image.get("a") for image in _images(model)} == {None, b"y"}


def test_what_is_in_a_lost_folder_is_lost() -> None:
    model = DiskModel()
    model.make_folder("f")
    model.open("f/a", create=True)
    model.sync_folder("f")
    assert {tuple(image) for image in _images(model)} == {(), ("f/a",)}
    model.sync_folder("")
    assert all(image == {"f/a": b""} for image in _images(model))


def test_a_kill_keeps_everything_written() -> None:
    model = DiskModel({"f/a": b"x"})
    model.write("f/a", 1, b"y")
    model.open("b", create=True)
    assert model.image() == {"b": b"", "f/a": b"xy"}


def test_errors_are_those_of_a_file_system() -> None:
    model = DiskModel({"f/a": b""})
    with pytest.raises(FileNotFoundError):
        model.open("b")
    with pytest.raises(FileNotFoundError):
        model.open("g/a", create=True)
    with pytest.raises(FileNotFoundError):
        model.remove("b")
    with pytest.raises(IsADirectoryError):
        model.open("f")
    with pytest.raises(NotADirectoryError):
        model.list("f/a")


_WRITES = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 3000), st.integers(1, 1500)),
        st.tuples(st.just("truncate"), st.integers(0, 4000), st.just(0)),
        st.tuples(st.just("sync"), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@given(_WRITES, st.integers(0, 2**32))
def test_every_sector_is_one_that_was_there(steps: list[tuple[str, int, int]], seed: int) -> None:
    """Against the whole history of the content since the last sync, kept the simple way."""
    model = _with_file(b"")
    content = bytearray()
    history = [bytes(content)]
    for number, (kind, place, size) in enumerate(steps, 1):
        if kind == "write":
            model.write("a", place, bytes([number]) * size)
            content.extend(bytes(max(0, place - len(content))))
            content[place : place + size] = bytes([number]) * size
        elif kind == "truncate":
            model.truncate("a", place)
            del content[place:]
            content.extend(bytes(place - len(content)))
        else:
            model.sync("a")
            history.clear()
        history.append(bytes(content))
    assert model.image() == {"a": bytes(content)}
    image = model.survive(Random(seed))["a"]
    assert len(image) in {len(each) for each in history}
    for start in range(0, len(image), SECTOR_BYTES):
        stop = min(start + SECTOR_BYTES, len(image))
        seen = {each[start:stop].ljust(stop - start, b"\0") for each in history}
        assert image[start:stop] in seen
