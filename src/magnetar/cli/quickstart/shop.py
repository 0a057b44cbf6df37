"""Pure: the made-up shop of `magnetar quickstart`, and what a batch computation makes of it.

Owns: a stream of orders and payments that follows from a seed alone, and the settled orders that
must come out of it: each payment with its order, once.

Invariants:
1. The same seed and settings give the same events, to the byte.
2. Times are milliseconds since the start of the traffic; an order comes before its payments.
3. What is expected is computed from the events as a whole, by a join over dictionaries. It knows
   nothing of batches, segments or Spark.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

COUNTRIES: Final = ("DE", "FR", "IN", "JP", "BR", "US", "KE", "PL")
METHODS: Final = ("card", "transfer", "wallet", "voucher")

_CUSTOMERS: Final = 2000
# Shares of orders: the cases that a join gets wrong (none, several, and strangers).
_UNPAID: Final = 0.05
_IN_TWO_PARTS: Final = 0.10
_STRAY: Final = 0.02
"""Payments for orders that do not exist: a join must drop them."""
# Up to seconds later: the join has to keep an order until its payment comes.
_PAID_WITHIN_MS: Final = (50, 4000)
_KILLED_BETWEEN: Final = (0.30, 0.65)
"""A kill on its own is to be seen apart from splits and merges."""
_OFTEN_KILLED_BETWEEN: Final = (0.05, 0.90)


class ShopEvent(NamedTuple):
    """One message: of the topic `orders` or `payments`."""

    at_ms: int
    topic: str
    key: str
    value: bytes


class Settled(NamedTuple):
    """One row of the output."""

    payment: str
    order: str
    customer: str
    country: str
    amount: int
    """In cents, of this payment."""
    method: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic of a run: what is sent, in the order of time, and what must come of it."""

    events: tuple[ShopEvent, ...]
    expected: Mapping[Settled, int]
    """Each settled order and the time of the payment that completes it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict on a run: what was found, against what was expected."""

    expected: int
    found: int
    missing: int
    doubled: int
    unexpected: int

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.doubled or self.unexpected)


class _Chance:
    """Numbers that depend on the seed alone, on any Python and machine."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = 0

    def below(self, limit: int) -> int:
        self._count += 1
        # A hash and a counter: `random` may draw otherwise in
        # another version of Python (invariant 1).
        digest = blake2b(b"%d %d" % (self._seed, self._count), digest_size=8).digest()
        return int.from_bytes(digest, "big") % limit

    def happens(self, share: float) -> bool:
        return self.below(1_000_000) < share * 1_000_000


def traffic(*, seed: int, seconds: float, orders_per_second: int) -> Traffic:
    chance = _Chance(seed)
    events: list[ShopEvent] = []
    orders: dict[str, Mapping[str, str]] = {}
    for number in range(round(seconds * orders_per_second)):
        at_ms = number * 1000 // orders_per_second
        order = f"o-{number:07d}"
        customer = f"c-{chance.below(_CUSTOMERS):04d}"
        fields = {
            "id": order,
            "customer": customer,
            "country": COUNTRIES[chance.below(len(COUNTRIES))],
        }
        orders[order] = fields
        events.append(ShopEvent(at_ms, "orders", customer, json.dumps(fields).encode()))
        events.extend(_payments(chance, number, order, at_ms))
    # `orders` sorts before `payments`: of one moment the order comes first (invariant 2).
    events.sort(key=lambda event: (event.at_ms, event.topic, event.value))
    return Traffic(tuple(events), _joined(events))


def moments_of(kills: int, *, seed: int) -> list[float]:
    """When the driver is killed: shares of the traffic's time, one at random in each part of it."""
    # Several kills are spread over everything, splits and merges included.
    first, last = _KILLED_BETWEEN if kills == 1 else _OFTEN_KILLED_BETWEEN
    part = (last - first) / max(1, kills)
    chance = _Chance(seed)
    return [first + part * (number + chance.below(1000) / 1000) for number in range(kills)]


def _payments(chance: _Chance, number: int, order: str, at_ms: int) -> Iterator[ShopEvent]:
    # For an order that nobody made, beside what the real one gets.
    if chance.happens(_STRAY):
        yield _payment(chance, f"p-{number:07d}-x", f"o-x{number:06d}", at_ms)
    if chance.happens(_UNPAID):
        return
    parts = 2 if chance.happens(_IN_TWO_PARTS) else 1
    least, most = _PAID_WITHIN_MS
    for part in range(parts):
        later = least + chance.below(most - least)
        yield _payment(chance, f"p-{number:07d}-{part}", order, at_ms + later)


def _payment(chance: _Chance, payment: str, order: str, at_ms: int) -> ShopEvent:
    fields = {
        "id": payment,
        "order": order,
        "amount": 100 + chance.below(50_000),
        "method": METHODS[chance.below(len(METHODS))],
    }
    return ShopEvent(at_ms, "payments", order, json.dumps(fields).encode())


def _joined(events: Iterable[ShopEvent]) -> dict[Settled, int]:
    """The batch computation."""
    orders = {}
    payments = []
    # Two passes over all, in no order: a batch computation knows no lateness (invariant 3).
    for event in events:
        fields = json.loads(event.value)
        if event.topic == "orders":
            orders[fields["id"]] = fields
        else:
            payments.append((event.at_ms, fields))
    return {
        Settled(
            payment["id"],
            order["id"],
            order["customer"],
            order["country"],
            payment["amount"],
            payment["method"],
        ): at_ms
        for at_ms, payment in payments
        if (order := orders.get(payment["order"])) is not None
    }


def settled(value: bytes) -> Settled | None:
    """A message of the output; None: nothing that the pipeline writes."""
    try:
        fields = json.loads(value)
        return Settled(**fields)
    except (ValueError, TypeError):
        return None


def judged(expected: Mapping[Settled, int], found: Sequence[Settled | None]) -> Comparison:
    # A row that cannot be read is None: it is in no expectation, and so unexpected.
    counts = Counter(found)
    known = {row: count for row, count in counts.items() if row in expected}
    return Comparison(
        expected=len(expected),
        found=len(found),
        missing=len(expected) - len(known),
        doubled=sum(known.values()) - len(known),
        unexpected=len(found) - sum(known.values()),
    )
