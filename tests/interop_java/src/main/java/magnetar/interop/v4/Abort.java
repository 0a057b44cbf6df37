package magnetar.interop.v4;

import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;
import org.apache.pulsar.client.api.transaction.TransactionCoordinatorClientException;

/** What an aborted transaction wrote is never seen, by those who wait nor by those who come. */
final class Abort implements Scenario {
    private static final int COUNT = 20;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("abort");
        List<String> seen;
        try (Producer<String> producer = server.producer(topic);
                Producer<String> batching = server.producers(topic).create();
                Consumer<String> consumer =
                        server.consumer(topic, "s", SubscriptionType.Exclusive)) {
            List<String> before = Values.send(producer, null, "before", COUNT);
            Transaction transaction = server.transaction();
            Values.send(producer, transaction, "aborted", COUNT);
            Values.sendTogether(batching, transaction, "aborted-too", COUNT);
            List<String> between = Values.send(producer, null, "between", COUNT);
            transaction.abort().get();
            Expect.equal(Transaction.State.ABORTED, transaction.getState(), "after the abort");
            Expect.refused(TransactionCoordinatorClientException.InvalidTxnStatusException.class,
                    "a commit after the abort", () -> transaction.commit().get());
            List<String> after = Values.send(producer, null, "after", COUNT);
            seen = Values.all(before, between, after);
            Values.inOrder(consumer, seen);
        }
        for (SubscriptionType type : SubscriptionType.values()) {
            try (Consumer<String> later = server.consumer(topic, "later-" + type, type)) {
                Values.inAnyOrder(later, seen);
            }
        }
        try (Reader<String> reader = server.reader(topic)) {
            Values.readToTheEnd(reader, seen);
        }
    }
}
