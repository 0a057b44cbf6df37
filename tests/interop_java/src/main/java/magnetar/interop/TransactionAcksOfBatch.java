package magnetar.interop;

import java.util.List;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** A transaction acknowledges some messages of each batch; the others of the batch come again. */
final class TransactionAcksOfBatch implements Scenario {
    private static final int COUNT = 40;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("transaction-batch"), 1);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producers(topic).create()) {
            sent.batched(producer, COUNT);
        }
        acknowledgeThird(server, topic, 0, sent.values(), true);
        List<String> left = without(sent.values(), 0);
        acknowledgeThird(server, topic, 1, left, false);
        acknowledgeThird(server, topic, 1, left, true);
        left = without(left, 1);
        acknowledgeThird(server, topic, 2, left, true);
        try (QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            Received.nothing(consumer::receive);
        }
    }

    /** A new consumer is given what is left, and acknowledges a third of the topic. */
    private static void acknowledgeThird(
            Server server, String topic, int third, List<String> left, boolean commits)
            throws Exception {
        Transaction transaction = server.transaction();
        try (QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            new Received().takeAll(consumer::receive, left, message -> {
                if (thirdOf(message.value()) == third) {
                    consumer.acknowledge(message.id(), transaction);
                }
            });
            if (commits) {
                transaction.commit();
            } else {
                transaction.abort();
            }
        }
    }

    private static List<String> without(List<String> values, int third) {
        return values.stream().filter(value -> thirdOf(value) != third).toList();
    }

    private static int thirdOf(String value) {
        return Integer.parseInt(value.split("/")[1]) % 3;
    }
}
