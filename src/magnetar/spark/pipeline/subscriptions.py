"""The subscriptions by which brokers keep what the queries of a pipeline have not read.

Owns: `held`, which there are, and `topics_of`, where they are.

Invariants:
1. Each sink is a query of its own, and may be behind the others: it has a subscription for each of
   its sources, so that none of them moves what another one has not read.
2. Names come from the file alone: a run, `status` and `delete` agree on them.
"""

from __future__ import annotations

from msgspec import Struct

from magnetar.client.client import Client as AsyncClient
from magnetar.spark.links import client_for
from magnetar.spark.options import Use, parse
from magnetar.spark.pipeline.build import source_options, sources_of
from magnetar.spark.pipeline.file import MAGNETAR_FORMATS, Pipeline
from magnetar.spark.source.watched_topics import Watched, names_of, subscription_of


class Held(Struct, frozen=True, kw_only=True):
    """One subscription."""

    sink: str
    source: str
    subscription: str
    topics: str
    """As the file says it: names, or a pattern."""


def held(pipeline: Pipeline) -> list[Held]:
    """Every subscription that the pipeline holds while it exists."""
    found = []
    for sink, each in pipeline.sinks.items():
        for source in sources_of(pipeline, pipeline.input_of(each)):
            if pipeline.sources[source].format not in MAGNETAR_FORMATS:
                continue
            options = parse(source_options(pipeline, source, sink=sink), Use.STREAM)
            name = subscription_of(options)
            # The user wants none.
            if name is None:
                continue
            names = names_of(options)
            topics = options["topicsPattern"] if names is None else ", ".join(names)
            found.append(Held(sink=sink, source=source, subscription=name, topics=topics))
    return found


def topics_of(pipeline: Pipeline, each: Held) -> tuple[str, ...]:
    """The topics that have it; a broker is asked only for those of a pattern."""
    options = parse(source_options(pipeline, each.source, sink=each.sink), Use.STREAM)
    names = names_of(options)
    if names is not None:
        return names

    async def listed(client: AsyncClient) -> tuple[str, ...]:
        return await Watched(client, options).names()

    return client_for(options).run(listed)
