"""The settings of a process: what the environment may say, and what becomes of it.

Owns: the names of all settings and the translation into `Limits`. A limit is set by the variable
`MAGNETAR_` plus its name in capitals.

Invariants:
1. A variable that begins with `MAGNETAR_` and is no setting is refused, with the nearest name: a
   misspelt setting never goes unnoticed.
2. Only what is set changes; values are checked by `Limits`.
3. `docs/reference/settings.md` lists every setting (a test compares).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final, NamedTuple

from magnetar.errors import ConfigError
from magnetar.runtime.limits import Limit, Limits, all_limits

PREFIX: Final = "MAGNETAR_"


class Setting(NamedTuple):
    """One environment variable."""

    name: str
    limit: Limit
    """What it sets."""


def all_settings() -> tuple[Setting, ...]:
    """Every setting, in the order of the limits."""
    return tuple(Setting(f"{PREFIX}{limit.name.upper()}", limit) for limit in all_limits())


def limits_from(environ: Mapping[str, str]) -> Limits:
    """The limits that an environment asks for; ConfigError names what is wrong."""
    known = {setting.name: setting for setting in all_settings()}
    values: dict[str, object] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            (nearest,) = get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(f"there is no setting {name}", hint=f"did you mean {nearest}?")
        values[known[name].limit.name] = _number(known[name], text)
    return Limits().override(values)


def _number(setting: Setting, text: str) -> int | float:
    whole = isinstance(setting.limit.default, int)
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        unit = setting.limit.unit
        raise ConfigError(f"{setting.name} must be {kind} of {unit}, not {text!r}") from None
