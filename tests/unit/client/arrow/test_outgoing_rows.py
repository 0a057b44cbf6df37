"""Rows on their way into entries: the same bytes as messages make, in the right places."""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.client.arrow.arrow import outgoing, sent_columns
from magnetar.client.arrow.outgoing_rows import OutgoingRows
from magnetar.client.message.batch import (
    Outgoing,
    Stamp,
    batch_entry,
    filled_entry,
    open_entry,
    shared_metadata,
)
from magnetar.client.message.routing import Router, entry_bucket_hash
from magnetar.errors import InvalidValue
from magnetar.model.segments import SegmentLayout
from magnetar.wire.compression import Compression
from tests.examples import examples

pa: Any = import_module("pyarrow")

MAP = pa.map_(pa.string(), pa.string())
TEXTS = st.text(max_size=4) | st.just("t" * 200)
ROWS = st.lists(
    st.tuples(
        st.none() | st.binary(max_size=20) | st.just(b"v" * 20_000),
        st.none() | TEXTS,
        st.none() | st.dictionaries(TEXTS, TEXTS, max_size=3),
        st.none() | st.sampled_from([0, 5, 2**14, 2**28 - 1, 2**28, 1_700_000_000_000, 2**50]),
    ),
    min_size=1,
    max_size=20,
)
SEQUENCES = st.sampled_from([0, 100, 127, 2**14 - 3, 2**14, 2**28 - 2, 2**28, 2**40])
LAYOUTS = {
    "regular": SegmentLayout.of_regular(["persistent://a/b/c"]),
    "partitions": SegmentLayout.of_regular(
        [f"persistent://a/b/c-partition-{number}" for number in range(3)]
    ),
    "scalable": SegmentLayout.create(1, now_ms=1, bucket_budget=8),
    "segments": SegmentLayout.create(3, now_ms=1, bucket_budget=12),
}


def table(rows: list[Any], key_type: Any) -> Any:
    values, keys, properties, times = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(values, pa.binary()),
            pa.array(keys, key_type),
            pa.array([None if each is None else list(each.items()) for each in properties], MAP),
            pa.array(times, pa.int64()),
        ],
        ["value", "key", "properties", "event_time"],
    )


def rows_of(batch: Any) -> OutgoingRows:
    (chosen,) = sent_columns(batch)
    made = OutgoingRows.of(chosen)
    assert made is not None
    return made


@settings(max_examples=examples(60))
@given(ROWS, SEQUENCES, st.booleans(), st.integers(0, 5), st.sampled_from(sorted(LAYOUTS)))
def test_the_bytes_are_those_of_messages(
    rows: list[Any], first: int, as_bytes: bool, skip: int, layout: str
) -> None:
    keyed = [(v, k.encode() if as_bytes and k is not None else k, p, t) for v, k, p, t in rows]
    batch = table(keyed, pa.binary() if as_bytes else pa.string())
    placed, places = rows_of(batch).placed(Router(LAYOUTS[layout]))
    hashes = not Router(LAYOUTS[layout]).is_legacy
    at = 0
    for place in places:
        part = placed.slice(at, place.end - at)
        at = place.end
        part = part.slice(
            min(skip, part.num_rows - 1), part.num_rows - min(skip, part.num_rows - 1)
        )
        stamp = Stamp("p", 7)
        messages = [
            Outgoing(
                payload=row.value or b"",
                sequence_id=first + number,
                key=row.key,
                properties=row.properties,
                event_time_ms=row.event_time_ms or 0,
                null_value=row.value is None,
            )
            for number, row in enumerate(part.rows())
        ]
        shared = Outgoing(payload=b"", sequence_id=first, key=part.only_key)
        made = filled_entry(
            shared_metadata(shared, stamp),
            part.payload(first),
            Compression.NONE,
            num_messages=part.num_rows,
            sequence_ids=(first, first + part.num_rows - 1),
            places=part.hash_span if hashes else None,
            txn=None,
        )
        expected = batch_entry(messages, stamp, hashes=hashes)
        assert open_entry(made.headers_and_payload) == open_entry(expected.headers_and_payload)
        assert made == expected


@given(
    st.lists(st.none() | st.integers(0, 30), max_size=200),
    st.booleans(),
    st.sampled_from(sorted(LAYOUTS)),
)
def test_rows_go_where_messages_go_and_keys_keep_their_order(
    keys: list[int | None], as_bytes: bool, name: str
) -> None:
    layout = LAYOUTS[name]
    router = Router(layout)
    texts = [None if key is None else f"k{key}" for key in keys]
    if as_bytes:
        column = pa.array([each and each.encode() for each in texts], pa.binary())
    else:
        column = pa.array(texts, pa.string()).dictionary_encode()
    values = pa.array([b"%d" % number for number in range(len(keys))], pa.binary())
    rows = rows_of(pa.RecordBatch.from_arrays([values, column], ["value", "key"]))
    placed, places = rows.placed(router)
    found: dict[Any, list[int]] = defaultdict(list)
    at = 0
    for place in places:
        group = list(placed.slice(at, place.end - at).rows())
        at = place.end
        buckets = set()
        for row in group:
            assert row.value is not None
            found[row.key].append(int(row.value))
            if row.key is None:
                assert place.segment is None
            else:
                assert place.segment == router.for_key(row.key)
                bucket = 0 if router.is_legacy else entry_bucket_hash(row.key)
                buckets.add(place.segment.bucket_of(bucket))
        assert len(buckets) <= 1
    assert at == len(keys)
    assert sorted(number for each in found.values() for number in each) == list(range(len(keys)))
    assert all(each == sorted(each) for each in found.values())


@given(st.lists(st.integers(0, 400), min_size=1, max_size=60), st.integers(1, 20))
def test_batches_keep_their_limits(sizes: list[int], messages_max: int) -> None:
    values = pa.array([bytes(size) for size in sizes], pa.binary())
    rows = rows_of(pa.RecordBatch.from_arrays([values], ["value"]))
    at = 0
    while at < len(sizes):
        count = rows.fitting(at, len(sizes), messages_max=messages_max, bytes_max=500)
        part = rows.slice(at, count)
        assert 1 <= count <= messages_max
        assert part.size <= 500 or count == 1
        assert len(part.payload(0)) <= part.size
        # As many as are allowed.
        if count < messages_max and at + count < len(sizes):
            assert rows.slice(at, count + 1).size > 500
        rest = rows.slice(at, len(sizes) - at)
        assert rest.fitting(0, rest.num_rows, messages_max=messages_max, bytes_max=500) == count
        at += count


def test_parts_of_batches_and_tables_are_sent_as_they_are() -> None:
    batch = table([(b"%d" % n, f"k{n}", {"p": str(n)}, n) for n in range(10)], pa.string())
    whole = list(outgoing(batch))
    part = rows_of(batch.slice(3, 4))
    assert list(part.rows()) == whole[3:7]
    assert part.payload(0) == rows_of(batch).slice(3, 4).payload(0)
    chunks = sent_columns(pa.Table.from_batches([batch.slice(0, 4), batch.slice(4)]))
    assert [row for each in chunks for row in outgoing(each)] == whole


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("properties", pa.array(["no map"])),
        ("key", pa.array([7])),
        ("properties", pa.array([[("n" * 20_000, "b")]], MAP)),
        ("key", pa.array(["k" * 20_000])),
    ],
)
def test_what_is_unusual_is_sent_one_by_one(name: str, column: Any) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([b"x"]), column], ["value", name])
    assert OutgoingRows.of(batch) is None


def test_a_property_needs_a_text() -> None:
    column = pa.array([[("a", None)]], MAP)
    with pytest.raises(InvalidValue, match="property"):
        OutgoingRows.of(
            pa.RecordBatch.from_arrays([pa.array([b"x"]), column], ["value", "properties"])
        )


def test_times_before_1970_are_refused() -> None:
    batch = pa.RecordBatch.from_arrays(
        [pa.array([b"x", b"y"]), pa.array([5, -1])], ["value", "event_time"]
    )
    with pytest.raises(InvalidValue, match="1970"):
        OutgoingRows.of(batch)
