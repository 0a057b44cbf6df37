"""Descriptors: shared out so that connections leave the storage what it needs."""

from __future__ import annotations

import resource

import pytest

from magnetar.errors import ConfigError
from magnetar.runtime.descriptors import DESCRIPTORS_MIN, descriptors_max, fitted, raise_soft_limit
from magnetar.runtime.limits import Limits


@pytest.mark.parametrize("descriptors", [DESCRIPTORS_MIN, 400, 1024, 4096, 20_000, 2**30])
def test_files_and_connections_fit_into_the_descriptors(descriptors: int) -> None:
    limits = fitted(Limits(), descriptors)
    used = limits.ledger_open_files + limits.connections_max + limits.admin_connections_max
    assert used + limits.journal_files_max < descriptors
    assert min(limits.ledger_open_files, limits.connections_max) >= 40
    assert limits.admin_connections_max >= 10


def test_limits_that_fit_stay() -> None:
    assert fitted(Limits(), 20_000) == Limits()
    assert fitted(Limits(connections_max=10), 1024).connections_max == 10


def test_too_few_descriptors_are_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match="256 file descriptors") as caught:
        fitted(Limits(), DESCRIPTORS_MIN - 1)
    assert "ulimit -n" in str(caught.value)


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert raise_soft_limit() == descriptors_max() >= min(hard, 512)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
