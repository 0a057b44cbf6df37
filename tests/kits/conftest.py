"""Items of the kits that take long by their size: `make check` leaves them out."""

from __future__ import annotations

from pathlib import Path

import pytest

LARGE = (
    "test_09_concurrent_increments",
    "test_10_increments_of_two_clients",
    "test_12_many_concurrent_puts",
    "test_17_large_directory",
    "test_18_limit_and_early_close",
    "test_26_random_operations",
    "test_35_numeric_order_and_many_hits",
    "test_62_random_operations",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.name in LARGE:
            item.add_marker(pytest.mark.slow)
