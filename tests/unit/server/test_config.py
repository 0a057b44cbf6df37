"""Settings of a server: where they come from, which goes first, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from magnetar.errors import ConfigError
from magnetar.server.config import ServerConfig, all_settings, limits_from, load


def test_without_settings_everything_has_its_default() -> None:
    assert load({}, {"PATH": "x"}) == ServerConfig()


def test_a_flag_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "magnetar.toml"
    path.write_text('port = 1\nadmin_port = 1\nhost = "::1"\njournal_files_max = 3\n')
    environ = {"MAGNETAR_PORT": "2", "MAGNETAR_ADMIN_PORT": "2", "MAGNETAR_CONFIG": str(path)}
    config = load({"port": 3}, environ)
    assert (config.port, config.admin_port, config.host) == (3, 2, "::1")
    assert config.limits.journal_files_max == 3


def test_a_flag_names_the_file_before_the_environment_does(tmp_path: Path) -> None:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text("port = 1")
    other.write_text("port = 2")
    assert load({"config": str(one)}, {"MAGNETAR_CONFIG": str(other)}).port == 1


def test_settings_of_the_server_are_no_business_of_limits() -> None:
    environ = {"MAGNETAR_PORT": "7", "MAGNETAR_CONFIG": "x", "MAGNETAR_CLOSE_SECONDS": "2"}
    assert limits_from(environ).close_seconds == 2


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False)])
def test_what_is_on_or_off_is_read_from_text(text: str, value: bool) -> None:
    config = load({}, {"MAGNETAR_SCALABLE_TOPICS_ENABLED": text})
    assert config.scalable_topics_enabled is value
    assert config.scalable_auto_scale_enabled


def test_what_is_on_or_off_is_so_in_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "magnetar.toml"
    path.write_text("scalable_auto_scale_enabled = false")
    assert not load({"config": str(path)}, {}).scalable_auto_scale_enabled


def test_names_are_unique() -> None:
    names = [setting.key for setting in all_settings()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"MAGNETAR_PROT": "1"}, "no setting MAGNETAR_PROT .*MAGNETAR_PORT"),
        ({"MAGNETAR_PORT": "x"}, "MAGNETAR_PORT must be a whole number"),
        ({"MAGNETAR_PORT": "65536"}, "port must be from 0 to 65535"),
        ({"MAGNETAR_HOST": " "}, "host must not be empty"),
        ({"MAGNETAR_LOG_LEVEL": "loud"}, "log_level must be one of debug, info"),
        ({"MAGNETAR_LOG_FORMAT": "xml"}, "log_format must be one of text, json"),
        ({"MAGNETAR_MAX_MESSAGE_BYTES": "1"}, "max_message_bytes must be from 1024"),
        ({"MAGNETAR_SCALABLE_TOPICS_ENABLED": "1"}, "ENABLED must be true or false, not '1'"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({}, environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", r"no setting prot \(in .*toml\) .*did you mean port"),
        ('port = "1"', "must be a whole number of port, not '1'"),
        ("port = true", "must be a whole number"),
        ("scalable_topics_enabled = 1", "must be true or false, not 1"),
        ('scalable_topics_enabled = "true"', "must be true or false, not 'true'"),
        ("host = 1", r"must be text \(address\), not 1"),
        ("close_seconds = 0", "above 0"),
        ("[port]\nx = 1", "must be a whole number"),
        ("port", "is not TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "magnetar.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load({"config": str(path)}, {})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read"):
        load({"config": str(tmp_path / "nothing.toml")}, {})
