package magnetar.interop.v4;

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
            Map.entry("abort", new Abort()),
            Map.entry("behind-an-open-one", new BehindOpen()),
            Map.entry("beside", new Beside()),
            Map.entry("commit", new Commit()),
            Map.entry("commit-on-partitions", new CommitOnPartitions()),
            Map.entry("conflict", new Conflict()),
            Map.entry("cumulative-acks", new CumulativeAcks()),
            Map.entry("cumulative-acks-conflict", new CumulativeAcksConflict()),
            Map.entry("delays", new Delays()),
            Map.entry("encryption", new Encryption()),
            Map.entry("expiry", new Expiry()),
            Map.entry("individual-acks", new IndividualAcks()),
            Map.entry("individual-acks-of-a-batch", new IndividualAcksOfBatch()),
            Map.entry("last-message", new LastMessage()),
            Map.entry("quotas", new Quotas()),
            Map.entry("restart", new Restart()),
            Map.entry("restart-of-acks", new RestartOfAcks()),
            Map.entry("restart-timeout", new RestartTimeout()),
            Map.entry("schema-rules", new SchemaRules()),
            Map.entry("timeout", new Timeout()),
            Map.entry("topic-limits", new TopicLimits()),
            Map.entry("transform", new Transform()));

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
