package magnetar.interop;

import java.util.ArrayList;
import java.util.List;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** Transactions on two subscriptions, the name of one the beginning of the other's. */
final class TransactionAcksOfSubscriptions implements Scenario {
    private static final int COUNT = 12;
    private static final long ANSWERED_MILLIS = 300;
    private static final List<String> NAMES = List.of("job", "job-retry");

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("transaction-subscriptions"), 1);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic)) {
            sent.keyed(producer, COUNT);
        }
        for (boolean commits : new boolean[] {false, true}) {
            Transaction transaction = server.transaction();
            for (String name : NAMES) {
                acknowledgeAll(server, topic, name, sent, transaction);
            }
            if (commits) {
                transaction.commit();
            } else {
                transaction.abort();
            }
        }
        for (String name : NAMES) {
            try (QueueConsumer<String> consumer = server.queues(name).topic(topic).subscribe()) {
                Received.nothing(consumer::receive);
            }
        }
        try (QueueConsumer<String> other = server.queues("jo").topic(topic).subscribe()) {
            new Received().takeAll(other::receive, sent.values(),
                    message -> other.acknowledge(message.id()));
        }
    }

    /** Half of the messages in a transaction of its own first, which is aborted. */
    private static void acknowledgeAll(
            Server server, String topic, String name, Sent sent, Transaction transaction)
            throws Exception {
        try (QueueConsumer<String> consumer = server.queues(name).topic(topic).subscribe()) {
            List<Message<String>> taken = new ArrayList<>();
            new Received().takeAll(consumer::receive, sent.values(), taken::add);
            Transaction aborted = server.transaction();
            for (Message<String> message : taken.subList(0, COUNT / 2)) {
                consumer.acknowledge(message.id(), aborted);
            }
            aborted.abort();
            for (Message<String> message : taken) {
                consumer.acknowledge(message.id(), transaction);
            }
            // Before the consumer goes, this client waits for no acknowledgement.
            Thread.sleep(ANSWERED_MILLIS);
        }
    }
}
