"""The settings of a process: what flags, environment and a file may say, and what becomes of it.

Owns: the names of all settings, `ServerConfig`, and the translation into it and into `Limits`. A
setting called `x` is the variable `MAGNETAR_X`, the key `x` of the TOML file, and for some of them
the flag `--x` of `magnetar serve`.

Invariants:
1. A variable that begins with `MAGNETAR_`, or a key of the file, that is no setting is refused,
   with the nearest name: a misspelt setting never goes unnoticed. Passed over are the addresses of
   the command line (`CLIENT_VARIABLES`), and what Kubernetes sets for a service of our name.
2. Only what is set changes. A flag goes before the environment, that before the file.
3. `docs/reference/settings.md` lists every setting (a test compares).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from magnetar.broker.policy.defaults import PolicyDefaults, all_policy_defaults
from magnetar.errors import ConfigError
from magnetar.runtime.limits import Limit, Limits, all_limits

PREFIX: Final = "MAGNETAR_"
CONFIG_VARIABLE: Final = "MAGNETAR_CONFIG"
"""Names the file; it cannot stand in the file itself."""

SERVICE_URL_VARIABLE: Final = "MAGNETAR_SERVICE_URL"
ADMIN_URL_VARIABLE: Final = "MAGNETAR_ADMIN_URL"
CLIENT_VARIABLES: Final = (SERVICE_URL_VARIABLE, ADMIN_URL_VARIABLE)
"""Say which server the verbs of the command line ask; a server does not read them."""

# Kubernetes sets these in every pod of a namespace, for each service there. One that is called
# `magnetar`, or begins so, gives names with our prefix, two of which are settings as well: they are
# told apart by their value.
_KUBERNETES_NAME: Final = re.compile(
    r"\w+_SERVICE_HOST|\w+_SERVICE_PORT(_\w+)?|"
    r"\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)
_KUBERNETES_PORT: Final = re.compile(r"(tcp|udp|sctp)://.+")

_LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_LOG_FORMATS: Final = ("text", "json")
_TRANSACTION_KINDS: Final = ("auto", "metadata", "markers")
_ON_OFF: Final = {"true": True, "false": False}
_PORT_MAX: Final = 65_535
_LOOKAHEAD_MAX: Final = 2**31 - 1
_PERCENT_MAX: Final = 100
_MINUTES_MAX: Final = 2**31 - 1  # as in the policy of a namespace, which is Pulsar's
# A message is in memory several times on its way; clients chunk what is larger.
_MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024

Value = TypeVar("Value", str, int, bool)


class Setting(NamedTuple):
    """One setting, as documentation and error messages show it."""

    name: str
    """The environment variable."""
    key: str
    """The name in the file."""
    default: str | int | float
    unit: str
    doc: str
    limit: Limit | None
    """What it sets, if it sets a limit."""


def _setting(default: Value, unit: str, doc: str) -> Value:
    return field(default=default, metadata={"unit": unit, "doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The settings of one server; every value is checked when it is made."""

    data: str = _setting("magnetar-data", "folder", "where everything durable is kept")
    host: str = _setting("127.0.0.1", "address", "where clients and the admin interface connect")
    port: int = _setting(6650, "port", "of the Pulsar protocol; 0 takes a free one")
    admin_port: int = _setting(8080, "port", "of the admin interface; 0 takes a free one")
    advertised_host: str = _setting(
        "", "address", "what lookups answer; empty: the host, or this machine's name if it is any"
    )
    cluster: str = _setting("standalone", "name", "the name of this cluster")
    max_message_bytes: int = _setting(
        5 * 1024 * 1024,
        "bytes",
        "the largest message, announced to clients; larger ones are chunked",
    )
    log_level: str = _setting("info", "|".join(_LOG_LEVELS), "the least important events to write")
    log_format: str = _setting("text", "|".join(_LOG_FORMATS), "how events are written to stderr")
    scalable_topics_enabled: bool = _setting(
        True, "|".join(_ON_OFF), "whether topic:// names can be used"
    )
    scalable_auto_scale_enabled: bool = _setting(
        True,
        "|".join(_ON_OFF),
        "whether segments are split and merged by load, where no policy says otherwise",
    )
    scalable_retention_minutes: int = _setting(
        7 * 24 * 60,
        "minutes",
        "messages of scalable topics are kept that no subscription needs, where no policy says"
        " otherwise; 0: not at all",
    )
    scalable_retention_disk_percent: int = _setting(
        10,
        "percent of the disk",
        "that all messages kept so may take together; 0: none",
    )
    transaction_kind: str = _setting(
        "auto",
        "|".join(_TRANSACTION_KINDS),
        "how transactions that v4 clients begin are kept; auto: by markers",
    )
    subscription_key_shared_use_consistent_hashing: bool = _setting(
        True,
        "|".join(_ON_OFF),
        "how Key_Shared consumers divide the keys: by points of a ring, or by halving ranges",
    )
    is_delayed_delivery_deliver_at_time_strict: bool = _setting(
        False,
        "|".join(_ON_OFF),
        "whether it is never before its time, and so later by up to a tick; else it is earlier",
    )
    delayed_delivery_fixed_delay_detection_lookahead: int = _setting(
        50_000,
        "entries",
        "that wait on a subscription, all equally late, before it is read no further; 0: no end",
    )
    policies: PolicyDefaults = field(default_factory=PolicyDefaults)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        # Checked here, not where they are read: whoever makes a config in code gets the same
        # errors.
        for name in ("data", "host", "cluster"):
            if not getattr(self, name).strip():
                raise ConfigError(f"setting {name} must not be empty")
        for name in ("port", "admin_port"):
            _check_range(name, getattr(self, name), 0, _PORT_MAX)
        _check_range("max_message_bytes", self.max_message_bytes, 1024, _MESSAGE_BYTES_MAX)
        _check_range("scalable_retention_minutes", self.scalable_retention_minutes, 0, _MINUTES_MAX)
        _check_range(
            "scalable_retention_disk_percent", self.scalable_retention_disk_percent, 0, _PERCENT_MAX
        )
        lookahead = self.delayed_delivery_fixed_delay_detection_lookahead
        _check_range(
            "delayed_delivery_fixed_delay_detection_lookahead", lookahead, 0, _LOOKAHEAD_MAX
        )
        _check_choice("log_level", self.log_level, _LOG_LEVELS)
        _check_choice("log_format", self.log_format, _LOG_FORMATS)
        _check_choice("transaction_kind", self.transaction_kind, _TRANSACTION_KINDS)


def all_settings() -> tuple[Setting, ...]:
    """Every setting: those of the server, one for each default of a policy and for each limit."""
    own = []
    for each in fields(ServerConfig):
        if isinstance(each.default, str | int):  # the groups are made anew each time
            words = each.metadata["unit"], each.metadata["doc"]
            own.append(Setting(_variable(each.name), each.name, each.default, *words, None))
    limits = [
        Setting(_variable(limit.name), limit.name, limit.default, limit.unit, limit.doc, limit)
        for limit in all_limits()
    ]
    policies = [
        Setting(_variable(each.name), each.name, each.default, each.unit, each.doc, None)
        for each in all_policy_defaults()
    ]
    return (*own, *policies, *limits)


def limits_from(environ: Mapping[str, str]) -> Limits:
    """The limits that an environment asks for; ConfigError names what is wrong."""
    return Limits().override(_limits_among(_environment_values(environ)))


def load(flags: Mapping[str, object], environ: Mapping[str, str]) -> ServerConfig:
    """The settings of a server; `flags` holds those given, by key, and may name a `config`."""
    known = {setting.key: setting for setting in all_settings()}
    given = dict(flags)
    # The file is found by flag or variable only: one that named another file could go in circles.
    path = given.pop("config", None) or environ.get(CONFIG_VARIABLE)
    values = _file_values(Path(str(path)), known) if path else {}
    # Invariant 2: each source overrides the one before it.
    values |= _environment_values(environ)
    for key, value in given.items():
        values[key] = _checked(known[key], f"--{key.replace('_', '-')}", value)
    names = {each.name for each in all_policy_defaults()}
    policies = {key: value for key, value in values.items() if key in names}
    own = {
        key: value for key, value in values.items() if known[key].limit is None and key not in names
    }
    return ServerConfig(
        **own,  # type: ignore[arg-type]  # _checked saw to the types
        policies=PolicyDefaults().override(policies),
        limits=Limits().override(_limits_among(values)),
    )


# --- where values come from


def _environment_values(environ: Mapping[str, str]) -> dict[str, object]:
    known = {setting.name: setting for setting in all_settings()}
    values: dict[str, object] = {}
    for name, text in environ.items():
        # Other programs' variables are none of ours; those with our prefix are, even if unknown.
        if not name.startswith(PREFIX) or name in (CONFIG_VARIABLE, *CLIENT_VARIABLES):
            continue
        if _is_of_kubernetes(name, text):
            continue
        if name not in known:
            raise _unknown(name, (*known, CONFIG_VARIABLE, *CLIENT_VARIABLES))
        values[known[name].key] = _from_text(known[name], text)
    return values


def _is_of_kubernetes(name: str, text: str) -> bool:
    if name.endswith("_PORT") and _KUBERNETES_PORT.fullmatch(text):
        return True
    return _KUBERNETES_NAME.fullmatch(name) is not None


def _file_values(path: Path, known: Mapping[str, Setting]) -> dict[str, object]:
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"the settings file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"the settings file {path} is not TOML: {error}") from error
    for key in found:
        if key not in known:
            raise _unknown(f"{key} (in {path})", known, key)
    return {key: _checked(known[key], f"{key} (in {path})", found[key]) for key in found}


def _limits_among(values: Mapping[str, object]) -> dict[str, object]:
    names = {limit.name for limit in all_limits()}
    return {key: value for key, value in values.items() if key in names}


# --- what a value must be


def _from_text(setting: Setting, text: str) -> str | int | float:
    if isinstance(setting.default, str):
        return text
    try:
        if isinstance(setting.default, bool):  # a bool is an int as well: it goes first
            return _ON_OFF[text.lower()]
        return int(text) if isinstance(setting.default, int) else float(text)
    except (KeyError, ValueError):
        raise _wrong_kind(setting, setting.name, text) from None


def _checked(setting: Setting, shown: str, value: object) -> object:
    """A value of the right kind; its range is the business of `ServerConfig` and `Limits`."""
    kinds: tuple[type, ...] = (type(setting.default),)
    # `5` is a fine value for a setting of seconds.
    if isinstance(setting.default, float):
        kinds = (int, float)
    # A bool is an int to Python, but `port = true` is a mistake.
    is_bool = isinstance(value, bool)
    if is_bool != isinstance(setting.default, bool) or not isinstance(value, kinds):
        raise _wrong_kind(setting, shown, value)
    return value


def _wrong_kind(setting: Setting, shown: str, value: object) -> ConfigError:
    if isinstance(setting.default, str):
        return ConfigError(f"{shown} must be text ({setting.unit}), not {value!r}")
    if isinstance(setting.default, bool):
        return ConfigError(f"{shown} must be {' or '.join(_ON_OFF)}, not {value!r}")
    kind = "a whole number" if isinstance(setting.default, int) else "a number"
    return ConfigError(f"{shown} must be {kind} of {setting.unit}, not {value!r}")


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"setting {name} must be from {least} to {most}, not {value}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"setting {name} must be one of {', '.join(choices)}, not {value!r}")


def _unknown(shown: str, known: Iterable[str], name: str | None = None) -> ConfigError:
    # The nearest name, however far: a wrong guess costs a line, a silent typo costs hours.
    (nearest,) = get_close_matches(name or shown, list(known), n=1, cutoff=0.0)
    return ConfigError(f"there is no setting {shown}", hint=f"did you mean {nearest}?")


def _variable(key: str) -> str:
    return PREFIX + key.upper()
