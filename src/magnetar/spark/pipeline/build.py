"""The way from a checked pipeline to Spark's data frames and streaming queries.

Owns: how each table of the file becomes a view or a query, and which sources a sink depends on.

Invariants:
1. Views are made in the order of the file: a step sees what stands above it, nothing else.
2. Each sink is a query with a checkpoint of its own, `<checkpoint>/<sink>`, and with a subscription
   of its own at each of its sources, `<pipeline>.<sink>.<source>`.
3. A function of a file next to the pipeline reaches executors by value: they need not have the
   file.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from magnetar.errors import ConfigError, InvalidSetting, MagnetarError, SparkError
from magnetar.spark.options import Use, parse
from magnetar.spark.pipeline.file import (
    AS_SOON_AS_POSSIBLE,
    AVAILABLE_NOW,
    MAGNETAR_FORMATS,
    Option,
    Pipeline,
    Sink,
    Source,
    Step,
    has_service_url,
)

_TOPICS: Final = ("topic", "topics", "topicsPattern", "subscribe", "subscribePattern", "path")
_SUBSCRIPTION: Final = ("subscription", "predefinedsubscription")
_UNUSUAL: Final = re.compile(r"[^\w-]+")


def check_steps(pipeline: Pipeline) -> None:
    """Look for the functions and files that steps name; no session is needed for that."""
    # A step is SQL (in the file or beside it), a function of a file, or one of a package. All that
    # can be wrong with its place is told before a JVM is started, which takes seconds.
    for step in pipeline.steps:
        if step.python is None:
            _sql(pipeline, step)
            continue
        place, _, name = step.python.rpartition(":")
        if place.endswith(".py"):
            _look_for(step, Path(pipeline.path(place)), name)
        # Only the top package: looking for more would import it.
        elif find_spec(place.partition(".")[0]) is None:
            raise ConfigError(f"steps.{step.name}.python: {place} is not installed")


def check_options(pipeline: Pipeline) -> None:
    """Check the options of our own sources and sinks; those of others only Spark knows."""
    servers_of(pipeline)


def servers_of(pipeline: Pipeline) -> list[str]:
    """The brokers that our own sources and sinks talk to, each once; raises for wrong options."""
    ends = [
        (f"sources.{name}", source.format, source_options(pipeline, name), Use.STREAM)
        for name, source in pipeline.sources.items()
    ]
    ends += [
        (f"sinks.{name}", sink.format, sink_options(pipeline, sink), Use.WRITE)
        for name, sink in pipeline.sinks.items()
    ]
    found = []
    for place, kind, options, use in ends:
        # Spark finds out about the others when it makes the query.
        if kind not in MAGNETAR_FORMATS:
            continue
        try:
            found.append(parse(options, use)["serviceUrl"])
        except InvalidSetting as error:
            raise ConfigError(f"{place}: {error.args[0]}", hint=error.hint) from error
    return list(dict.fromkeys(found))


def views(spark: SparkSession, pipeline: Pipeline, sink: str) -> dict[str, DataFrame]:
    """Every source and step, by its name; each is a temporary view of the session, too.

    Sources are the sink's own: what its query has not read is kept for it, whatever others do.
    """
    made: dict[str, DataFrame] = {}
    for name in pipeline.sources:
        made[name] = _source(spark, pipeline, name, sink)
        made[name].createOrReplaceTempView(name)
    for step in pipeline.steps:
        made[step.name] = _step(spark, pipeline, step, made)
        made[step.name].createOrReplaceTempView(step.name)
    return made


def query(pipeline: Pipeline, name: str, frame: DataFrame) -> StreamingQuery:
    """Start the query of one sink."""
    sink = pipeline.sinks[name]
    # A step that reads a table only, or a Python function that returned one.
    if not frame.isStreaming:
        raise ConfigError(f"sinks.{name}: {pipeline.input_of(sink)} has no stream in it")
    writer = frame.writeStream.format(sink.format).outputMode(sink.mode).queryName(name)
    for key, value in sink_options(pipeline, sink).items():
        writer = writer.option(key, value)
    # After the sink's own options: a checkpoint elsewhere would slip past the lock and the claim
    # (invariant 2, and `state`).
    writer = writer.option("checkpointLocation", f"{pipeline.checkpoint_path}/{name}")
    # Without a trigger Spark begins a batch as soon as the last one ends.
    if pipeline.trigger == AVAILABLE_NOW:
        writer = writer.trigger(availableNow=True)
    elif pipeline.trigger != AS_SOON_AS_POSSIBLE:
        writer = writer.trigger(processingTime=pipeline.trigger)
    return writer.start()


def source_options(pipeline: Pipeline, name: str, *, sink: str | None = None) -> dict[str, str]:
    """The options of a source, with the subscription of the sink's query."""
    source = pipeline.sources[name]
    options = _options(pipeline, source.format, source.topic, source.options)
    is_named = any(key.lower() in _SUBSCRIPTION for key in options)
    if sink is not None and source.format in MAGNETAR_FORMATS and not is_named:
        # A pipeline's name is for people; as a part of a subscription's it goes into URLs.
        options["subscription"] = f"{_UNUSUAL.sub('-', pipeline.name)}.{sink}.{name}"
    return options


def sink_options(pipeline: Pipeline, sink: Sink) -> dict[str, str]:
    return _options(pipeline, sink.format, sink.topic, sink.options)


def identity(pipeline: Pipeline) -> dict[str, list[str]]:
    """The sources that each sink's checkpoint has positions of, in words."""
    found = {}
    for name, sink in pipeline.sinks.items():
        needed = sources_of(pipeline, pipeline.input_of(sink))
        found[name] = [_described(pipeline.sources[source]) for source in needed]
    return found


# --- sources and steps


def _options(
    pipeline: Pipeline, kind: str, topic: str | None, given: Mapping[str, Option]
) -> dict[str, str]:
    """The options of a source or sink as text, which is how Spark takes them."""
    options = {key: _text(value) for key, value in given.items()}
    if topic is not None:
        options["topic"] = topic
    is_ours = kind in MAGNETAR_FORMATS
    # One broker for the whole file, unless a source or sink names its own.
    if is_ours and pipeline.service_url is not None and not has_service_url(options):
        options["serviceUrl"] = pipeline.service_url
    return options


def _text(value: Option) -> str:
    # Python writes `True`, Spark reads `true`.
    return str(value).lower() if isinstance(value, bool) else str(value)


def _source(spark: SparkSession, pipeline: Pipeline, name: str, sink: str) -> DataFrame:
    source = pipeline.sources[name]
    reader = spark.readStream.format(source.format)
    for key, value in source_options(pipeline, name, sink=sink).items():
        reader = reader.option(key, value)
    if source.schema is not None:
        reader = reader.schema(source.schema)
    frame = reader.load()
    # Expressions first: a watermark may be on a column that they make.
    if source.select:
        frame = frame.selectExpr(*source.select)
    if source.watermark is not None:
        frame = frame.withWatermark(source.watermark.column, source.watermark.delay)
    return frame


def _step(
    spark: SparkSession, pipeline: Pipeline, step: Step, made: dict[str, DataFrame]
) -> DataFrame:
    if step.python is not None:
        frame = _called(pipeline, step, spark, made)
        if not isinstance(frame, DataFrame):
            raise ConfigError(
                f"steps.{step.name}: {step.python} returned {type(frame).__name__}",
                hint="return a data frame",
            )
        return frame
    return spark.sql(_sql(pipeline, step))


def _sql(pipeline: Pipeline, step: Step) -> str:
    if step.sql is not None:
        return step.sql
    assert step.sql_file is not None
    try:
        return Path(pipeline.path(step.sql_file)).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"steps.{step.name}.sql_file: {error}") from error


def _look_for(step: Step, path: Path, name: str) -> None:
    """Whether the file has the function; it is not run: what it does may need a session."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"steps.{step.name}.python: {path}: {error}") from error
    # Defined, assigned or imported: more than what is callable, so that nothing good is refused.
    named = {getattr(each, "name", None) for each in tree.body}
    named |= {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    named |= {each.asname or each.name for each in ast.walk(tree) if isinstance(each, ast.alias)}
    if name not in named:
        raise ConfigError(f"steps.{step.name}.python: {path} has no function {name}")


def _called(
    pipeline: Pipeline, step: Step, spark: SparkSession, made: dict[str, DataFrame]
) -> object:
    """What the function of a step returns; what it raises is told with its place."""
    assert step.python is not None
    place, _, name = step.python.rpartition(":")
    # Errors of Spark and of Magnetar say their reason themselves; anything else is a mistake in the
    # user's function, and the last line of its trace is where to look.
    try:
        is_file = place.endswith(".py")
        module = _module(Path(pipeline.path(place))) if is_file else importlib.import_module(place)
        return getattr(module, name)(spark, dict(made))
    except (PySparkException, MagnetarError):
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise SparkError(
            f"steps.{step.name}: {type(error).__name__}: {error}",
            hint=f"{frame.filename}, line {frame.lineno}",
        ) from error


def _module(path: Path) -> ModuleType:
    name = f"magnetar_pipeline_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and pickling look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    # Invariant 3: by reference, executors would look for a module that only the driver has.
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module


# --- what a checkpoint belongs to


def sources_of(pipeline: Pipeline, view: str) -> list[str]:
    """The sources that a view may read. A Python function is taken to read all above it."""
    # Too many is safe and too few is not: a name in a comment of the SQL counts as a use.
    above: dict[str, set[str]] = {name: {name} for name in pipeline.sources}
    for step in pipeline.steps:
        sql = None if step.python is not None else _sql(pipeline, step)
        needed: set[str] = set()
        for name, sources in above.items():
            if sql is None or re.search(rf"\b{name}\b", sql, re.IGNORECASE):
                needed |= sources
        above[step.name] = needed
    return [name for name in pipeline.sources if name in above[view]]


def _described(source: Source) -> str:
    topics = [source.topic] if source.topic is not None else []
    topics += [str(source.options[key]) for key in _TOPICS if key in source.options]
    return " ".join([source.format, *topics])
