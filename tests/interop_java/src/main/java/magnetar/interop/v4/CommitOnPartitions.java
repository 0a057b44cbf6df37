package magnetar.interop.v4;

import java.util.List;

/** A commit over topics with partitions. */
final class CommitOnPartitions implements Scenario {
    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        Commit.use(server, server.partitioned("commit", 3), server.partitioned("commit-too", 2));
    }
}
