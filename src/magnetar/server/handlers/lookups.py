"""Lookups, which tell clients where topics are: LOOKUP and PARTITIONED_METADATA.

Every topic is here, unless several brokers share their storage and another one has it. As long as
nobody set another address, clients are told to go on using the one with which they came: that works
through any mapping of ports and names.
"""

from __future__ import annotations

from magnetar.errors import ServiceNotReady
from magnetar.model.names import TopicName
from magnetar.server.authority import Action
from magnetar.server.context import broker_urls, coordinator_count, lookup_urls
from magnetar.server.handlers.names import may_create, used
from magnetar.server.session import Session
from magnetar.wire.frames import command
from magnetar.wire.pb import pulsar_pb2 as pb


async def lookup(session: Session, body: pb.CommandLookupTopic) -> None:
    name = TopicName.parse(body.topic)
    session.authorise(Action.LOOK_UP, name)
    if body.advertised_listener_name:
        # Clients recognise this text.
        listener = body.advertised_listener_name
        raise ServiceNotReady(f"the broker do not have {listener} listener", hint="")
    context = session.context
    urls = await lookup_urls(context, name)
    is_here = urls == broker_urls(context)
    fields = {} if urls.tls is None else {"brokerServiceUrlTls": urls.tls}
    session.write(
        command(
            "LOOKUP_RESPONSE",
            request_id=body.request_id,
            response=pb.CommandLookupTopicResponse.Connect,
            brokerServiceUrl=urls.plain,
            authoritative=True,
            # Clients keep the address that they used: port mappings and proxies stay transparent.
            proxy_through_service_url=is_here and not context.config.advertised_host,
            **fields,
        )
    )


async def partitioned_metadata(session: Session, body: pb.CommandPartitionedTopicMetadata) -> None:
    name = TopicName.parse(body.topic)
    session.authorise(Action.LOOK_UP, name)
    context = session.context
    # v4 clients count coordinators by the partitions of a topic that is not stored.
    partitions = coordinator_count(context, name)
    if name.domain.is_scalable:
        context.check_scalable()
        partitions = 0
    elif partitions is None:
        # PIP-344: clients that only look say so, and must not create anything.
        create = body.metadata_auto_creation_enabled and may_create(context, name)
        with used(context, name):
            partitions = await context.topics.partitions(name, create=create)
    session.write(
        command(
            "PARTITIONED_METADATA_RESPONSE",
            request_id=body.request_id,
            response=pb.CommandPartitionedTopicMetadataResponse.Success,
            partitions=partitions,
        )
    )
