"""What is known of a database without asking it, against a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.metadata import known_names
from magnetar.metadata.judge import StoredRecord, split_key
from magnetar.metadata.known_names import KnownNames


class Database:
    """The records in it, and how often it was asked."""

    def __init__(self) -> None:
        self.records: dict[str, StoredRecord] = {}
        self.asked = 0
        self.listed = 0

    def get(self, parent: str, name: str) -> StoredRecord | None:
        self.asked += 1
        return self.records.get(f"{parent}/{name}")

    def highest_name(self, parent: str, prefix: str) -> str:
        return max((name for name in self._names(parent) if name.startswith(prefix)), default="")

    def names(self, parent: str, most: int) -> list[str]:
        self.listed += 1
        return self._names(parent)[:most]

    def _names(self, parent: str) -> list[str]:
        found = [name for directory, name in map(split_key, self.records) if directory == parent]
        return sorted(found)


class Store:
    """Puts and deletes that reach the database later, as the engine does it."""

    def __init__(self) -> None:
        self.database = Database()
        self.coming: dict[str, StoredRecord | None] = {}
        self.known = KnownNames(self.database, lambda: self.coming)
        self._version = 0

    def put(self, key: str) -> None:
        self._version += 1
        self.coming[key] = StoredRecord(b"", self._version, 0, 0, 0, 0, ())
        self.known.put(*split_key(key))
        self.known.changed(key)

    def delete(self, key: str) -> None:
        self.coming[key] = None
        self.known.put(*split_key(key))
        self.known.changed(key)

    def apply(self) -> None:
        coming, self.coming = self.coming, {}
        for key, record in coming.items():
            if record is None:
                self.database.records.pop(key, None)
            else:
                self.database.records[key] = record
        self.known.gone(key for key, record in coming.items() if record is None)

    def get(self, key: str) -> StoredRecord | None:
        return self.coming[key] if key in self.coming else self.known.record(key, *split_key(key))


KEYS = st.builds(
    lambda parent, issuer, number: f"/{parent}/{issuer}{number}",
    st.sampled_from("ab"),
    st.sampled_from(["", "1_", "2_", "_"]),
    st.integers(0, 5),
)


@given(st.lists(st.tuples(st.sampled_from("pdga"), KEYS), max_size=80))
def test_it_never_misses_a_record_and_never_shows_an_old_one(steps: list[tuple[str, str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_names, "MISSES", 2)
        patch.setattr(known_names, "NAMES_MAX", 6)
        patch.setattr(known_names, "SERIES_MAX", 3)
        patch.setattr(known_names, "RECORDS_MAX", 3)
        store, expected = Store(), dict[str, StoredRecord | None]()
        for kind, key in steps:
            if kind == "p":
                store.put(key)
                expected[key] = store.coming[key]
            elif kind == "d":
                store.delete(key)
                expected[key] = None
            elif kind == "a":
                store.apply()
            assert store.get(key) == expected.get(key)
        for key, record in expected.items():
            assert store.get(key) == record


def test_new_names_of_several_issuers_need_no_lookup() -> None:
    store = Store()
    for number in range(10, 99):
        for issuer in range(3):
            key = f"/ids/{issuer}_{number}"
            assert store.get(key) is None
            store.put(key)
        store.apply()
    assert store.database.asked == 0


def test_where_names_come_and_go_they_are_remembered() -> None:
    store = Store()
    for number in range(2000):
        key = f"/ops/{(number * 7919) % 2003}"
        assert store.get(key) is None
        store.put(key)
        store.apply()
        store.delete(key)
        store.apply()
    assert store.database.asked <= known_names.MISSES


def test_what_is_read_again_and_again_is_read_once() -> None:
    store = Store()
    store.put("/a/x")
    store.apply()
    assert all(store.get("/a/x") == store.database.records["/a/x"] for _ in range(10))
    assert store.database.asked == 1


def test_the_names_of_another_directory_take_the_place_of_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_names, "DIRECTORIES_MAX", 2)
    store = Store()
    for directory in range(4):
        store.put(f"/{directory}/z")
        store.apply()
        for number in range(2 * known_names.MISSES):
            assert store.get(f"/{directory}/{number}") is None
    assert store.database.asked == 4 * known_names.MISSES


def test_a_directory_with_too_many_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_names, "NAMES_MAX", 3)
    store = Store()
    for name in "vwxyz":
        store.put(f"/a/{name}")
    store.apply()
    for number in range(10 * known_names.MISSES):
        assert store.get(f"/a/{number}") is None
    assert store.database.asked == 10 * known_names.MISSES
    assert store.database.listed == 1
