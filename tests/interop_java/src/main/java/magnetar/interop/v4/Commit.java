package magnetar.interop.v4;

import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/** What a transaction wrote to two topics is seen when it commits, not before. */
final class Commit implements Scenario {
    private static final int COUNT = 20;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        use(server, server.topic("commit"), server.topic("commit-too"));
    }

    static void use(Server server, String left, String right) throws Exception {
        try (Producer<String> single = server.producer(left);
                Producer<String> batching = server.producers(right).create();
                Consumer<String> first = server.consumer(left, "s", SubscriptionType.Shared);
                Consumer<String> second = server.consumer(right, "s", SubscriptionType.Failover)) {
            Transaction transaction = server.transaction();
            List<String> toLeft = Values.send(single, transaction, "left", COUNT);
            List<String> toRight = Values.sendTogether(batching, transaction, "right", COUNT);
            Values.nothing(first);
            Values.nothing(second);
            transaction.commit().get();
            Expect.equal(Transaction.State.COMMITTED, transaction.getState(), "after the commit");
            Values.inAnyOrder(first, toLeft);
            Values.inAnyOrder(second, toRight);
        }
    }
}
