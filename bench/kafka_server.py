"""One Kafka node on loopback, for whoever measures beside it: started from Maven's jars, and ended.

Owns: `KAFKA`, the project that names its version, and `kafka_server`. Broker and controller are one
process on a folder of its own. `synced` makes every append to every log an fsync of its own, those
of offsets and transactions included; stock settings leave it to the page cache.
"""

from __future__ import annotations

import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bench.report import ROOT
from magnetar.spark.pipeline.java import java_home
from tests.interop_java.maven import MavenProject

KAFKA: Final = MavenProject(ROOT / "bench" / "spark_kafka.xml", "kafka")
READY_SECONDS: Final = 60.0
STOP_SECONDS: Final = 20.0
JVM_OPTIONS: Final = ("-Xmx1G",)
# The second: a transaction that follows another at once would wait 20 ms for it to be over.
_SYNCED: Final = """
log.flush.interval.messages=1
add.partitions.to.txn.retry.backoff.ms=1
"""

_SERVER: Final = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={folder}
num.partitions=2
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


class KafkaProcess(NamedTuple):
    """A node that answers."""

    port: int
    pid: int


@contextmanager
def kafka_server(folder: Path, *, synced: bool) -> Iterator[KafkaProcess]:
    """A node on an empty folder; `KAFKA` must have been built."""
    folder.mkdir()
    port, controller = _free_port(), _free_port()
    config = folder / "server.properties"
    settings = _SERVER.format(port=port, controller=controller, folder=folder / "logs")
    config.write_text(settings + (_SYNCED if synced else ""))
    java = [str(java_home() / "bin" / "java"), *JVM_OPTIONS, "-cp", KAFKA.class_path()]
    cluster = uuid.uuid4().hex[:22]
    with (folder / "said").open("wb") as said:
        format_it = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(config)]
        subprocess.run([*java, *format_it], stdout=said, stderr=said, check=True)
        process = subprocess.Popen(
            [*java, "kafka.Kafka", str(config)], cwd=folder, stdout=said, stderr=said
        )
    try:
        _await(port, process)
        yield KafkaProcess(port, process.pid)
    finally:
        process.kill()
        process.wait(STOP_SECONDS)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as tried:
            tried.settimeout(1)
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise ConnectionError("Kafka did not start")
