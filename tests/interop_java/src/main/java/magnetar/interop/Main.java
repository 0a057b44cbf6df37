package magnetar.interop;

import java.util.Arrays;
import java.util.List;
import java.util.Map;
import magnetar.interop.common.Conversation;

/**
 * Runs scenarios against one server: `Main SERVICE_URL ADMIN_URL [SCENARIO...]`, or as the input
 * tells. The code is 1 if one failed.
 */
public final class Main {
    private static final Map<String, Scenario> SCENARIOS = Map.ofEntries(
            Map.entry("auto-creation", new AutoCreation()),
            Map.entry("byte-forms", new ByteForms()),
            Map.entry("checkpoint-group", new CheckpointGroup()),
            Map.entry("checkpoint-resume", new CheckpointResume()),
            Map.entry("deduplication", new Deduplication()),
            Map.entry("deduplication-across-split", new DeduplicationAcrossSplit()),
            Map.entry("delays", new Delays()),
            Map.entry("encryption", new Encryption()),
            Map.entry("expiry", new Expiry()),
            Map.entry("migration", new Migration()),
            Map.entry("migrated-stream", new MigratedStream()),
            Map.entry("namespace-queue", new NamespaceQueue()),
            Map.entry("namespace-stream", new NamespaceStream()),
            Map.entry("queue", new Queue()),
            Map.entry("queue-at-latest", new QueueAtLatest()),
            Map.entry("queue-redelivery", new QueueRedelivery()),
            Map.entry("quotas", new Quotas()),
            Map.entry("regular-topic", new RegularTopic()),
            Map.entry("stream", new Stream()),
            Map.entry("stream-replay", new StreamReplay()),
            Map.entry("stream-split-merge", new StreamSplitMerge()),
            Map.entry("streams-auto-split", new StreamsAutoSplit()),
            Map.entry("streams-share", new StreamsShare()),
            Map.entry("transaction-abort", new TransactionAbort()),
            Map.entry("transaction-acks-conflict", new TransactionAcksConflict()),
            Map.entry("transaction-acks-of-a-batch", new TransactionAcksOfBatch()),
            Map.entry("transaction-acks-of-a-stream", new TransactionAcksOfStream()),
            Map.entry("transaction-acks-of-subscriptions", new TransactionAcksOfSubscriptions()),
            Map.entry("transaction-behind-an-open-one", new TransactionBehindOpen()),
            Map.entry("transaction-beside-another-client", new TransactionBesideV4()),
            Map.entry("transaction-commit", new TransactionCommit()),
            Map.entry("transaction-on-regular-topics", new TransactionOnRegular()),
            Map.entry("transaction-order", new TransactionOrder()),
            Map.entry("transaction-restart", new TransactionRestart()),
            Map.entry("transaction-restart-of-acks", new TransactionRestartOfAcks()),
            Map.entry("transaction-restart-timeout", new TransactionRestartTimeout()),
            Map.entry("transaction-split", new TransactionSplit()),
            Map.entry("transaction-split-amid-sends", new TransactionSplitAmidSends()),
            Map.entry("transaction-split-merge-abort", new TransactionSplitMergeAbort()),
            Map.entry("transaction-split-under-load", new TransactionSplitUnderLoad()),
            Map.entry("transaction-timeout", new TransactionTimeout()),
            Map.entry("transaction-transform", new TransactionTransform()),
            Map.entry("transaction-two-topics", new TransactionTwoTopics()),
            Map.entry("transactions-interleaved", new TransactionsInterleaved()));

    private Main() {
    }

    public static void main(String[] arguments) throws Exception {
        boolean passed;
        try (Server server = new Server(arguments[0], arguments[1])) {
            List<String> names = Arrays.asList(arguments).subList(2, arguments.length);
            passed = new Conversation<>(SCENARIOS, server).run(names);
        }
        System.out.flush();
        // A scenario that hangs must not keep the process.
        Runtime.getRuntime().halt(passed ? 0 : 1);
    }
}
