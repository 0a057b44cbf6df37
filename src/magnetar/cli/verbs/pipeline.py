"""`magnetar pipeline ...`: exactly-once pipelines on Spark that a file describes.

Owns: the verbs. What a file may say is in `magnetar.spark.pipeline.file`, what a run does in
`magnetar.spark.pipeline.run`; both are loaded when a verb needs them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from msgspec import to_builtins

from magnetar.cli.admin_client import (
    NOT_FOUND,
    AdminClient,
    admin_options,
    ask,
    check,
    default_service_url,
    json_option,
    name_server,
)
from magnetar.cli.next_step import to_type
from magnetar.cli.output import print_json, print_table
from magnetar.cli.verbs.subscriptions import deletion
from magnetar.errors import ConfigError, NotAllowed, SparkError

if TYPE_CHECKING:
    from magnetar.spark.pipeline.file import Pipeline
    from magnetar.spark.pipeline.state import RunState

_STOP_SECONDS: Final = 60.0
_EXAMPLE_URL: Final = "pulsar://localhost:6650"

file_argument = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


@click.group()
def pipeline() -> None:
    """Exactly-once pipelines on Spark, each a file."""


@pipeline.command()
@file_argument
def init(file: Path) -> None:
    """Write an example to FILE (.yaml or .toml) to start from."""
    kinds = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
    if file.suffix not in kinds:
        raise ConfigError(f"{file} is not named as a pipeline file", hint="use .yaml or .toml")
    # Never over a file that somebody has edited.
    if file.exists():
        raise NotAllowed(f"{file} exists", hint="choose another name: nothing was written")
    example = files("magnetar.spark") / f"example.{kinds[file.suffix]}"
    file.parent.mkdir(parents=True, exist_ok=True)
    # The server that the other verbs would talk to here.
    text = example.read_text("utf-8").replace(_EXAMPLE_URL, default_service_url())
    file.write_text(text, "utf-8")
    click.echo(f"wrote {file}; edit it, then: {to_type(f'pipeline validate {file}')}")


@pipeline.command()
@file_argument
@json_option
def validate(file: Path, as_json: bool) -> None:
    """Check FILE, and the files that it names, without a session and without a server."""
    found = _load(file)
    from magnetar.spark.pipeline.build import check_options, check_steps

    # Beyond the file's own form: options of our sources and sinks,
    # and the files and functions that steps name.
    check_options(found)
    check_steps(found)
    if as_json:
        print_json(
            {
                "name": found.name,
                "checkpoint": found.checkpoint_path,
                "sources": {name: each.format for name, each in found.sources.items()},
                "steps": [step.name for step in found.steps],
                "sinks": {
                    name: {"format": each.format, "from": found.input_of(each)}
                    for name, each in found.sinks.items()
                },
                "trigger": found.trigger,
            }
        )
        return
    views = len(found.sources) + len(found.steps)
    click.echo(f"{file} is a pipeline: {views} views, {len(found.sinks)} sinks")


@pipeline.command()
@file_argument
@click.option("--master", help="Spark's master: spark://..., yarn, k8s://...  [default: local[*]]")
@click.option(
    "--environment",
    metavar="ARCHIVE",
    help="A packed Python environment for executors (.tar.gz, a path or a URL).",
)
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve Prometheus metrics.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def run(
    context: click.Context,
    file: Path,
    master: str | None,
    environment: str | None,
    metrics_port: int | None,
    as_json: bool,
) -> None:
    """Run FILE until it ends or is stopped (Ctrl-C, SIGTERM, `stop`)."""
    # Read before Spark is loaded: a mistake in the file is said at once.
    found = _load(file)
    from magnetar.cli.verbs.pipeline_view import summary, watching
    from magnetar.spark.pipeline.build import servers_of
    from magnetar.spark.pipeline.run import Where, run
    from magnetar.spark.pipeline.session import DEFAULT_MASTER

    # A flag goes before the file, the file before the default.
    where = Where(
        master or found.spark.master or DEFAULT_MASTER,
        environment,
        found.metrics_port if metrics_port is None else metrics_port,
    )
    servers = servers_of(found)
    for each in servers:
        name_server(each)
    with watching(" ".join((found.name, *(f"on {each}" for each in servers)))) as watcher:
        state = run(found, file, where, watcher)
    if as_json:
        print_json(_as_json(state, running=False))
    else:
        summary(state)
    # Stopped and finished are good ends; the summary is printed for all three.
    if state.phase == "failed":
        context.exit(1)


@pipeline.command()
@file_argument
@json_option
def status(file: Path, as_json: bool) -> None:
    """Say how far the pipeline of FILE is, running or not."""
    from magnetar.cli.verbs.pipeline_view import rows
    from magnetar.spark.pipeline.progress import HEADINGS
    from magnetar.spark.pipeline.state import is_running, read_state, state_folder
    from magnetar.spark.pipeline.subscriptions import held

    found = _load(file)
    folder = state_folder(found)
    # The lock tells whether it runs: a killed process leaves a state that says so still.
    state, running = read_state(folder), is_running(folder)
    if state is None:
        if as_json:
            print_json({"phase": "never started"})
        else:
            click.echo("never started")
        return
    if as_json:
        kept = [to_builtins(each) for each in held(found)]
        print_json(_as_json(state, running=running) | {"subscriptions": kept})
        return
    click.echo(_in_words(state, running))
    print_table(HEADINGS, rows(state), none="no sinks")
    print_table(
        ("sink", "source", "subscription", "topics"),
        [(each.sink, each.source, each.subscription, each.topics) for each in held(found)],
        none="no subscriptions: brokers keep nothing for this pipeline",
    )


@pipeline.command()
@file_argument
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=_STOP_SECONDS,
    show_default=True,
    help="Seconds to wait for its end.",
)
def stop(file: Path, timeout: float) -> None:
    """Let the pipeline of FILE commit its batch, and end it."""
    from magnetar.spark.pipeline.state import state_folder
    from magnetar.spark.pipeline.state import stop as stop_run

    # By a signal to the process in the state file; returns when the lock is free.
    state = stop_run(state_folder(_load(file)), timeout)
    batches = ", ".join(f"{name}: batch {each.batch}" for name, each in state.queries.items())
    click.echo(f"{state.phase}; last committed: {batches}")


@pipeline.command()
@file_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@admin_options
def delete(file: Path, yes: bool, admin_url: str | None) -> None:
    """Delete the subscriptions and the checkpoint of the pipeline of FILE; FILE stays.

    Brokers keep its input no longer, and the next run begins anew: it writes its output again.
    """
    from magnetar.spark.pipeline.state import StateFolder, state_folder
    from magnetar.spark.pipeline.subscriptions import held, topics_of

    found = _load(file)
    # Under the lock, so that no run begins meanwhile; a run that has it is told to be stopped.
    with StateFolder(state_folder(found)) as folder:
        kept = [
            (each.subscription, topic) for each in held(found) for topic in topics_of(found, each)
        ]
        if not yes:
            click.confirm(
                f"delete {len(kept)} subscriptions and the checkpoint {found.checkpoint_path}?",
                abort=True,
            )
        # First, and all of them: a server that cannot be asked leaves everything as it was.
        if kept:
            ask(admin_url, lambda admin: _unsubscribe(admin, kept))
        if folder.remove(found):
            click.echo(f"deleted the checkpoint {found.checkpoint_path}")
        else:
            click.echo(f"remove the checkpoint yourself: {found.checkpoint_path}")


async def _unsubscribe(admin: AdminClient, kept: Sequence[tuple[str, str]]) -> None:
    for name, topic in kept:
        answer = await deletion(admin, topic, name, force=False)
        # No such subscription, or no such topic: there is nothing to do, which is told.
        if is_there := answer.status != NOT_FOUND:
            check(answer)
        click.echo(f"{'deleted' if is_there else 'there is no'} subscription {name} of {topic}")


# --- what the verbs share


def _load(file: Path) -> Pipeline:
    # Said before an import fails half-way, and with the extra that brings them all.
    need("yaml", "pyspark", "pyarrow")
    from magnetar.spark.pipeline.file import parsed

    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}", hint="`magnetar pipeline init FILE` writes one"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text: {error.reason}") from error
    return parsed(text, path=file.absolute(), environment=os.environ)


def need(*modules: str) -> None:
    """Refuse to go on without them; all come with one extra."""
    for module in modules:
        if find_spec(module) is None:
            raise SparkError(f"{module} is not installed", hint="pip install 'magnetar[spark]'")


def _as_json(state: RunState, *, running: bool) -> dict[str, object]:
    return {**to_builtins(state), "running": running}


def _in_words(state: RunState, running: bool) -> str:
    started = datetime.fromtimestamp(state.started_at, UTC).isoformat(" ", "seconds")
    if running:
        age = max(0.0, time.time() - state.updated_at)
        since = f"process {state.pid} since {started}"
        return f"{state.name}: {state.phase}, {since}, as of {age:.0f} s ago"
    ended = datetime.fromtimestamp(state.updated_at, UTC).isoformat(" ", "seconds")
    # It does not run, yet its last words are those of a run: it was killed.
    if state.phase in ("starting", "running", "stopping"):
        return (
            f"{state.name}: killed while {state.phase}, last seen {ended}; run it again: it goes on"
        )
    reason = f": {state.problem}" if state.problem else ""
    return f"{state.name}: {state.phase} {ended}{reason}"
