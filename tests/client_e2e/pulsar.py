"""A real Apache Pulsar on loopback, started from the jars that Maven fetches.

Owns: `PULSAR`, the project that names its version, and `PulsarProcess`: start, kill, stop. Journal
and metadata are synced, as ours are.

Invariant: a process that was started is gone after `stop` or `kill`.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Final

from harness.limits import PATIENCE_S
from tests.interop.serving import ask_admin
from tests.interop_java.maven import BuildFailed, MavenProject, lacking

PULSAR: Final = MavenProject(Path(__file__).with_name("pom.xml"), "pulsar")

_HOST: Final = "127.0.0.1"
_START_SECONDS: Final = PATIENCE_S
_STOP_SECONDS: Final = PATIENCE_S
_PAUSE_SECONDS: Final = 0.25
_LINES_MAX: Final = 60
_PACKAGES: Final = (
    *(f"java.base/{each}" for each in ("java.io", "java.util.zip", "java.nio")),
    *(f"java.base/jdk.internal.{each}" for each in ("misc", "platform")),
    "java.management/sun.management",
    "jdk.management/com.sun.management.internal",
)
_JVM_OPTIONS: Final = (
    "-Xmx1g",
    "-XX:MaxDirectMemorySize=1g",
    "-XX:+UseSerialGC",
    "-Djava.net.preferIPv4Stack=true",
    "-Dio.netty.tryReflectionSetAccessible=true",
    *(f"--add-opens={each}=ALL-UNNAMED" for each in _PACKAGES),
)
_QUICK_START: Final = "-XX:TieredStopAtLevel=1"
"""Half of the compiler: it is ready sooner, and slower from then on."""

_SETTINGS: Final = {
    "clusterName": "standalone",
    "bindAddress": _HOST,
    "advertisedAddress": _HOST,
    "managedLedgerDefaultEnsembleSize": "1",
    "managedLedgerDefaultWriteQuorum": "1",
    "managedLedgerDefaultAckQuorum": "1",
    "brokerDeleteInactiveTopicsEnabled": "false",
    "allowAutoTopicCreation": "true",
    "transactionCoordinatorEnabled": "true",
    "scalableTopicsEnabled": "true",
    "transactionCoordinatorScalableTopicsEnabled": "true",
    # A dangling transaction is aborted only by this sweep: a minute unless told otherwise.
    "transactionCoordinatorScalableTopicsTimeoutSweepIntervalSeconds": "2",
    # A member of a group that is gone keeps its segments for so long: a minute, likewise.
    "scalableTopicConsumerSessionGracePeriodSeconds": "5",
    "acknowledgmentAtBatchIndexLevelEnabled": "true",
    "loadBalancerEnabled": "false",
    "journalSyncData": "true",
    "listeningInterface": "lo",
    "allowLoopback": "true",
    "ledgerStorageClass": "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
}


class PulsarProcess:
    """One standalone Pulsar on one folder; after the first start it keeps its ports."""

    def __init__(self, folder: Path, *, measured: bool = False) -> None:
        self.folder = folder
        self._jvm_options = _JVM_OPTIONS if measured else (*_JVM_OPTIONS, _QUICK_START)
        self.service_url = ""
        self.admin_url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns once it is healthy."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.service_url:
            self._configure(_free_port(), _free_port())
        self._output = (self.folder / "output").open("ab")
        self._process = subprocess.Popen(
            [
                *("java", *self._jvm_options, "-cp", PULSAR.class_path()),
                *("org.apache.pulsar.PulsarStandaloneStarter", "-c", self._settings_file),
                *("-nfw", "-nss", "-a", _HOST),
                *("--metadata-dir", self.folder / "md", "--bookkeeper-dir", self.folder / "bk"),
            ],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"Pulsar did not become healthy:\n{self.written()}")
            time.sleep(_PAUSE_SECONDS)

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # how Pulsar ends is not what is tried here
        finally:
            self.kill()

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        assert self._output is not None
        self._process.kill()
        self._process.wait()
        self._output.close()

    def written(self) -> str:
        """The end of what it has written, of all its starts."""
        lines = (self.folder / "output").read_text("utf-8", "replace").splitlines()
        return "\n".join(lines[-_LINES_MAX:])

    @property
    def _settings_file(self) -> Path:
        return self.folder / "standalone.conf"

    def _configure(self, port: int, admin_port: int) -> None:
        settings = _SETTINGS | {"brokerServicePort": str(port), "webServicePort": str(admin_port)}
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        self._settings_file.write_text("".join(lines), "utf-8")
        self.service_url = f"pulsar://{_HOST}:{port}"
        self.admin_url = f"http://{_HOST}:{admin_port}"

    def _is_healthy(self) -> bool:
        try:
            status, answer = ask_admin(self.admin_url, "GET", "/admin/v2/brokers/health")
        except OSError:
            return False
        return status == 200 and answer == "ok"


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind((_HOST, 0))
        port: int = taken.getsockname()[1]
    return port


def main() -> int:
    """Fetches it, for `make e2e-pulsar`: there, what a machine lacks is a failure."""
    reason = lacking()
    if reason is None:
        try:
            PULSAR.build()
        except BuildFailed as error:
            reason = str(error)
    if reason is not None:
        sys.stderr.write(f"magnetar: cannot fetch Apache Pulsar: {reason}\n")
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
