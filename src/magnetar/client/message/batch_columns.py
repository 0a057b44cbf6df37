"""Pure: the messages of an entry as columns, without an object for each.

Owns: `BatchColumns`, and `columns_in`, which finds where in a payload the parts of its messages
are. The usual forms of metadata are read by hand; as soon as one message of a batch is of another
form, protobuf reads them all (`_by_protobuf`).

Invariants:
1. The columns say what `messages_in` would, message by message.
2. Nothing read here is believed: sizes and counts that do not fit raise `UnreadableMessage`.
3. `cuts` and `properties` never go back, so that they can be the offsets of one Arrow array.
"""

from __future__ import annotations

import struct
from array import array
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from magnetar.client.message.batch import OpenedEntry, messages_in
from magnetar.client.message.batch_tails import read_tails
from magnetar.wire.pb import pulsar_pb2 as pb

CUTS: Final = 4
"""Of a row: where its key begins and ends, and where its value does."""

NO_INDEX: Final = -1

_NONE: Final = array("q")
_SIZE: Final = struct.Struct(">I")
_INT64_MAX: Final = 2**63 - 1
_UINT64: Final = 2**64
# Tags of SingleMessageMetadata, and of the name and text inside a property.
_PROPERTY: Final = 0x0A
_NAME: Final = 0x0A
_TEXT: Final = 0x12
_KEY: Final = 0x12
_PAYLOAD_SIZE: Final = 0x18
_HEAD_BYTES: Final = 7
_SIZE_FIELD_BYTES: Final = 3
"""Of a payload size's field, looked at: tag and two digits, or tag, digit and the next field."""

_KEYED_HEAD_BYTES: Final = 6 + _SIZE_FIELD_BYTES
"""What stands before a message's value beside its key: size, tag, length, and payload size."""

# The tables below are cleared when they are full: sizes that never repeat must not pile up.
_KNOWN_MAX: Final = 4096
_NEW_KEYS_MAX: Final = 64
"""After so many keys in one batch that were not known, its other ones are not looked up."""

# Messages that have no key begin alike: a size, and a payload size. How far it is from there to
# the tail of the metadata, to the payload and to its end is kept.
_heads: dict[bytes, tuple[int, int, int]] = {}

# The same with a key, which is part of what is looked up: keys repeat. Where the key ends comes
# first.
_keyed_heads: dict[bytes, tuple[int, int, int, int]] = {}

# The first three bytes of a payload size's field, with which it ends: the size, and that of the
# field.
_sizes: dict[bytes, tuple[int, int]] = {}


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """The messages of an entry, a row each."""

    data: bytes
    """What the cuts are offsets in."""
    cuts: array[int]
    """`CUTS` for each row; without a key, it begins and ends where the value begins."""
    sequence_ids: array[int]
    """Signed; empty: all have that of their entry."""
    event_times: array[int]
    """0: none. Empty: none has one."""
    properties: array[int]
    """For each property: where its name begins and ends, and where its text does."""
    property_ends: array[int]
    """For each row, how many properties there are up to it. Empty: none has one."""
    base64_keys: Sequence[int] = ()
    """Rows whose key, if they have one, is base64."""
    null_values: Sequence[int] = ()
    """Rows without a value."""
    ordering_keys: Mapping[int, bytes] = field(default_factory=dict)
    """By row, if they were asked for."""
    compacted_out: int = 0
    """The set of messages that are not for the application."""
    first_index: int = 0
    """The number of the first row in its batch; `NO_INDEX`: it is of none."""

    def __len__(self) -> int:
        return len(self.cuts) // CUTS


def signed(number: int) -> int:
    """Numbers are unsigned on the wire; those of columns are not."""
    return number if number <= _INT64_MAX else number - _UINT64


def decoded_key(text: bytes) -> bytes | None:
    """A key that is base64; None if it is not."""
    try:
        return b64decode(text, validate=True)
    except Base64Error:
        return None


def columns_in(
    entry: OpenedEntry,
    *,
    with_properties: bool = True,
    with_ordering_keys: bool = False,
    within: tuple[bytes, int] | None = None,
) -> BatchColumns:
    """The messages of a batch, all of them.

    `within`: bytes that have its payload in them, and where, so that cuts are offsets in those.
    """
    # Two tries by hand, the walk and its tails; what either does not know is read by protobuf, all
    # of it, so that the columns of one batch have one origin.
    data, begin = within or (entry.payload, 0)
    end = begin + len(entry.payload)
    walk = _Walk(with_properties)
    try:
        is_usual = walk.through(data, begin, end, entry.num_messages)
    except (IndexError, struct.error):
        is_usual = False  # it ends too early, or protobuf knows better
    tails = None
    if is_usual:
        tails = read_tails(walk.tails, with_ordering_keys=with_ordering_keys)
    if tails is None:
        return _by_protobuf(entry)
    numbers = tails.sequence_ids
    # A message without a number of its own has that of its entry.
    if numbers and tails.lacks_sequence_ids:
        first = signed(entry.metadata.sequence_id)
        numbers = array("q", [first if each == -1 else each for each in numbers])
    # The walk counts from the first row on that has a property; rows before it have none.
    ends = walk.property_ends
    return BatchColumns(
        data,
        array("q", walk.cuts),
        numbers,
        tails.event_times,
        array("q", walk.properties),
        array("q", [0] * (entry.num_messages - len(ends)) + ends if ends else ()),
        tails.base64_keys,
        tails.null_values,
        tails.ordering_keys,
    )


@dataclass(slots=True)
class _Walk:
    """A walk from message to message through a batch."""

    with_properties: bool
    cuts: list[int] = field(default_factory=list)
    properties: list[int] = field(default_factory=list)
    property_ends: list[int] = field(default_factory=list)
    """From the first row on that has a property."""
    tails: list[bytes] = field(default_factory=list)
    """Of each message's metadata, what follows the payload size."""

    def through(self, data: bytes, begin: int, limit: int, count: int) -> bool:
        """False: a message is of no usual form. Raises if something is not there."""
        # Local names: this loop runs once per message, and each lookup of an attribute would show.
        known, size_at, properties = _heads.get, _SIZE.unpack_from, self.properties
        cut, add_tail, end = self.cuts.extend, self.tails.append, self.property_ends.append
        known_size = _sizes.get
        add_property = properties.extend if self.with_properties else _nothing
        known_key, is_new_left = _keyed_heads.get, _NEW_KEYS_MAX
        for _ in range(count):
            start = at = begin + 4
            tag = data[at]
            # Case 1, no properties and no key, and the same head was seen before: one lookup tells
            # where everything is.
            if tag == _PAYLOAD_SIZE:
                head = known(data[begin : begin + _HEAD_BYTES])
                if head is not None:
                    stop = begin + head[1]
                    add_tail(data[begin + head[0] : stop])
                    begin += head[2]
                    cut((stop, stop, stop, begin))
                    if properties:
                        end(len(properties))
                    continue
            # Case 2, the same with a key. Where hardly one comes twice, it is not looked for.
            elif tag == _KEY and is_new_left:
                keyed = known_key(data[begin : begin + _KEYED_HEAD_BYTES + data[start + 1]])
                if keyed is not None:
                    stop = begin + keyed[2]
                    add_tail(data[begin + keyed[1] : stop])
                    key_end = begin + keyed[0]
                    begin += keyed[3]
                    cut((start + 2, key_end, stop, begin))
                    if properties:
                        end(len(properties))
                    continue
            # Case 3: field by field, as far as the fields have their usual order and lengths below
            # 128.
            stop = start + size_at(data, begin)[0]
            if tag == _PROPERTY:
                at = _behind_properties(data, at, add_property)
                tag = data[at] if at else 0
            if properties:
                end(len(properties))
            # Without a key both cuts stand where the value begins, which is what `cuts` promises.
            key = key_end = stop
            if tag == _KEY:
                key = at + 2
                at = key_end = key + data[at + 1]
            # Lengths are one byte up to 127, and text that is not ASCII is for protobuf to check.
            if not at or (at != start and not data[start:at].isascii()):
                return False
            found = known_size(data[at : at + 3]) or _payload_size(data, at)
            if found is None:
                return False
            size = found[0]
            tail = at + found[1]
            # A field that reaches into the payload: the size in front and the fields disagree.
            if tail > stop:
                return False
            add_tail(data[tail:stop])
            # Only a head that lies in the looked-up bytes entirely can be known by them.
            if at == start and tail <= begin + _HEAD_BYTES:
                _know_head(data, begin, tail, stop, stop + size)
            elif key == start + 2 and is_new_left and tail <= key_end + _SIZE_FIELD_BYTES:
                is_new_left -= 1
                _know_keyed_head(data, begin, key_end, tail, stop, stop + size)
            begin = stop + size
            cut((key, key_end, stop, begin))
        return begin <= limit


def _behind_properties(
    data: bytes, at: int, add: Callable[[tuple[int, int, int, int]], None]
) -> int:
    """Where the properties end that begin here; 0: they are not of the usual form."""
    while data[at] == _PROPERTY:
        name = at + 4
        name_end = name + data[at + 3]
        text_end = name_end + 2 + data[name_end + 1]
        if data[at + 2] != _NAME or data[name_end] != _TEXT or at + 2 + data[at + 1] != text_end:
            return 0
        add((name, name_end, name_end + 2, text_end))
        at = text_end
    return at


def _nothing(_: tuple[int, ...]) -> None:
    """Properties that nobody asked for."""


def _know_head(data: bytes, begin: int, tail: int, stop: int, end: int) -> None:
    if len(_heads) >= _KNOWN_MAX:
        _heads.clear()
    _heads[data[begin : begin + _HEAD_BYTES]] = (tail - begin, stop - begin, end - begin)


def _know_keyed_head(data: bytes, begin: int, key_end: int, tail: int, stop: int, end: int) -> None:
    if len(_keyed_heads) >= _KNOWN_MAX:
        _keyed_heads.clear()
    head = data[begin : key_end + _SIZE_FIELD_BYTES]
    _keyed_heads[head] = (key_end - begin, tail - begin, stop - begin, end - begin)


def _payload_size(data: bytes, at: int) -> tuple[int, int] | None:
    """The payload size whose field begins here, and the size of that field; None: no usual one."""
    # One, two or three bytes, that is up to 2 MiB; larger payloads are rare, and protobuf's.
    size = data[at + 1]
    if data[at] != _PAYLOAD_SIZE:
        return None
    field_bytes = 2
    if size >= 0x80:
        more = data[at + 2]
        size += (more << 7) - 0x80
        field_bytes = 3
        if more >= 0x80:
            last = data[at + 3]
            return (size + (last << 14) - (0x80 << 7), 4) if last < 0x80 else None
    if len(_sizes) >= _KNOWN_MAX:
        _sizes.clear()
    _sizes[data[at : at + 3]] = size, field_bytes
    return size, field_bytes


def _by_protobuf(entry: OpenedEntry) -> BatchColumns:
    """The messages of a batch, whatever they look like."""
    made = _Made()
    numbers = array("q")
    compacted = 0
    first = signed(entry.metadata.sequence_id)
    # Compaction marks messages inside a batch instead of rewriting it; one bit for each.
    for row, (said, payload) in enumerate(messages_in(entry)):
        made.add(said, payload)
        numbers.append(signed(said.sequence_id) if said.HasField("sequence_id") else first)
        compacted |= said.compacted_out << row
    return made.columns(sequence_ids=numbers, compacted_out=compacted)


def single_columns(entry: OpenedEntry) -> BatchColumns:
    """The message of an entry that is no batch."""
    made = _Made()
    made.add(entry.metadata, entry.payload)
    return made.columns(first_index=NO_INDEX)


def one_row(
    value: bytes | None,
    key: bytes | None,
    properties: Mapping[str, str],
    event_time: int = 0,
    *,
    index: int = NO_INDEX,
) -> BatchColumns:
    """A message by its parts; its number in a batch is `index`."""
    made = _Made()
    made.put(value, key, properties.items(), event_time)
    return made.columns(first_index=index)


class _Made:
    """Columns over bytes that are put one behind the other."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._at = 0
        self._cuts = array("q")
        self._event_times = array("q")
        self._properties = array("q")
        self._property_ends = array("q")
        self._null_values: list[int] = []
        self._ordering_keys: dict[int, bytes] = {}

    def add(self, said: pb.SingleMessageMetadata | pb.MessageMetadata, payload: bytes) -> None:
        value = None if said.null_value else payload
        properties = [(each.key, each.value) for each in said.properties]
        if said.HasField("ordering_key"):
            self._ordering_keys[len(self._event_times)] = said.ordering_key
        self.put(value, _key_of(said), properties, signed(said.event_time))

    def put(
        self,
        value: bytes | None,
        key: bytes | None,
        properties: Iterable[tuple[str, str]],
        event_time: int,
    ) -> None:
        for name, text in properties:
            self._properties.extend((*self._piece(name.encode()), *self._piece(text.encode())))
        self._property_ends.append(len(self._properties))
        if key is None:
            self._cuts.extend((self._at, self._at))
        else:
            self._cuts.extend(self._piece(key))
            self._piece(b"\0")  # so that an empty key does not end where the value begins
        if value is None:
            self._null_values.append(len(self._event_times))
        self._cuts.extend(self._piece(value or b""))
        self._event_times.append(event_time)

    def _piece(self, piece: bytes) -> tuple[int, int]:
        start = self._at
        self._pieces.append(piece)
        self._at += len(piece)
        return start, self._at

    def columns(
        self, *, sequence_ids: array[int] = _NONE, compacted_out: int = 0, first_index: int = 0
    ) -> BatchColumns:
        return BatchColumns(
            b"".join(self._pieces),
            self._cuts,
            sequence_ids,
            self._event_times,
            self._properties,
            self._property_ends,
            null_values=self._null_values,
            ordering_keys=self._ordering_keys,
            compacted_out=compacted_out,
            first_index=first_index,
        )


def _key_of(said: pb.SingleMessageMetadata | pb.MessageMetadata) -> bytes | None:
    """The key of a message; none if that should be base64 and is not."""
    if not said.HasField("partition_key"):
        return None
    text = said.partition_key.encode()
    return decoded_key(text) if said.partition_key_b64_encoded else text
