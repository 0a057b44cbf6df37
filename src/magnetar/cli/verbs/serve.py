"""`magnetar serve`: run a server until it is told to stop.

Owns: the flags, the loop (uvloop where it is installed), the signals, and what is printed. With
`--json` the one line on stdout is a JSON object, written once clients can connect.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module

import click

from magnetar.cli.next_step import to_type
from magnetar.runtime import logs
from magnetar.runtime.descriptors import raise_soft_limit
from magnetar.runtime.loop_turns import LoopTurns
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig, load

# Allocations before the youngest generation is looked at: far above Python's default.
_GC_ALLOCATIONS = 50_000

# Calm: the loop used less than a fifth of the time of one look.
_CALM_SECONDS = 0.02
_CALM_CPU_SECONDS = 0.004
_BUSY_SECONDS_MAX = 1.0
"""How long the admin interface waits for clients that keep the loop busy."""


@click.command()
@click.option("--config", metavar="FILE", help="Settings in TOML.")
@click.option("--data", metavar="DIR", help="The data folder.  [default: magnetar-data]")
@click.option("--host", help="The address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="For clients; 0: a free one.  [default: 6650]")
@click.option("--admin-port", type=int, help="Admin REST; 0: a free one.  [default: 8080]")
@click.option("--advertised-host", help="What lookups answer.  [default: the host]")
@click.option("--log-level", help="debug, info, warning or error.  [default: info]")
@click.option("--log-format", help="text or json.  [default: text]")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when ready.")
def serve(as_json: bool, **flags: str | int | None) -> None:
    """Serve Pulsar clients and the admin interface until SIGTERM, SIGINT or SIGHUP."""
    # Flags that were not given must not hide what the file or the environment says.
    given = {name: value for name, value in flags.items() if value is not None}
    config = load(given, os.environ)
    logs.configure(sys.stderr, level=config.log_level, as_json=config.log_format == "json")
    # The usual soft limit of 1,024 is for programs that use select(); connections need more.
    raise_soft_limit()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, as_json))


async def _serve(config: ServerConfig, as_json: bool) -> None:
    server = Server(config)
    told_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    # SIGHUP too: the terminal was closed. Settings are read at the start alone, so that there is
    # nothing to reload.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Before the start: a signal that comes during recovery is not lost.
        loop.add_signal_handler(number, told_to_stop.set)
    gc.disable()  # a start makes much that stays, and hardly anything to collect
    await server.bind_admin()  # a busy port is told before clients are served, not after
    await server.start()
    _calm_collector()
    # Of the process and not of the server: whoever embeds one has a loop of his own.
    turns = LoopTurns(server.clock)
    try:
        # Clients are served by now; loading the admin interface takes as long as all before it, and
        # half of the time from those whose topics are being loaded.
        await _until_calm()
        admin = await asyncio.to_thread(import_module, "magnetar.server.admin")
        await server.start_admin(admin.create_admin)
        click.echo(_ready_json(server) if as_json else _ready_text(server))
        sys.stdout.flush()
        await _until_stopped_or_failed(server, told_to_stop)
    finally:
        turns.stop()
        await server.stop()


async def _until_calm() -> None:
    """Wait until this thread has time left, at most for a while."""
    end = time.monotonic() + _BUSY_SECONDS_MAX
    while time.monotonic() < end:
        used = time.thread_time()
        await asyncio.sleep(_CALM_SECONDS)
        if time.thread_time() - used < _CALM_CPU_SECONDS:
            return


def _calm_collector() -> None:
    """Collect cycles less often: what a message allocates is freed by counting references.

    With the default thresholds the collector looks at every object alive several times a second.
    """
    # What the start made stays for ever: it need not be walked again.
    gc.freeze()
    gc.enable()
    gc.set_threshold(_GC_ALLOCATIONS, 20, 100)


async def _until_stopped_or_failed(server: Server, told_to_stop: asyncio.Event) -> None:
    waits = {
        asyncio.ensure_future(told_to_stop.wait()),
        # A part that crashed ends the server: half of one would be worse than none.
        asyncio.ensure_future(server.failed.past(0)),
    }
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


def _ready_json(server: Server) -> str:
    return json.dumps(
        {
            "service_url": server.service_url,
            "admin_url": server.admin_url,
            "data": str(server.folder),
            "pid": os.getpid(),
        }
    )


def _ready_text(server: Server) -> str:
    lines = [
        "Magnetar is ready.",
        f"  service URL  {server.service_url}",
        f"  admin URL    {server.admin_url or '-'}",
        f"  data folder  {server.folder}",
        f"  next         {to_type(f'produce --url {server.service_url} my-topic hello')}",
        "Ctrl-C stops it.",
    ]
    return "\n".join(lines)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
