"""The metrics of a pipeline for Prometheus.

Owns: the metrics of a run and the small server that shows them. The label `sink` takes the names of
the file's sinks, which are few and do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final

from magnetar.errors import ConfigError
from magnetar.runtime.metrics import CONTENT_TYPE, counter, gauge, histogram, render
from magnetar.spark.pipeline.progress import QueryState

_SINK: Final = ("sink",)
_BATCHES: Final = counter("magnetar_pipeline_batches_total", "Batches committed.", _SINK)
_ROWS: Final = counter("magnetar_pipeline_input_rows_total", "Rows read by batches.", _SINK)
_RATE: Final = gauge(
    "magnetar_pipeline_rows_per_second", "Rows per second of the last batch.", _SINK
)
_LAG: Final = gauge(
    "magnetar_pipeline_lag_messages", "Messages in the sources behind the last batch.", _SINK
)
_LAG_SECONDS: Final = gauge(
    "magnetar_pipeline_lag_seconds", "Age of the oldest message behind the last batch.", _SINK
)
_LAST_BATCH: Final = gauge("magnetar_pipeline_last_batch", "Number of the last batch.", _SINK)
_SECONDS: Final = histogram(
    "magnetar_pipeline_batch_seconds",
    "How long a batch took.",
    _SINK,
    buckets=(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0),
)

_LOOPBACK: Final = "127.0.0.1"


def count(sink: str, state: QueryState, batches: int, rows: int) -> None:
    """Count so many batches and rows more; `state` tells of the newest."""
    _BATCHES.labels(sink).inc(batches)
    _ROWS.labels(sink).inc(rows)
    _RATE.labels(sink).set(state.rows_per_second)
    _LAST_BATCH.labels(sink).set(state.batch)
    _LAG.labels(sink).set(state.lag_messages or 0)
    _LAG_SECONDS.labels(sink).set(state.lag_seconds or 0)
    # A query that waits reports too; it has not run a batch that could be timed.
    if batches:
        _SECONDS.labels(sink).observe(state.batch_ms / 1000)


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path.partition("?")[0] in ("/", "/metrics")
        text = render() if found else b""
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """A line for every scrape tells nobody anything."""


@contextmanager
def served(port: int | None) -> Iterator[str | None]:
    """Show the metrics while the block runs; the URL, or None without a port."""
    if port is None:
        yield None
        return
    try:
        server = ThreadingHTTPServer((_LOOPBACK, port), _Page)
    except OSError as error:
        raise ConfigError(f"metrics_port: port {port} cannot be used: {error}") from error
    # A scraper that keeps its connection open must not hold up the end of the run.
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, name="pipeline-metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{_LOOPBACK}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
