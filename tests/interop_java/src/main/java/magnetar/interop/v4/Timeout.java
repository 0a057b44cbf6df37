package magnetar.interop.v4;

import java.time.Duration;
import java.util.List;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;
import org.apache.pulsar.client.api.transaction.TransactionCoordinatorClientException;

/**
 * A transaction that nobody ends is aborted when its time is up, whether its client is there or
 * not: what it acknowledged comes again, what it wrote does not, and what waited behind it comes.
 */
final class Timeout implements Scenario {
    private static final int COUNT = 10;
    private static final Duration SHORT = Duration.ofSeconds(2);

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("timeout");
        Transaction transaction = open(server, topic);
        isAborted(server, topic);
        Expect.equal(Transaction.State.TIME_OUT, transaction.getState(), "after its time");
        Expect.refused(TransactionCoordinatorClientException.InvalidTxnStatusException.class,
                "a late commit", () -> transaction.commit().get());
        String left = server.topic("timeout-left");
        try (Server gone = server.apart()) {
            open(gone, left);
        }
        isAborted(server, left);
    }

    private static Transaction open(Server server, String topic) throws Exception {
        try (Producer<String> producer = server.producer(topic);
                Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared)) {
            List<String> before = Values.send(producer, null, "before", COUNT);
            List<Message<String>> messages = Values.inOrder(consumer, before);
            Transaction transaction = server.transaction(SHORT);
            IndividualAcks.acknowledge(consumer, messages, before, transaction);
            Values.send(producer, transaction, "inside", COUNT);
            Values.send(producer, null, "after", COUNT);
            return transaction;
        }
    }

    private static void isAborted(Server server, String topic) throws Exception {
        for (String subscription : List.of("other", "s")) {
            try (Consumer<String> consumer =
                    server.consumer(topic, subscription, SubscriptionType.Shared)) {
                Values.inAnyOrder(consumer, expected());
            }
        }
    }

    private static List<String> expected() {
        return Stream.of("before", "after")
                .flatMap(stem -> IntStream.range(0, COUNT)
                        .mapToObj(number -> stem + "-" + number))
                .toList();
    }
}
