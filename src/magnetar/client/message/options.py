"""Pure: checks of the options that an application gives, where it gives them.

Owns: `check_numbers`, `check_kinds` and `check_member`, `check_switches`, `check_schema`,
`check_texts`.

Invariant: a value of another kind raises `InvalidSetting`, which names the option and says what it
takes; Python itself would only stumble over it later, somewhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from magnetar.errors import InvalidSetting


def check_numbers(settings: object, positive: Sequence[str], not_negative: Sequence[str]) -> None:
    """Refuse limits below 1, and times that are negative or without an end."""
    for name in positive:
        value = getattr(settings, name)
        if not isinstance(value, int) or value < 1:
            raise InvalidSetting(f"{name} must be a whole number, 1 or more, not {value!r}")
    for name in not_negative:
        value = getattr(settings, name)
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise InvalidSetting(f"{name} must be a number, 0 or more, not {value!r}")


def check_kinds(settings: object, kinds: Mapping[str, type[Enum]]) -> None:
    """Refuse what is no member of the enumeration of its option: `"zstd"`, say."""
    for name, kind in kinds.items():
        check_member(name, getattr(settings, name), kind)


def check_member(name: str, value: object, kind: type[Enum]) -> None:
    """Refuse one option that is no member of its enumeration."""
    if not isinstance(value, kind):
        members = ", ".join(f"{kind.__name__}.{each.name}" for each in kind)
        raise InvalidSetting(f"{name} is {value!r}", hint=f"give one of {members}")


def check_switches(settings: object, names: Sequence[str]) -> None:
    """Refuse what is neither True nor False: `"off"` would be true."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise InvalidSetting(f"{name} must be True or False, not {value!r}")


def check_schema(given: object) -> None:
    """Refuse what cannot encode and decode: `"json"`, or a class."""
    if isinstance(given, type) or not hasattr(given, "info"):
        hint = "give JsonSchema(YourClass), for example; without a schema, values are bytes"
        raise InvalidSetting(f"schema is {given!r}", hint=hint)


def check_texts(name: str, given: object) -> None:
    """Refuse properties that are not text by text."""
    text = wrong_property(given)
    if text is not None:
        raise InvalidSetting(f"{name}: {text}", hint="names and values are str")


def wrong_property(given: object) -> str | None:
    """What of a mapping is no text; None: all of it is."""
    if not isinstance(given, Mapping):
        return f"{given!r} is no mapping"
    for key, value in given.items():
        if not isinstance(key, str) or not isinstance(value, str):
            return f"{key!r}: {value!r} is not text by text"
    return None
