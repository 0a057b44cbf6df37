"""The clients of a process: one for each service that its sources and sinks talk to.

Owns: `client_for`, which makes or finds one; `close_all`; `stop_on_sigterm`, since Spark ends the
process of a source with a signal and says nothing before.

Invariants:
1. Python workers are used again for other tasks and other queries: a client lives as long as its
   process, and tasks with the same settings share it.
2. A process that was forked makes clients of its own.
3. No secret is in a message or a name here.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Final, TypeVar

from magnetar.blocking import Client
from magnetar.client.client import Client as AsyncClient
from magnetar.client.client import connections_of
from magnetar.client.connection.server_errors import is_passing
from magnetar.client.connection.settings import TlsSettings
from magnetar.errors import InvalidSetting, MagnetarError, NotConnected
from magnetar.runtime.clock import SystemClock
from magnetar.spark.options import Options
from magnetar.spark.worker_heap import keep_loaded

R = TypeVar("R")

# Pulsar's auth params have it in front; a token alone has not.
_TOKEN: Final = "token:"
_MS_PER_SECOND: Final = 1000
# What makes two clients different ones: queries that agree in these share a client.
_NAMES: Final = (
    "serviceUrl",
    "token",
    "tlsTrustCertsFile",
    "tlsCertificateFile",
    "tlsKeyFile",
    "tlsValidateHostname",
    "tlsAllowUntrusted",
    "listenerName",
    "operationTimeoutMs",
    "connectionTimeoutMs",
)

_open: dict[tuple[object, ...], Client] = {}
_lock = threading.Lock()


def client_for(options: Options) -> Client:
    """The client of this process for these settings; nothing is connected yet."""
    # Every task begins here, right behind the collection of the one before.
    keep_loaded()
    options.required("serviceUrl", "pulsar://localhost:6650")
    # Invariant 2: a forked worker inherits this dict, but neither the thread nor the sockets of the
    # client in it.
    place = (os.getpid(), *(options[name] for name in _NAMES))
    with _lock:
        known = _open.get(place)
        if known is None:
            # A program that ends by itself closes its clients, and is not warned of forgotten ones.
            if not _open:
                atexit.register(close_all)
            known = _open[place] = _new(options)
        return known


def _new(options: Options) -> Client:
    plugin, token = options["authPlugin"], options["token"]
    # Queries written for pulsar-spark name a Java class; the only kind there is here is a token.
    if plugin is not None and "token" not in plugin.lower():
        raise InvalidSetting(
            f"there is no way to say who one is with {plugin}", hint="use a token, or leave it out"
        )
    tls = TlsSettings(
        trust_certs=options["tlsTrustCertsFile"],
        certificate=options["tlsCertificateFile"],
        key=options["tlsKeyFile"],
        validate_hostname=options["tlsValidateHostname"],
        allow_untrusted=options["tlsAllowUntrusted"],
    )
    return Client(
        options["serviceUrl"],
        auth=None if token is None else token.removeprefix(_TOKEN),
        tls=tls,
        operation_timeout=options["operationTimeoutMs"] / _MS_PER_SECOND,
        connect_timeout=options["connectionTimeoutMs"] / _MS_PER_SECOND,
        # Tasks begin while a broker restarts, and wait for it as those do that were connected.
        refused_timeout=options["operationTimeoutMs"] / _MS_PER_SECOND,
        listener_name=options["listenerName"],
    )


def close_all() -> None:
    """Close the clients of this process."""
    with _lock:
        # Clients of the parent are forgotten and not closed: they are not ours.
        clients = [each for place, each in _open.items() if place[0] == os.getpid()]
        _open.clear()
    for each in clients:
        each.close()


def patiently(
    client: Client, what: str, do: Callable[[AsyncClient], Awaitable[R]], seconds: float
) -> R:
    """Do it with the client, again and again while brokers cannot be reached, until the deadline.

    Spark ends a query at the first error of its driver's side, so trouble that passes is sat out.
    """

    # `do` may have retried for an operation timeout of its own already; here a broker that
    # restarts, or a whole cluster, is waited for.
    async def attempts(asked: AsyncClient) -> R:
        clock, backoff = SystemClock(), connections_of(asked).backoff()
        deadline = clock.monotonic() + seconds
        while True:
            try:
                return await do(asked)
            except MagnetarError as error:
                # Given up before the pause that would end behind the deadline: waiting for nothing
                # helps nobody.
                pause = backoff.next()
                if not is_passing(error) or clock.monotonic() + pause > deadline:
                    if isinstance(error, NotConnected):
                        raise not_reached(error, what, asked) from error
                    raise
            await clock.sleep(pause)

    return client.run(attempts)


def not_reached(error: NotConnected, what: str, asked: AsyncClient) -> NotConnected:
    """The error that tells a user of Spark which option is wrong if no broker answers."""
    url = connections_of(asked).settings.service_url
    return NotConnected(
        f"no broker can be reached at {url} for {what}: {error.args[0]}",
        hint="is the option serviceUrl right, and does the broker run?",
    )


def stop_on_sigterm() -> None:
    """Make the end of this process an ordinary one, in which a reader's `stop` is called."""
    # Signals can be handled in the main thread only; elsewhere (a user's program) they are not
    # ours.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit)


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)
