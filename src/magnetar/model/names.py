"""Names of tenants, namespaces, topics and segments (pure).

Owns: parsing, the canonical form, and every name derived from a topic's (managed ledger, schema,
metadata path).

Forms: `x` and `t/n/x` are short for `persistent://public/default/x` and `persistent://t/n/x`;
`topic://t/n/x` is a scalable topic; `segment://t/n/x/0000-7fff-3` is its segment 3.

Invariants:
1. `TopicName.parse(str(name)) == name`, and `str` of a parsed name is its canonical form.
2. A name has a descriptor if and only if its domain is SEGMENT; its `local_name` is then that of
   the scalable topic it belongs to.
3. Only the local names of `topic` and `segment` may hold a `/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final
from urllib.parse import quote_plus, unquote_plus

from magnetar.errors import InvalidLayout, InvalidTopicName, NotAllowed
from magnetar.model.hashing import HashRange

DEFAULT_TENANT: Final = "public"
DEFAULT_NAMESPACE: Final = "default"

# Pulsar's own rule for tenants and namespaces (`NamedEntity`).
_ENTITY: Final = re.compile(r"[-=:.\w]+", re.ASCII)
# Nineteen digits: a segment id is a 64-bit number.
_DESCRIPTOR: Final = re.compile(r"([0-9a-f]{1,4})-([0-9a-f]{1,4})-([0-9]{1,19})", re.IGNORECASE)
# No leading zeros: `x-partition-01` is a topic of that name, and no partition of `x`.
_PARTITION: Final = re.compile(r"(?s)(.+)-partition-(0|[1-9][0-9]{0,9})")
# Control characters; and surrogates, which have no UTF-8 and so fit into no key or path.
_UNUSABLE: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_SYSTEM_NAMESPACE: Final = "pulsar/system"
# As Pulsar's own brokers name them in any namespace (`SystemTopicNames`); a prefix would let
# everybody name a topic so.
_SYSTEM_TOPICS: Final = frozenset(
    {
        "__change_events",
        "__transaction_buffer_snapshot",
        "__transaction_buffer_snapshot_indexes",
        "__transaction_buffer_snapshot_segments",
    }
)
_PENDING_ACKS: Final = "__transaction_pending_ack"
_FORMS: Final = "use x, tenant/namespace/x or domain://tenant/namespace/x"


class Domain(Enum):
    """The kind of topic that a name stands for, which is the scheme of the name."""

    PERSISTENT = "persistent"
    NON_PERSISTENT = "non-persistent"
    TOPIC = "topic"
    SEGMENT = "segment"

    @property
    def is_scalable(self) -> bool:
        return self in (Domain.TOPIC, Domain.SEGMENT)


@dataclass(frozen=True, slots=True, order=True)
class NamespaceName:
    """`tenant/namespace`."""

    tenant: str
    name: str

    def __post_init__(self) -> None:
        for what, text in (("tenant", self.tenant), ("namespace", self.name)):
            if not _ENTITY.fullmatch(text):
                raise InvalidTopicName(
                    f"{text!r} is not a name for a {what}",
                    hint="use letters, digits and -=:._",
                )

    @classmethod
    def parse(cls, text: str) -> NamespaceName:
        parts = text.split("/")
        # `tenant/cluster/namespace`: a V1 name of early Pulsar,
        # which old configurations still hold.
        if len(parts) == 3:
            raise InvalidTopicName(
                f"namespace {text!r} has three parts",
                hint="names with a cluster are no longer supported: use tenant/namespace",
            )
        if len(parts) != 2:
            raise InvalidTopicName(
                f"{text!r} is not the name of a namespace", hint="use tenant/namespace"
            )
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class SegmentDescriptor:
    """`<start>-<end>-<id>`: which part of the ring a segment holds, and its id in the topic."""

    hash_range: HashRange
    segment_id: int

    def __post_init__(self) -> None:
        if self.segment_id < 0:
            raise InvalidTopicName(f"segment id {self.segment_id} is negative")

    @classmethod
    def parse(cls, text: str) -> SegmentDescriptor:
        """Parse a descriptor, unpadded or upper-case too; `str` gives the canonical form."""
        match = _DESCRIPTOR.fullmatch(text)
        hint = "use <start>-<end>-<id>, such as 0000-7fff-3"
        if match is None:
            raise InvalidTopicName(f"{text!r} is not a segment descriptor", hint=hint)
        start, end = int(match[1], 16), int(match[2], 16)
        try:
            return cls(HashRange(start, end), int(match[3]))
        except InvalidLayout as error:
            raise InvalidTopicName(f"segment descriptor {text!r}: {error}", hint=hint) from error

    def __str__(self) -> str:
        return f"{self.hash_range}-{self.segment_id}"


@dataclass(frozen=True, slots=True)
class TopicName:
    """A topic, scalable topic or segment."""

    domain: Domain
    namespace: NamespaceName
    local_name: str
    descriptor: SegmentDescriptor | None = None

    def __post_init__(self) -> None:
        if (self.domain is Domain.SEGMENT) != (self.descriptor is not None):
            raise InvalidTopicName(f"{self}: segments, and only they, have a descriptor")
        if not self.local_name.strip():
            raise InvalidTopicName(f"{self} has no topic after its namespace", hint=_FORMS)
        if _UNUSABLE.search(self.local_name):
            raise InvalidTopicName(f"{str(self)!r} holds a character that no name may have")
        # Invariant 3: here a `/` comes from a V1 name, whose cluster was taken for the namespace.
        if not self.domain.is_scalable and "/" in self.local_name:
            raise InvalidTopicName(
                f"{self} has too many parts",
                hint="names with a cluster are no longer supported: "
                "use domain://tenant/namespace/x",
            )

    @classmethod
    def parse(cls, text: str) -> TopicName:
        """Parse a full or short name; the scheme may be in any case."""
        scheme, separator, rest = text.partition("://")
        if not separator:
            return cls._parse_short(text)
        domain = _domain(scheme, text)
        # Two cuts at most: what is left belongs to the local
        # name, which may hold a `/` (invariant 3).
        parts = rest.split("/", 2)
        if len(parts) < 3:
            raise InvalidTopicName(f"{text!r} is not the name of a topic", hint=_FORMS)
        namespace, local_name = NamespaceName(parts[0], parts[1]), parts[2]
        if domain is not Domain.SEGMENT:
            return cls(domain, namespace, local_name)
        # The last part is the segment's; all before it, slashes included, is the scalable topic.
        parent, separator, descriptor = local_name.rpartition("/")
        if not separator:
            raise InvalidTopicName(
                f"{text!r} names no segment",
                hint="use segment://tenant/namespace/x/<start>-<end>-<id>",
            )
        return cls(domain, namespace, parent, SegmentDescriptor.parse(descriptor))

    @classmethod
    def _parse_short(cls, text: str) -> TopicName:
        parts = text.split("/")
        # Short names are persistent topics, as in every Pulsar client.
        if len(parts) == 1:
            parts = [DEFAULT_TENANT, DEFAULT_NAMESPACE, text]
        if len(parts) != 3:
            raise InvalidTopicName(f"{text!r} is not the name of a topic", hint=_FORMS)
        return cls(Domain.PERSISTENT, NamespaceName(parts[0], parts[1]), parts[2])

    def __str__(self) -> str:
        text = f"{self.domain.value}://{self.namespace}/{self.local_name}"
        return text if self.descriptor is None else f"{text}/{self.descriptor}"

    # --- partitions of regular topics

    @property
    def partition(self) -> int | None:
        """The K of `-partition-K`; scalable topics and segments have no partitions."""
        match = self._partition_match()
        return None if match is None else int(match[2])

    def with_partition(self, partition: int) -> TopicName:
        """One partition of this partitioned topic."""
        if self.domain.is_scalable or self.partition is not None or partition < 0:
            raise NotAllowed(f"{self} cannot have a partition {partition}")
        return replace(self, local_name=f"{self.local_name}-partition-{partition}")

    def without_partition(self) -> TopicName:
        """The partitioned topic that this is a partition of; else the name itself."""
        match = self._partition_match()
        return self if match is None else replace(self, local_name=match[1])

    def _partition_match(self) -> re.Match[str] | None:
        # A scalable topic may be called `x-partition-3`: there it is a name like any other.
        return None if self.domain.is_scalable else _PARTITION.fullmatch(self.local_name)

    # --- scalable topics and their segments

    @property
    def is_system(self) -> bool:
        """Whether brokers and tools keep their own messages there, not applications."""
        if str(self.namespace) == _SYSTEM_NAMESPACE:
            return True
        name = self.without_partition().local_name
        return name in _SYSTEM_TOPICS or name.endswith(_PENDING_ACKS)

    def scalable_topic(self) -> TopicName:
        """The scalable topic of this segment, or of the same name as this regular topic."""
        return TopicName(Domain.TOPIC, self.namespace, self.without_partition().local_name)

    def segment(self, descriptor: SegmentDescriptor) -> TopicName:
        """A segment of this scalable topic."""
        if self.domain is not Domain.TOPIC:
            raise NotAllowed(f"{self} has no segments", hint="only topic:// names have")
        return TopicName(Domain.SEGMENT, self.namespace, self.local_name, descriptor)

    # --- names derived from this one

    @property
    def managed_ledger_name(self) -> str:
        """The name of the managed ledger that holds the messages of this topic."""
        # A scalable topic has its messages in its segments, a non-persistent one has them nowhere.
        if self.domain not in (Domain.PERSISTENT, Domain.SEGMENT):
            raise NotAllowed(f"{self} keeps no messages of its own")
        name = f"{self.namespace}/{self.domain.value}/{encoded(self.local_name)}"
        return name if self.descriptor is None else f"{name}/{self.descriptor}"

    @property
    def schema_id(self) -> str:
        """One for all partitions, all segments, and the regular topic of the same name."""
        return f"{self.namespace}/{encoded(self.without_partition().local_name)}"


def encoded(local_name: str) -> str:
    """A local name as one part of a path, in the form encoding that Java brokers use."""
    # Java's URLEncoder keeps `*` and encodes `~`; Python's does it the other way round.
    return quote_plus(local_name, safe="*").replace("~", "%7E")


def decoded(part: str) -> str:
    """The local name that `encoded` made this part of a path from."""
    return unquote_plus(part)


def _domain(scheme: str, text: str) -> Domain:
    try:
        return Domain(scheme.lower())
    except ValueError as error:
        known = ", ".join(domain.value for domain in Domain)
        raise InvalidTopicName(
            f"{text!r} begins with an unknown domain {scheme!r}", hint=f"use one of {known}"
        ) from error
