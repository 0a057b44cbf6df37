"""Pure: every option of the Spark source and sink, one row each.

Owns: `Use`, `Option` and `OPTIONS`, the table that the documents are checked against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, Final

from magnetar.spark.option_values import (
    count,
    instant,
    milliseconds,
    names,
    one_of,
    seconds,
    size,
    text,
    truth,
)


class Use(Flag):
    """The uses of a data source, and which of them an option is for."""

    STREAM = auto()
    BATCH = auto()
    WRITE = auto()
    READ = STREAM | BATCH
    ALL = STREAM | BATCH | WRITE


@dataclass(frozen=True, slots=True)
class Option:
    """One row."""

    name: str
    use: Use
    parse: Callable[[str], Any]
    default: str | None
    """As a user would write it; None: there is none."""
    doc: str
    aliases: tuple[str, ...] = ()
    is_secret: bool = False


# Aliases are the names that the connector pulsar-spark has, so that its queries run as they are.
_CONNECTION: Final = (
    Option("serviceUrl", Use.ALL, text, None, "Where the brokers are.", ("service.url",)),
    Option(
        # Everything is asked over the binary protocol; refusing it would break a query for nothing.
        "adminUrl",
        Use.ALL,
        text,
        None,
        "Not needed; taken for queries written for other connectors.",
        ("admin.url",),
    ),
    Option(
        "token",
        Use.ALL,
        text,
        None,
        "Who the query is, as a token (`token:` in front of it may stay).",
        ("pulsar.client.authParams",),
        is_secret=True,
    ),
    Option(
        "authPlugin",
        Use.ALL,
        text,
        None,
        "Taken if it names token authentication, the only one there is.",
        ("pulsar.client.authPluginClassName",),
    ),
    Option(
        "tlsTrustCertsFile",
        Use.ALL,
        text,
        None,
        "The authorities to trust; without it, those of the system.",
        ("pulsar.client.tlsTrustCertsFilePath",),
    ),
    Option("tlsCertificateFile", Use.ALL, text, None, "The certificate to show.", ()),
    Option("tlsKeyFile", Use.ALL, text, None, "The key of that certificate.", ()),
    Option(
        "tlsValidateHostname",
        Use.ALL,
        truth,
        "true",
        "Whether the certificate must be for the host that is asked.",
        ("pulsar.client.tlsHostnameVerificationEnable",),
    ),
    Option(
        "tlsAllowUntrusted",
        Use.ALL,
        truth,
        "false",
        "Take any certificate: for tests alone.",
        ("pulsar.client.tlsAllowInsecureConnection",),
    ),
    Option(
        "listenerName",
        Use.ALL,
        text,
        None,
        "Which of a broker's advertised addresses to use.",
        ("pulsar.client.listenerName",),
    ),
    Option(
        "operationTimeoutMs",
        Use.ALL,
        count,
        "30000",
        "What one request to a broker may take.",
        ("pulsar.client.operationTimeoutMs",),
    ),
    Option(
        "connectionTimeoutMs",
        Use.ALL,
        count,
        "10000",
        "What one connection may take to be made.",
        ("pulsar.client.connectionTimeoutMs",),
    ),
    Option(
        # Longer than a broker's restart: Spark ends a query at the first error of its driver.
        "retryTimeout",
        Use.ALL,
        seconds,
        "5m",
        "How long the driver tries again while brokers cannot be reached, before the query fails.",
    ),
)

_WHAT: Final = (
    Option("topic", Use.ALL, text, None, "The topic: `topic://`, `persistent://` or short."),
    Option("topics", Use.READ, names, None, "Several topics, with commas between.", ("subscribe",)),
    Option(
        "topicsPattern",
        Use.READ,
        text,
        None,
        "Every topic of a namespace whose name matches: `persistent://public/default/o.*`. Topics "
        "that appear later are read from their first message.",
        ("subscribePattern",),
    ),
)

# The end of a stream is `AvailableNow`'s to say, so ends are for batch reads alone.
_WHERE: Final = (
    Option(
        "startingOffsets",
        Use.READ,
        text,
        None,
        "`earliest`, `latest`, or JSON: an offset of this source, or a place per topic. Default: "
        "`latest` for streams, `earliest` for batches. Only for queries without a checkpoint.",
    ),
    Option(
        "startingTimestamp",
        Use.READ,
        instant,
        None,
        "Begin with the first message published at or after it: milliseconds or ISO 8601.",
        ("startingTime",),
    ),
    Option(
        "startingTimestampStrategy",
        Use.READ,
        one_of("error", "latest"),
        "latest",
        "Nothing was published since then: fail, or begin with what comes.",
        ("startingOffsetsByTimestampStrategy",),
    ),
    Option(
        "endingOffsets",
        Use.BATCH,
        text,
        "latest",
        "`latest` or JSON, as for startingOffsets; found out when the read is planned.",
    ),
    Option(
        "endingTimestamp",
        Use.BATCH,
        instant,
        None,
        "End before the first message published at or after it.",
        ("endingTime",),
    ),
)

# The limits of Spark's Kafka source, under names that say messages: an offset here is no number.
_HOW_MUCH: Final = (
    Option(
        "maxMessagesPerTrigger",
        Use.STREAM,
        count,
        None,
        "The most messages of one micro-batch, exactly.",
        ("maxOffsetsPerTrigger",),
    ),
    Option(
        "maxBytesPerTrigger",
        Use.STREAM,
        size,
        None,
        "About the most stored bytes of one micro-batch; at least one entry of each segment.",
    ),
    Option(
        "minMessagesPerTrigger",
        Use.STREAM,
        count,
        None,
        "Wait until there are so many, or maxTriggerDelay is over.",
        ("minOffsetsPerTrigger",),
    ),
    Option(
        # The default is that of Spark's Kafka source.
        "maxTriggerDelay",
        Use.STREAM,
        seconds,
        "15m",
        "The longest wait for minMessagesPerTrigger.",
    ),
    Option(
        "minPartitions",
        Use.READ,
        count,
        None,
        "Cut segments so that there are about so many tasks. No order in a batch then.",
    ),
    Option(
        "maxRecordsPerPartition",
        Use.READ,
        count,
        None,
        "Cut segments so that a task has about so many messages at most. No order in a batch then.",
    ),
    Option(
        # Spark asks every few milliseconds otherwise; the broker answers at once when there is
        # news.
        "pollWaitMs",
        Use.STREAM,
        milliseconds,
        "100",
        "How long an idle query waits at the broker for news before it asks again.",
    ),
)

# The defaults are the strict ones: a loss ends the query, and only committed messages are shown.
_RULES: Final = (
    Option(
        "failOnDataLoss",
        Use.READ,
        truth,
        "true",
        "Messages that were not read are gone: fail, or warn and go on behind the gap.",
    ),
    Option(
        "readIsolation",
        Use.READ,
        one_of("committed", "uncommitted"),
        "committed",
        "`uncommitted` shows messages of open and aborted transactions too: to find faults only.",
    ),
    Option(
        # The checkpoint decides what is read; this one only makes the query visible to retention.
        "subscription",
        Use.STREAM,
        text,
        None,
        "The durable subscription that follows the query: brokers keep what is unread, and tools "
        "show the backlog. Default: `spark` for one topic, else `spark-` and a hash of what is "
        "named; a pipeline has names of its own. `none`: nothing is kept for the query.",
        ("predefinedSubscription",),
    ),
    Option(
        "subscriptionInitialPosition",
        Use.STREAM,
        one_of("earliest", "latest"),
        "earliest",
        "Where a subscription that is new begins on segments that the query has not begun.",
    ),
)

# `auto` and the rest of this group decide the schema of the data frame, so a query that is
# restarted with other values may not fit its state any more.
_COLUMNS: Final = (
    Option(
        "valueFormat",
        Use.ALL,
        one_of("auto", "bytes", "string", "json", "avro"),
        "auto",
        "`bytes`, `string`: one column `value`. `json`, `avro`: a column for each field of the "
        "topic's schema; a write gives a topic without one the schema of its columns. `auto`: what "
        "the topic's schema says, bytes if it has none.",
    ),
    Option(
        "includeMetadata",
        Use.READ,
        truth,
        "true",
        "Columns about the message: segment, messageId, publishTime, producerName and so on.",
    ),
    Option("includeProperties", Use.READ, truth, "true", "The column `properties`."),
    Option(
        "includeKeyBytes",
        Use.READ,
        truth,
        "false",
        "The column `keyBytes`, for keys that are no text.",
    ),
    Option(
        "columnStyle",
        Use.READ,
        one_of("magnetar", "pulsar-spark"),
        "magnetar",
        "`pulsar-spark`: the names that that connector uses, such as `__key`.",
    ),
    Option(
        "corruptRecord",
        Use.READ,
        one_of("fail", "null"),
        "fail",
        "A value that its schema cannot read: fail, or NULL fields and the reason in `_error`.",
    ),
    Option(
        # Off by default: Spark refuses a reader with `pushFilters` unless its own setting is on.
        "pushdown",
        Use.BATCH,
        truth,
        "false",
        "Let filters on publishTime, segment and key spare reading; needs the Spark setting "
        "spark.sql.python.filterPushdown.enabled=true.",
    ),
)

# Exactly once is the default; what is in this group says under which name commits are remembered.
_COMMITS: Final = (
    Option(
        "semantics",
        Use.WRITE,
        one_of("exactly-once", "at-least-once"),
        "exactly-once",
        "`at-least-once` writes without transactions: rows of a batch that is run again are there "
        "twice.",
    ),
    Option(
        "commitMode",
        Use.WRITE,
        one_of("auto", "group", "single"),
        "auto",
        "How a batch is committed: `group`, a transaction per task and one decision (Magnetar); "
        "`single`, one transaction for all tasks (any Pulsar); `auto`, what the server has.",
    ),
    Option(
        "transactionalId",
        Use.WRITE,
        text,
        None,
        "The name under which the server remembers what is committed. Without it, the id of the "
        "query, which is in its checkpoint.",
    ),
    Option(
        # An open transaction holds back every reader of the topic: no longer than a slow batch
        # needs.
        "transactionTimeout",
        Use.WRITE,
        seconds,
        "10m",
        "What a batch may take from its first row to its commit; later it is aborted, and fails.",
    ),
    Option(
        "repeatedRows",
        Use.WRITE,
        one_of("check", "ignore"),
        "check",
        "A batch that is run again must have as many rows as it was committed with; `ignore` is "
        "for queries that give other rows for the same input.",
    ),
    Option(
        "commitTopic",
        Use.WRITE,
        text,
        "persistent://public/default/magnetar-spark-commits",
        "With `single`: commits are noted in a topic of this name and the transactional id.",
    ),
    Option(
        # The names and meaning are those of Delta Lake's idempotent writes.
        "txnAppId",
        Use.WRITE,
        text,
        None,
        "Batch writes: a name for a row of writes; together with txnVersion it makes a write that "
        "is repeated write nothing.",
    ),
    Option(
        "txnVersion",
        Use.WRITE,
        # Any whole number from 0 on, which is what this parser takes.
        milliseconds,
        None,
        "Batch writes: the number of this write, from 0, ascending for a txnAppId.",
    ),
    Option(
        "txnGeneration",
        Use.WRITE,
        text,
        None,
        "Batch writes: what txnVersion is counted by, such as the id of a query. Another one is "
        "refused, since its versions mean other rows.",
    ),
    Option(
        "deadLetterTopic",
        Use.WRITE,
        text,
        None,
        "Rows that cannot be written go here, in the same transaction. Without it they fail the "
        "batch.",
    ),
)

# For each task and topic: Spark runs many tasks, and memory is theirs times this.
_PRODUCERS: Final = (
    Option(
        "sendTimeoutMs",
        Use.WRITE,
        count,
        "30000",
        "How long a message may wait for its receipt before the task fails.",
        ("pulsar.producer.sendTimeoutMs",),
    ),
    Option(
        "maxPendingMessages",
        Use.WRITE,
        count,
        "10000",
        "Messages of a task and topic that may wait for their receipts.",
        ("pulsar.producer.maxPendingMessages",),
    ),
    Option(
        "batchingEnabled",
        Use.WRITE,
        truth,
        "true",
        "Whether messages are stored many to an entry.",
        ("pulsar.producer.batchingEnabled",),
    ),
    Option(
        "batchingMaxMessages",
        Use.WRITE,
        count,
        "1000",
        "The most messages of an entry.",
        ("pulsar.producer.batchingMaxMessages",),
    ),
    Option(
        "batchingMaxBytes",
        Use.WRITE,
        size,
        "128k",
        "About the most bytes of an entry.",
        ("pulsar.producer.batchingMaxBytes",),
    ),
    Option(
        "compression",
        Use.WRITE,
        one_of("none", "lz4", "zlib", "zstd", "snappy"),
        "none",
        "How entries are compressed.",
        ("pulsar.producer.compressionType",),
    ),
    Option(
        "chunking",
        Use.WRITE,
        truth,
        "false",
        "Cut messages that are larger than the server takes.",
        ("pulsar.producer.chunkingEnabled",),
    ),
)

OPTIONS: Final[tuple[Option, ...]] = (
    *_CONNECTION,
    *_WHAT,
    *_WHERE,
    *_HOW_MUCH,
    *_RULES,
    *_COLUMNS,
    *_COMMITS,
    *_PRODUCERS,
)
