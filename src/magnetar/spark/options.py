"""Pure: the options that a user gave, checked against the table.

Owns: `parse`, from what Spark hands over (its keys are in lower case) to `Options`, values by their
canonical names.

Invariants:
1. An option is known by its name and its aliases, in any case. An unknown one is refused, naming
   the nearest that there is; so is one that means nothing to this use, and one given twice.
2. Values are checked here: what `Options` holds can be used.
3. No error here shows a value of a secret option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, NoReturn

from magnetar.errors import InvalidSetting
from magnetar.spark.option_table import OPTIONS, Option, Use

__all__ = ["Options", "Use", "parse"]

_SAID: Final = {
    Use.STREAM: "a streaming read",
    Use.BATCH: "a batch read",
    Use.WRITE: "a write",
    Use.READ: "a read",
}

# Checked by Spark, not here; in lower case, as Spark hands keys over.
FROM_SPARK: Final = frozenset(
    {
        *("checkpointlocation", "queryname", "path", "outputmode"),
        *("asyncprogresstrackingenabled", "asyncprogresstrackingcheckpointintervalms"),
    }
)
"""What Spark puts among the options, or reads from them, by itself."""

_BY_KEY: Final = {
    key.lower(): option for option in OPTIONS for key in (option.name, *option.aliases)
}


# --- what was given


@dataclass(frozen=True, slots=True)
class Options:
    """The values, by canonical name; those that were not given have their default."""

    use: Use
    values: Mapping[str, Any]
    given: frozenset[str]
    spark: Mapping[str, str]
    """What Spark put there."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def required(self, name: str, example: str) -> Any:
        value = self.values[name]
        if value is None:
            raise InvalidSetting(
                f"the option {name} is missing", hint=f'add .option("{name}", "{example}")'
            )
        return value


def parse(given: Mapping[str, str], use: Use) -> Options:
    """What a user gave to a data source, checked."""
    found: dict[str, Any] = {}
    spark: dict[str, str] = {}
    # Four outcomes for a key: Spark's own, unknown, of another use, or one of ours.
    for key, written in given.items():
        option = _BY_KEY.get(key.lower())
        if option is None and key.lower() in FROM_SPARK:
            spark[key.lower()] = written
            continue
        if option is None:
            _refuse_unknown(key)
        # Refused, not ignored: `maxMessagesPerTrigger` on a batch read would seem to limit
        # something.
        if not use & option.use:
            raise InvalidSetting(
                f"the option {option.name} means nothing to {_SAID[use]}", hint="leave it out"
            )
        # By its name and by an alias: which one is meant, nobody can tell.
        if option.name in found:
            raise InvalidSetting(f"the option {option.name} is given twice ({key} means the same)")
        found[option.name] = _value(option, written)
    # Defaults go through the same parser as what users write.
    values = {
        option.name: None if option.default is None else option.parse(option.default)
        for option in OPTIONS
        if use & option.use
    }
    return Options(use, values | found, frozenset(found), spark)


def _value(option: Option, written: str) -> Any:
    try:
        return option.parse(written)
    except ValueError as error:
        # Invariant 3: errors end up in logs.
        shown = "its value" if option.is_secret else repr(written)
        raise InvalidSetting(
            f"the option {option.name} cannot be {shown}", hint=str(error)
        ) from None


def _refuse_unknown(key: str) -> NoReturn:
    # 0.6 is difflib's own measure of "close"; below it hints mislead more than they help.
    near = get_close_matches(key.lower(), _BY_KEY, n=1, cutoff=0.6)
    hint = "docs/spark/source.md and docs/spark/sink.md have the list"
    if near:
        wanted = _BY_KEY[near[0]]
        known = next(k for k in (wanted.name, *wanted.aliases) if k.lower() == near[0])
        hint = f"is {known} meant?"
    raise InvalidSetting(f"there is no option {key}", hint=hint)
