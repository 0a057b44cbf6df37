"""Random lives of a topic with transactions; and that planted bugs are found by them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.model.ids import Position
from magnetar.testing.virtual.virtual_time import run
from magnetar.txn.buffer import transaction_buffer as buffers
from magnetar.txn.buffer.pins import place_pin
from magnetar.txn.buffer.segment_transactions import PinnedTransaction
from magnetar.txn.buffer.transaction_buffer import MetadataTransactionBuffer
from magnetar.txn.buffer.visibility import Visibility
from magnetar.txn.store import StoredOp, TxnStore
from tests.examples import examples
from tests.unit.broker.txn_history import History, Step, random_steps
from tests.unit.broker.txn_world import TxnWorld


def live(seed: int, steps: list[Step], *, local: bool) -> None:
    async def main() -> None:
        await History(TxnWorld(), seed, local=local).live(steps)

    run(main())


@pytest.mark.slow
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 60))
@settings(max_examples=examples(150), derandomize=True, deadline=None)
def test_consumers_see_exactly_what_is_committed(seed: int, local: bool, count: int) -> None:
    live(seed, random_steps(random.Random(seed), count), local=local)


# --- planted bugs


def no_bounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Visibility, "max_read_position", lambda _, last: last)


def gate_without_pins(patch: pytest.MonkeyPatch) -> None:
    async def none(*_: object) -> list[Any]:
        return []

    patch.setattr(TxnStore, "pins", none)


def entry_without_pin(patch: pytest.MonkeyPatch) -> None:
    async def not_written(*_: object) -> StoredOp:
        return StoredOp("/txn/op/none", 1)

    patch.setattr(buffers, "place_pin", not_written)


def entry_before_pin(patch: pytest.MonkeyPatch) -> None:

    async def later(*arguments: Any) -> StoredOp:
        asyncio.get_running_loop().call_later(
            0.2, lambda: asyncio.ensure_future(_quietly(place_pin(*arguments)))
        )
        return StoredOp("/txn/op/none", 1)

    patch.setattr(buffers, "place_pin", later)


async def _quietly(work: Any) -> None:
    await asyncio.gather(work, return_exceptions=True)


def unpin_before_aborted_record(patch: pytest.MonkeyPatch) -> None:
    record = MetadataTransactionBuffer._abort

    async def wrong(
        self: MetadataTransactionBuffer, segment_txn: PinnedTransaction, last: Position
    ) -> None:
        self._unpin(segment_txn)
        await asyncio.sleep(0.3)
        await record(self, segment_txn, last)

    patch.setattr(MetadataTransactionBuffer, "_abort", wrong)


def no_aborted_record(patch: pytest.MonkeyPatch) -> None:
    async def not_written(*_: object, **__: object) -> None:
        return None

    patch.setattr(TxnStore, "write_aborted", not_written)


def aborted_at_the_bound(patch: pytest.MonkeyPatch) -> None:
    """The record does not cover all that was handed to the log."""
    record = MetadataTransactionBuffer._abort

    async def wrong(
        self: MetadataTransactionBuffer, segment_txn: PinnedTransaction, last: Position
    ) -> None:
        await record(self, segment_txn, segment_txn.bound)

    patch.setattr(MetadataTransactionBuffer, "_abort", wrong)


def appends_after_the_decision(patch: pytest.MonkeyPatch) -> None:
    def always(self: MetadataTransactionBuffer, txn: Any) -> bool:
        segment_txn = self._tracked.get(txn)
        return segment_txn is not None and segment_txn.is_admitted

    patch.setattr(MetadataTransactionBuffer, "is_admitted", always)


def no_look_at_the_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MetadataTransactionBuffer, "_check_open", lambda *_: None)
    patch.setattr(MetadataTransactionBuffer, "refusal", lambda *_: None)


PLANTED = (
    no_bounds,
    gate_without_pins,
    entry_without_pin,
    entry_before_pin,
    unpin_before_aborted_record,
    no_aborted_record,
    aborted_at_the_bound,
    appends_after_the_decision,
    no_look_at_the_state,
)


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(400):
        steps = random_steps(random.Random(seed), 50)
        try:
            live(seed, steps, local=seed % 2 == 0)
        except AssertionError:
            return
    pytest.fail("not found in 400 lives")
