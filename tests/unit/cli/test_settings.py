"""Settings: from the environment to limits, and what is refused."""

from __future__ import annotations

import pytest

from magnetar.errors import ConfigError
from magnetar.runtime.limits import Limits, all_limits
from magnetar.server.config import all_settings, limits_from


def test_every_limit_has_its_setting() -> None:
    assert [each.limit for each in all_settings() if each.limit] == list(all_limits())
    assert all(setting.name == f"MAGNETAR_{setting.name[9:].upper()}" for setting in all_settings())


def test_what_is_not_set_stays() -> None:
    assert limits_from({"PATH": "x", "MAGNETARIUM": "y"}) == Limits()


def test_values_are_taken() -> None:
    limits = limits_from({"MAGNETAR_JOURNAL_FILES_MAX": "3", "MAGNETAR_CLOSE_SECONDS": "2.5"})
    assert limits == Limits(journal_files_max=3, close_seconds=2.5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MAGNETAR_JOURNAL_FILE_MAX", "3", "no setting .* mean MAGNETAR_JOURNAL_FILES_MAX"),
        ("MAGNETAR_JOURNAL_FILES_MAX", "3.5", "whole number of files, not '3.5'"),
        ("MAGNETAR_JOURNAL_FILES_MAX", "many", "whole number of files, not 'many'"),
        ("MAGNETAR_JOURNAL_FILES_MAX", "0", "above 0"),
        ("MAGNETAR_CLOSE_SECONDS", "soon", "a number of seconds, not 'soon'"),
        ("MAGNETAR_CLOSE_SECONDS", "inf", "finite"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limits_from({name: value})
