"""Where topics are: LOOKUP and PARTITIONED_METADATA.

There is one broker, so every topic is here. As long as nobody set another address, clients are told
to go on using the one with which they came: that works through any mapping of ports and names.
"""

from __future__ import annotations

from magnetar.errors import NotAllowed, ServiceNotReady
from magnetar.model.names import Domain, TopicName
from magnetar.server.authority import Action
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
    if name.domain is Domain.TOPIC:
        raise NotAllowed(f"{name} is a scalable topic", hint="look it up as such")
    await session.context.topics.namespaces.policies(name.namespace)  # refused if there is none
    session.write(
        command(
            "LOOKUP_RESPONSE",
            request_id=body.request_id,
            response=pb.CommandLookupTopicResponse.Connect,
            brokerServiceUrl=session.context.service_url,
            authoritative=True,
            proxy_through_service_url=not session.context.config.advertised_host,
        )
    )


async def partitioned_metadata(session: Session, body: pb.CommandPartitionedTopicMetadata) -> None:
    name = TopicName.parse(body.topic)
    session.authorise(Action.LOOK_UP, name)
    create = body.metadata_auto_creation_enabled
    partitions = await session.context.topics.partitions(name, create=create)
    session.write(
        command(
            "PARTITIONED_METADATA_RESPONSE",
            request_id=body.request_id,
            response=pb.CommandPartitionedTopicMetadataResponse.Success,
            partitions=partitions,
        )
    )
