"""Limits: defaults, overrides, refusals."""

from __future__ import annotations

import re

import pytest

from magnetar.errors import ConfigError
from magnetar.runtime.limits import Limits, all_limits


def test_every_limit_says_what_it_bounds() -> None:
    limits = all_limits()
    assert len({each.name for each in limits}) == len(limits) >= 22
    for each in limits:
        assert each.doc
        assert each.default > 0
        assert isinstance(each.default, float) == (each.unit == "seconds"), each.name
        assert re.fullmatch(r"[a-z][a-z_]*", each.name)
        assert getattr(Limits(), each.name) == each.default


def test_override_returns_another_value() -> None:
    limits = Limits(journal_files_max=4)
    changed = limits.override({"journal_file_bytes": 4096, "close_seconds": 5})
    assert (changed.journal_file_bytes, changed.close_seconds) == (4096, 5)
    assert changed.journal_files_max == 4
    assert limits.journal_file_bytes == 32 * 1024 * 1024


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="jurnal_file_byte") as caught:
        Limits().override({"jurnal_file_byte": 1})
    assert caught.value.hint == "did you mean journal_file_bytes?"
    with pytest.raises(ConfigError, match="did you mean"):
        Limits().override({"zzz": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("journal_file_bytes", 0),
        ("journal_file_bytes", -1),
        ("journal_file_bytes", 1.5),
        ("journal_file_bytes", "1"),
        ("journal_file_bytes", True),
        ("close_seconds", 0.0),
        ("close_seconds", float("inf")),
        ("close_seconds", float("nan")),
        ("close_seconds", None),
    ],
)
def test_bad_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Limits().override({name: value})


def test_the_constructor_checks_too() -> None:
    with pytest.raises(ConfigError, match="close_seconds"):
        Limits(close_seconds=-1.0)
