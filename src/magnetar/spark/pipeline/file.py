"""Pure: what a pipeline file says, checked.

Owns: the keys of a pipeline file and what they may hold; `docs/spark/pipeline-file.md` lists every
one of them (a test compares).

Invariants:
1. An unknown key is refused, and the nearest known one named; so is a reference to something that
   the file does not have.
2. Whatever can be judged without Spark and without a server is judged here, before either starts.
3. Paths are relative to the folder of the file, wherever the command is called.

Relies on: the caller for the text, the folder and the environment, which `${NAME}` stands for in
options, Spark settings and the service URL.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml
from msgspec import Meta, Struct, field

from magnetar.errors import ConfigError

MAGNETAR_FORMATS: Final = frozenset({"magnetar", "pulsar"})
AVAILABLE_NOW: Final = "available-now"
AS_SOON_AS_POSSIBLE: Final = "as-soon-as-possible"

Option = str | int | float | bool
Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Views and folders are named so."""

_INTERVAL: Final = re.compile(r"\d+ *(milliseconds?|ms|seconds?|s|minutes?|m|hours?|h|days?|d)")
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
SERVICE_URL_VARIABLE: Final = "MAGNETAR_SERVICE_URL"
_SERVICE_URL: Final = ("serviceurl", "service.url")
_SCHEME: Final = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")


class _Keys(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file; unknown keys have been refused before."""


class Watermark(_Keys, frozen=True):
    """The bound on how late rows may be: older state is forgotten, rows for it are dropped."""

    column: str
    """A timestamp column."""
    delay: str
    """For example `10 minutes`."""


class Source(_Keys, frozen=True):
    """One stream; a view of the same name for the steps."""

    format: str = "magnetar"
    """Any streaming source that Spark knows."""
    topic: str | None = None
    """Short for the option `topic`."""
    schema: str | None = None
    """The columns, as Spark's SQL writes them: `id STRING, amount DOUBLE`."""
    options: dict[str, Option] = {}
    """Of the format."""
    select: list[str] = []
    """SQL expressions: the columns of the view. Without any, those of the source."""
    watermark: Watermark | None = None


class Step(_Keys, frozen=True):
    """A view made of earlier ones, by SQL or by a Python function."""

    name: Name
    sql: str | None = None
    """A query over sources and earlier steps."""
    sql_file: str | None = None
    """The file that holds it."""
    python: str | None = None
    """`file.py:function` or `package.module:function`; called with the session and a dict of all
    views so far, it returns a data frame."""


class Sink(_Keys, frozen=True):
    """The destination of a view, as one streaming query with a checkpoint of its own."""

    input: str | None = field(default=None, name="from")
    """A step or source; without it the last step, or the only source."""
    format: str = "magnetar"
    """Any streaming sink that Spark knows."""
    topic: str | None = None
    """Short for the option `topic`."""
    mode: Literal["append", "complete", "update"] = "append"
    """What of a result is written; Magnetar takes `append`."""
    options: dict[str, Option] = {}
    """Of the format."""


class Spark(_Keys, frozen=True):
    """The session."""

    master: str | None = None
    """`local[*]` unless the command line says otherwise."""
    settings: dict[str, Option] = {}
    """Any setting of Spark."""


class Pipeline(_Keys, frozen=True):
    """A whole file."""

    name: str
    """For people, and for Spark's list of applications."""
    checkpoint: str
    """A folder, or the URL of one; it makes a restart go on where the last run ended."""
    sources: Annotated[dict[Name, Source], Meta(min_length=1)]
    sinks: Annotated[dict[Name, Sink], Meta(min_length=1)]
    service_url: str | None = None
    """Of the broker, for every source and sink that names none."""
    steps: list[Step] = []
    trigger: str = AS_SOON_AS_POSSIBLE
    """`as-soon-as-possible`, an interval such as `5 seconds`, or `available-now`: until everything
    that is there now is done."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """Serve Prometheus metrics there, on the loopback address; 0 takes a free one."""
    spark: Spark = Spark()
    folder: str = "."
    """Where the file is (not a key of it)."""

    def path(self, text: str) -> str:
        """A path of the file as one that holds anywhere; URLs stay as they are."""
        return text if _SCHEME.match(text) else str(PurePath(self.folder) / text)

    @property
    def checkpoint_path(self) -> str:
        return self.path(self.checkpoint)

    def input_of(self, sink: Sink) -> str:
        if sink.input is not None:
            return sink.input
        return self.steps[-1].name if self.steps else next(iter(self.sources))


def parsed(text: str, *, path: Path, environment: Mapping[str, str]) -> Pipeline:
    """The pipeline that a file's text describes; `path` says in which language it is."""
    try:
        # In this order, each error names the place as the user wrote it: unknown keys first, since
        # a mistyped key would else show as a missing one; variables last, so that they cannot add
        # keys.
        found = _read(text, path.suffix)
        _refuse_unknown(found, Pipeline, "")
        pipeline = msgspec.convert(found, Pipeline)
        # As every other verb does, it talks to the server of the environment if none is named.
        if pipeline.service_url is None and (url := environment.get(SERVICE_URL_VARIABLE)):
            pipeline = msgspec.structs.replace(pipeline, service_url=url)
        _check(pipeline)
        filled = _with_variables(pipeline, environment)
        return msgspec.structs.replace(filled, folder=str(path.parent))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.args[0]}", hint=error.hint) from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_plain(str(error))}") from error


# --- the file


def _read(text: str, suffix: str) -> dict[str, Any]:
    reads: dict[str, tuple[Callable[[str], Any], type[Exception]]] = {
        ".toml": (tomllib.loads, tomllib.TOMLDecodeError),
        ".yaml": (yaml.safe_load, yaml.YAMLError),
        ".yml": (yaml.safe_load, yaml.YAMLError),
    }
    if suffix not in reads:
        raise ConfigError(
            f"{suffix or 'no ending'} is not a kind of pipeline file",
            hint="use .yaml, .yml or .toml",
        )
    read, broken = reads[suffix]
    try:
        found = read(text)
    except broken as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"it cannot be read: {said}") from error
    if not isinstance(found, dict):
        raise ConfigError("it holds no keys", hint="`magnetar pipeline init` writes an example")
    return found


def _refuse_unknown(value: object, kind: type[Struct], where: str) -> None:
    """Look for keys that a table does not have, and go down into its tables."""
    if not isinstance(value, dict):
        return  # the conversion says what is wrong with it
    known = {each.encode_name: each.type for each in msgspec.structs.fields(kind)}
    known.pop("folder", None)
    for key, inner in value.items():
        place = f"{where}{key}"
        if key not in known:
            raise ConfigError(f"{place} is not a key", hint=_nearest(str(key), known))
        # A plain value is checked by the conversion; a table, or a list or mapping of tables, has
        # keys of its own.
        table, many = _table_of(known[key])
        if table is None:
            continue
        if not many:
            _refuse_unknown(inner, table, f"{place}.")
            continue
        inners = inner.items() if isinstance(inner, dict) else enumerate(inner or ())
        for name, each in inners:
            _refuse_unknown(each, table, f"{place}.{name}.")


def _table_of(annotation: Any) -> tuple[type[Struct] | None, bool]:
    """The table that a key holds, and whether it holds several of them."""
    many = False
    # Annotations are nested, `Annotated[dict[Name, Source], ...]`: look through all of their parts.
    seen = [annotation]
    while seen:
        each = seen.pop()
        origin = getattr(each, "__origin__", None)
        many = many or origin in (dict, list)
        if isinstance(each, type) and issubclass(each, _Keys):
            return each, many
        seen.extend(getattr(each, "__args__", ()))
    return None, many


def _nearest(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1)
    listed = ", ".join(sorted(known))
    return f"did you mean {close[0]}?" if close else f"known are: {listed}"


def _plain(text: str) -> str:
    """What msgspec says, with the place in front."""
    said, _, place = text.partition(" - at `$")
    return f"{place.strip('`.')}: {said}" if place.strip("`.") else said


# --- its sense


def _check(pipeline: Pipeline) -> None:
    # Steps see what stands above them, so names are collected in the order of the file.
    views = list(pipeline.sources)
    for step in pipeline.steps:
        _check_step(step, views)
        views.append(step.name)
    # With one source, or with steps, there is a last view that is meant.
    if not pipeline.steps and len(pipeline.sources) > 1:
        for name, sink in pipeline.sinks.items():
            if sink.input is None:
                raise ConfigError(
                    f"sinks.{name}: which of the sources does it take?", hint="say it with `from`"
                )
    for name, sink in pipeline.sinks.items():
        _check_sink(name, sink, views)
        _check_broker(pipeline, f"sinks.{name}", sink)
    for name, source in pipeline.sources.items():
        _check_broker(pipeline, f"sources.{name}", source)
        if source.format in MAGNETAR_FORMATS:
            _check_topic(f"sources.{name}", source.topic, source.options)
    if pipeline.trigger not in (AVAILABLE_NOW, AS_SOON_AS_POSSIBLE) and not _INTERVAL.fullmatch(
        pipeline.trigger
    ):
        raise ConfigError(
            f"trigger: {pipeline.trigger!r} is none",
            hint=f"use {AS_SOON_AS_POSSIBLE}, {AVAILABLE_NOW} or an interval such as '5 seconds'",
        )


def _check_step(step: Step, views: list[str]) -> None:
    place = f"steps.{step.name}"
    if step.name in views:
        raise ConfigError(f"{place}: the name is taken", hint="every view has its own")
    # None says nothing to do, two contradict each other.
    ways = [each for each in (step.sql, step.sql_file, step.python) if each is not None]
    if len(ways) != 1:
        raise ConfigError(
            f"{place}: it has {len(ways)} of sql, sql_file and python", hint="say one"
        )
    if step.python is not None and not all(step.python.rpartition(":")[::2]):
        raise ConfigError(f"{place}.python: {step.python!r} names no function", hint="file.py:name")


def _check_sink(name: str, sink: Sink, views: list[str]) -> None:
    place = f"sinks.{name}"
    if sink.input is not None and sink.input not in views:
        raise ConfigError(
            f"{place}.from: there is no {sink.input!r}", hint=_nearest(sink.input, views)
        )
    # Modes and options of other sinks are Spark's to judge.
    if sink.format not in MAGNETAR_FORMATS:
        return
    if sink.mode != "append":
        raise ConfigError(
            f"{place}.mode: Spark gives a sink written in Python no {sink.mode} mode",
            hint="use append, with a watermark where rows are aggregated, or write from "
            "foreachBatch with magnetar.spark.foreach_batch_writer",
        )


def _check_broker(pipeline: Pipeline, place: str, end: Source | Sink) -> None:
    is_named = pipeline.service_url is not None or has_service_url(end.options)
    if end.format in MAGNETAR_FORMATS and not is_named:
        raise ConfigError(
            f"{place}: no broker is named",
            hint="add `service_url: pulsar://host:6650` to the file, or set "
            f"{SERVICE_URL_VARIABLE}",
        )


def has_service_url(options: Iterable[str]) -> bool:
    """Whether options name a broker of their own."""
    return any(key.lower() in _SERVICE_URL for key in options)


def _check_topic(place: str, topic: str | None, options: Mapping[str, Option]) -> None:
    named = {key.lower() for key in options}
    several = {"topic", "topics", "topicspattern", "subscribe", "subscribepattern"} & named
    if topic is None and not several:
        raise ConfigError(f"{place}: it names no topic", hint="add `topic`")
    if topic is not None and several:
        raise ConfigError(f"{place}: `topic` and the option {several.pop()} exclude each other")


# --- variables


def _with_variables(pipeline: Pipeline, environment: Mapping[str, str]) -> Pipeline:
    # Only in options, settings and the service URL, never in names, SQL or paths: what a pipeline
    # is must be readable from its file alone.
    def filled(text: Any) -> Any:
        return _VARIABLE.sub(variable, text) if isinstance(text, str) else text

    def variable(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise ConfigError(f"${{{found[1]}}}: the environment has no {found[1]}")
        return environment[found[1]]

    def options(given: Mapping[str, Option]) -> dict[str, Option]:
        return {key: filled(value) for key, value in given.items()}

    replace = msgspec.structs.replace
    return replace(
        pipeline,
        service_url=filled(pipeline.service_url),
        sources={
            name: replace(each, options=options(each.options))
            for name, each in pipeline.sources.items()
        },
        sinks={
            name: replace(each, options=options(each.options))
            for name, each in pipeline.sinks.items()
        },
        spark=replace(pipeline.spark, settings=options(pipeline.spark.settings)),
    )
