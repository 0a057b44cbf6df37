"""Transactions of two official Java clients on one topic."""

from __future__ import annotations

import pytest

from tests.interop.program import Program, passes

# The first test may wait for Maven to fetch a client.
pytestmark = pytest.mark.slow


def test_transactions_of_both_end_apart(program: Program, program_v4: Program) -> None:
    def beside(topic: str) -> None:
        passes(program_v4, "beside", topic)

    passes(program, "transaction-beside-another-client", favours={"beside": beside})
