"""The transactions that the batches of a pipeline were committed in, asked of the broker.

Owns: the questions, at most one per sink and second. It is for people who look: a broker that does
not answer leaves the figures without ids, and the pipeline alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from magnetar.errors import MagnetarError
from magnetar.spark.links import client_for
from magnetar.spark.options import Options, Use, parse
from magnetar.spark.pipeline.build import sink_options
from magnetar.spark.pipeline.file import MAGNETAR_FORMATS, Pipeline
from magnetar.spark.pipeline.progress import QueryState

_EVERY_SECONDS: Final = 1.0


class PipelineGroups:
    """The transaction groups of one pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._options: dict[str, Options] = {}
        # Only sinks of ours that write exactly once commit in groups.
        for name, sink in pipeline.sinks.items():
            if sink.format in MAGNETAR_FORMATS:
                options = parse(sink_options(pipeline, sink), Use.WRITE)
                if options["semantics"] == "exactly-once":
                    self._options[name] = options
        self._asked_at: dict[str, float] = {}

    def name_of(self, sink: str, progress: Mapping[str, Any]) -> str | None:
        """The group that a sink commits in; None: it has none."""
        # The name that the sink itself uses: the user's, or the id of the query.
        if sink not in self._options:
            return None
        return str(self._options[sink]["transactionalId"] or progress["id"])

    def ask(self, sink: str, state: QueryState) -> None:
        """Fill in the transactions of the last batch that the broker has committed."""
        now = time.monotonic()
        # No batch yet, or asked a moment ago: batches may end many times a second.
        if state.group is None or now - self._asked_at.get(sink, 0.0) < _EVERY_SECONDS:
            return
        self._asked_at[sink] = now
        try:
            status = client_for(self._options[sink]).group_status(state.group)
        # Older ids beside a newer batch would be wrong; none are shown.
        except MagnetarError:
            state.transactions = []
            return
        # As `magnetar txn` writes them.
        state.transactions = [f"{each.most}_{each.least}" for each in status.committed]
