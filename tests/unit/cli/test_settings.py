"""Settings: from the environment to limits, and what is refused."""

from __future__ import annotations

import os

import pytest

from magnetar.cli.admin_client import default_admin_url, default_service_url
from magnetar.errors import ConfigError
from magnetar.runtime.limits import Limits, all_limits
from magnetar.server.config import ServerConfig, all_settings, limits_from, load


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


def test_variables_of_kubernetes_are_no_settings() -> None:
    """A service called `magnetar`, and one called `magnetar-admin`."""
    config = load(
        {},
        {
            "MAGNETAR_SERVICE_HOST": "10.0.0.7",
            "MAGNETAR_SERVICE_PORT": "6650",
            "MAGNETAR_SERVICE_PORT_BINARY": "6650",
            "MAGNETAR_PORT": "tcp://10.0.0.7:6650",
            "MAGNETAR_PORT_6650_TCP": "tcp://10.0.0.7:6650",
            "MAGNETAR_PORT_6650_TCP_PROTO": "tcp",
            "MAGNETAR_PORT_6650_TCP_PORT": "6650",
            "MAGNETAR_PORT_6650_TCP_ADDR": "10.0.0.7",
            "MAGNETAR_ADMIN_SERVICE_HOST": "10.0.0.8",
            "MAGNETAR_ADMIN_PORT": "tcp://10.0.0.8:8080",
        },
    )
    assert config == ServerConfig()
    assert load({}, {"MAGNETAR_PORT": "7000"}).port == 7000
    with pytest.raises(ConfigError, match="whole number of port, not 'tcp'"):
        load({}, {"MAGNETAR_PORT": "tcp"})


def test_the_addresses_of_the_command_line_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGNETAR_SERVICE_URL", "pulsar://far:1")
    monkeypatch.setenv("MAGNETAR_ADMIN_URL", "http://far:2")
    # Neither stops a server, and both tell the verbs whom to ask.
    assert load({}, os.environ) == ServerConfig()
    assert default_service_url() == "pulsar://far:1"
    assert default_admin_url() == "http://far:2"
