"""`magnetar doctor`: look at the machine, the data folder and a server, and say what to do.

Owns: the checks. Each gives one or more findings; none changes anything (the sync is measured in a
temporary file that is removed).

Invariants:
1. A check that cannot be made is a finding of its own, never an end of the others.
2. The exit code is 1 if and only if a finding is FAILED.
"""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import metadata, util
from pathlib import Path
from typing import Final, NamedTuple

import click
import msgspec

from magnetar.cli.admin_client import AdminClient, check, default_admin_url, default_service_url
from magnetar.cli.link import ServerConnection
from magnetar.cli.output import print_json, print_table
from magnetar.errors import ConfigError, FolderInUse, MagnetarError
from magnetar.runtime.descriptors import fitted
from magnetar.runtime.disk import LocalDisk
from magnetar.runtime.disk_space import RESERVE_NAME
from magnetar.runtime.space_rules import SpaceRules, SpaceSeen
from magnetar.server.config import ServerConfig, load
from magnetar.server.embedded import STORE_FORMAT, StoreFormat

_SYNCS: Final = 20
_SYNC_BYTES: Final = 4096
# A disk that spins takes about ten; what is slower is mostly a network or a busy neighbour.
_SLOW_SYNC_MS: Final = 20.0
_GIB: Final = 1024**3
_MIB: Final = 1024**2
# A server that does not answer within this is none that people would call running.
_SECONDS: Final = 5.0
_LIBRARIES: Final = ("aiohttp", "protobuf", "msgspec", "pyroaring", "crc32c")


class CheckResult(Enum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of one check: what it saw, and what to do about it."""

    check: str
    verdict: CheckResult
    found: str
    advice: str = ""


@click.command()
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="The data folder to look at.  [default: by settings]",
)
@click.option("--url", metavar="URL", help="A running server, pulsar://host:port.")
@click.option("--admin-url", metavar="URL", help="Its admin interface, http://host:port.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(
    context: click.Context,
    data: Path | None,
    url: str | None,
    admin_url: str | None,
    as_json: bool,
) -> None:
    """Check versions, the data folder, its disk, the ports and the server; exit 1 if any fails."""
    config = load({}, os.environ)
    # Naming only a server or only a folder leaves the other out.
    remote_only = (url or admin_url) and data is None
    findings = list(_versions())
    in_use = False
    if not remote_only:
        folder = data or Path(config.data)
        about_folder = list(_folder(folder, config))
        # A process that has the folder open is most likely the server to look at.
        in_use = any(each.check == "lock" and "in use" in each.found for each in about_folder)
        findings += about_folder
    if data is None or url or admin_url or in_use:
        # No answer is: a failure if a server was named, a warning if one seems to run
        # elsewhere, and fine if nobody asked for one (then the ports have to be free).
        missing = CheckResult.WARNING if in_use else None
        missing = CheckResult.FAILED if url or admin_url else missing
        urls = url or default_service_url(), admin_url or default_admin_url()
        findings += asyncio.run(_server(*urls, config, missing))
    if as_json:
        print_json([{**asdict(each), "verdict": each.verdict.value} for each in findings])
    else:
        _print(findings)
    # Invariant 2: warnings are for people, failures for scripts as well.
    if any(each.verdict is CheckResult.FAILED for each in findings):
        context.exit(1)


def _print(findings: list[Finding]) -> None:
    rows = [(each.check, each.verdict.value, each.found) for each in findings]
    print_table(("check", "verdict", "found"), rows, none="nothing was checked")
    for each in findings:
        if each.advice:
            click.echo(f"{each.check}: {each.advice}")
    if all(each.verdict is CheckResult.OK for each in findings):
        click.echo("all is well")


# --- versions


def _versions() -> Iterator[Finding]:
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("version", CheckResult.OK, f"Magnetar {metadata.version('magnetar')}, {python}")
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES)
    yield Finding("libraries", CheckResult.OK, libraries)
    if util.find_spec("uvloop") is None:
        advice = "install uvloop: the server is slower without it"
        yield Finding("uvloop", CheckResult.WARNING, "not installed", advice)
    else:
        yield Finding("uvloop", CheckResult.OK, metadata.version("uvloop"))


# --- the data folder and its disk


def _folder(folder: Path, config: ServerConfig) -> Iterator[Finding]:
    if folder.is_dir():
        yield _format(folder)
        yield _lock(folder)
    else:
        yield Finding("folder", CheckResult.OK, f"{folder} is not there yet; `serve` creates it")
    # The folder may not exist yet: the disk is that of the nearest one that does.
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    yield _space(existing, config)
    yield _sync(existing)
    yield _descriptors(config)


def _format(folder: Path) -> Finding:
    path = folder / "FORMAT"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=StoreFormat)
    except FileNotFoundError:
        # LOCK alone is left by a server that stopped before it made a store.
        others = [each.name for each in folder.iterdir() if each.name != "LOCK"]
        if not others:
            return Finding("folder", CheckResult.OK, f"{folder} is empty")
        advice = "choose an empty folder, or put the FORMAT file back"
        return Finding(
            "folder", CheckResult.FAILED, f"{folder} holds {others[0]} but no FORMAT", advice
        )
    except (OSError, msgspec.MsgspecError) as error:
        advice = "restore the FORMAT file from a copy"
        return Finding("folder", CheckResult.FAILED, f"{path} cannot be read: {error}", advice)
    # A server refuses it as well (`format-too-new`), and leaves it untouched.
    if found.format > STORE_FORMAT:
        text = f"{folder} has format {found.format}; this version knows up to {STORE_FORMAT}"
        return Finding("folder", CheckResult.FAILED, text, "run the version that wrote it")
    return Finding("folder", CheckResult.OK, f"{folder}, format {found.format}")


def _lock(folder: Path) -> Finding:
    if not (folder / "LOCK").exists():
        return Finding("lock", CheckResult.OK, "free")
    try:
        # Tried and given back at once: only the kernel knows whether the lock is held.
        LocalDisk().lock(folder / "LOCK").release()
    except FolderInUse:
        return Finding("lock", CheckResult.OK, "in use by a running process")
    except MagnetarError as error:
        return Finding("lock", CheckResult.FAILED, str(error), "check the rights on the folder")
    return Finding("lock", CheckResult.OK, "free")


def _space(folder: Path, config: ServerConfig) -> Finding:
    space = LocalDisk().space(folder)
    rules, reserve = SpaceRules(config.limits), folder / RESERVE_NAME
    floor = rules.floor(space.total)
    reserved = reserve.stat().st_size if reserve.exists() else 0
    left = rules.left(SpaceSeen(free=space.free, total=space.total, reserved=reserved))
    text = (
        f"{_in_words(space.free)} of {_in_words(space.total)} are free; publishes need "
        f"{_in_words(floor)}, the reserve has {_in_words(reserved)}"
    )
    if left < floor:
        advice = "free some space, or delete topics: a server refuses publishes here"
        return Finding("space", CheckResult.FAILED, f"{text}: publishes are refused", advice)
    # What the journal may still grow by; topics come on top.
    journal = config.limits.journal_file_bytes * config.limits.journal_files_max
    taken = sum(each.stat().st_size for each in (folder / "journal").glob("*.journal"))
    needed = floor + max(0, journal - taken)
    if left < needed:
        advice = f"free some space soon: the journal may grow to {_in_words(journal)}"
        return Finding("space", CheckResult.WARNING, text, advice)
    return Finding("space", CheckResult.OK, text)


def _in_words(size: int) -> str:
    if size >= _GIB:
        return f"{size / _GIB:,.1f} GiB"
    return f"{size / _MIB:,.1f} MiB"


def _descriptors(config: ServerConfig) -> Finding:
    """How many files and connections a server started from here could have open."""
    # `serve` raises the soft limit up to the hard one.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("descriptors", CheckResult.OK, "no limit of open files")
    advice = "raise the hard limit of open files (`ulimit -Hn`, or LimitNOFILE of its unit)"
    try:
        clients = fitted(config.limits, hard).connections_max
    except ConfigError as error:
        return Finding("descriptors", CheckResult.FAILED, str(error), advice)
    text = f"{hard:,} open files: room for {clients:,} connections of clients"
    # Nothing fails then: further clients are turned away.
    if clients < config.limits.connections_max:
        return Finding("descriptors", CheckResult.WARNING, text, advice)
    return Finding("descriptors", CheckResult.OK, text)


def _sync(folder: Path) -> Finding:
    """What every acknowledgement waits for: how long a small write takes to be durable."""
    try:
        times = _sync_times(folder)
    except OSError as error:
        advice = "check the rights on the folder, and the disk"
        if error.errno == errno.ENOSPC:
            advice = "free some space"
        return Finding("sync", CheckResult.FAILED, f"{folder} cannot be written: {error}", advice)
    median = statistics.median(times)
    text = f"median {median:.2f} ms, longest {max(times):.2f} ms of {len(times)} syncs"
    if median > _SLOW_SYNC_MS:
        advice = "every acknowledgement waits for a sync: use a disk with faster ones"
        return Finding("sync", CheckResult.WARNING, text, advice)
    return Finding("sync", CheckResult.OK, text)


def _sync_times(folder: Path) -> list[float]:
    times = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        descriptor = file.fileno()
        # Written once before: as in the journal, a sync then has no new blocks to note down.
        os.pwrite(descriptor, bytes(_SYNC_BYTES * _SYNCS), 0)
        os.fsync(descriptor)
        for number in range(_SYNCS):
            begun = time.perf_counter()
            os.pwrite(descriptor, b"\x01" * _SYNC_BYTES, number * _SYNC_BYTES)
            # The call that the journal makes.
            os.fdatasync(descriptor)
            times.append((time.perf_counter() - begun) * 1000)
    return times


# --- the server


class Answered(NamedTuple):
    """The answer of a server, as far as there was one."""

    found: str
    """Empty: it did not answer."""
    error: str
    """Empty: all is well."""


async def _server(
    url: str, admin_url: str, config: ServerConfig, missing: CheckResult | None
) -> list[Finding]:
    """What answers; `missing` is the verdict if nothing does (None: the ports must be free)."""
    protocol = await _protocol(url)
    admin = await _admin(admin_url)
    # One of the two answers: then the other one should, too.
    if protocol.found or admin.found or missing is not None:
        verdict = missing or CheckResult.FAILED
        return [
            _answer("server", url, protocol, verdict),
            _answer("admin", admin_url, admin, verdict),
        ]
    ports = [("port", config.port), ("admin_port", config.admin_port)]
    return [_port(what, config.host, number) for what, number in ports]


async def _protocol(url: str) -> Answered:
    try:
        async with ServerConnection(url, seconds=_SECONDS) as link:
            return Answered(link.server_version, "")
    except MagnetarError as error:
        return Answered("", str(error))


async def _admin(url: str) -> Answered:
    try:
        async with AdminClient(url, seconds=_SECONDS) as admin:
            version = await admin.get("brokers/version")
            health = await admin.exchange("GET", "brokers/health")
    except MagnetarError as error:
        return Answered("", str(error))
    try:
        check(health)
    # It answers, and says what is wrong with it.
    except MagnetarError as error:
        return Answered(f"version {version}", str(error))
    return Answered(f"health ok, version {version}", "")


def _answer(check: str, url: str, answered: Answered, missing: CheckResult) -> Finding:
    found, error = answered
    if found:
        verdict = CheckResult.FAILED if error else CheckResult.OK
        return Finding(check, verdict, f"{url}: {found}{': ' if error else ''}{error}")
    advice = "start a server with `magnetar serve`, or name the one to look at with --url"
    # The folder is in use, and nothing answers at the default addresses: it listens elsewhere.
    if missing is CheckResult.WARNING:
        advice = "a process has the folder open: name its --url and --admin-url to look at it too"
    return Finding(check, missing, error, advice)


def _port(what: str, host: str, number: int) -> Finding:
    """Whether a server could listen there."""
    try:
        family, *_, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the server does it: connections of a former one that are fading away do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        advice = f"end what uses it, or set {what} to another one (0: a free one)"
        return Finding(
            what, CheckResult.FAILED, f"{host}:{number}: {error.strerror or error}", advice
        )
    return Finding(what, CheckResult.OK, f"{host}:{number} is free")
