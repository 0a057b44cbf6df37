"""The table of handlers: all commands that a client may send, and who does what.

Owns: `HANDLERS`. Those at once run in frame order and never wait; requests run as tasks.
"""

from __future__ import annotations

from typing import Final

from magnetar.server.handlers import (
    connecting,
    consuming,
    lookups,
    producing,
    scalable,
    schemas,
    topic_lists,
    transactions,
)
from magnetar.server.handlers.ranges import cursors, news, ranges
from magnetar.server.session import Handlers
from magnetar.wire.pb import pulsar_pb2 as pb

_T = pb.BaseCommand

# At once: what has no answer, must be applied in frame order (acks before a redelivery, END_TXN
# behind the acks of its transaction), or mostly needs no task (beginnings of transactions, topics
# that are added to them: those that have to ask somebody go on as requests).
HANDLERS: Final = Handlers(
    at_once={
        _T.CONNECT: connecting.connect,
        _T.AUTH_RESPONSE: connecting.auth_response,
        _T.PING: connecting.ping,
        _T.PONG: connecting.pong,
        _T.FLOW: consuming.flow,
        _T.ACK: consuming.ack,
        _T.NEW_TXN: transactions.begin,
        _T.ADD_PARTITION_TO_TXN: transactions.add_partitions,
        _T.END_TXN: transactions.end,
        _T.REDELIVER_UNACKNOWLEDGED_MESSAGES: consuming.redeliver,
    },
    # One task each. A command that is in neither list is refused as not supported.
    requests={
        _T.PRODUCER: producing.producer,
        _T.CLOSE_PRODUCER: producing.close_producer,
        _T.SUBSCRIBE: consuming.subscribe,
        _T.CLOSE_CONSUMER: consuming.close_consumer,
        _T.UNSUBSCRIBE: consuming.unsubscribe,
        _T.SEEK: consuming.seek,
        _T.GET_LAST_MESSAGE_ID: consuming.get_last_message_id,
        _T.CONSUMER_STATS: consuming.consumer_stats,
        _T.LOOKUP: lookups.lookup,
        _T.PARTITIONED_METADATA: lookups.partitioned_metadata,
        _T.GET_TOPICS_OF_NAMESPACE: topic_lists.get_topics,
        _T.WATCH_TOPIC_LIST: topic_lists.watch,
        _T.WATCH_TOPIC_LIST_CLOSE: topic_lists.close_watch,
        _T.GET_SCHEMA: schemas.get_schema,
        _T.GET_OR_CREATE_SCHEMA: schemas.get_or_create_schema,
        _T.TC_CLIENT_CONNECT_REQUEST: transactions.connect,
        _T.ADD_SUBSCRIPTION_TO_TXN: transactions.add_subscriptions,
        _T.END_TXN_ON_PARTITION: transactions.end_on_partition,
        _T.END_TXN_ON_SUBSCRIPTION: transactions.end_on_subscription,
        _T.WATCH_TC_ASSIGNMENTS: transactions.watch,
        _T.WATCH_TC_ASSIGNMENTS_CLOSE: transactions.close_watch,
        _T.OPEN_GROUP: transactions.open_group,
        _T.COMMIT_GROUP: transactions.commit_group,
        _T.GROUP_STATUS: transactions.group_status,
        _T.RANGE_LAYOUT: ranges.layout,
        _T.RANGE_STATES: ranges.states,
        _T.RANGE_READ: ranges.read,
        _T.RANGE_NEWS: news.news,
        _T.RANGE_COUNTS: ranges.counts,
        _T.RANGE_CUT: ranges.cut,
        _T.RANGE_PIECES: ranges.pieces,
        _T.RANGE_AT_TIME: ranges.at_time,
        _T.RANGE_MOVE: cursors.move,
        _T.SCALABLE_TOPIC_LOOKUP: scalable.watch_layout,
        _T.SCALABLE_TOPIC_CLOSE: scalable.close_layout,
        _T.SCALABLE_TOPIC_SUBSCRIBE: scalable.subscribe,
        _T.SCALABLE_TOPIC_UNSUBSCRIBE: scalable.unsubscribe,
        _T.WATCH_SCALABLE_TOPICS: scalable.watch_topics,
        _T.WATCH_SCALABLE_TOPICS_CLOSE: scalable.close_topics,
    },
    # Answers in these can be megabytes for a request of a few bytes: one at a time per connection.
    large=frozenset(
        {_T.GET_TOPICS_OF_NAMESPACE, _T.WATCH_TOPIC_LIST, _T.GET_SCHEMA, _T.RANGE_READ}
    ),
)
