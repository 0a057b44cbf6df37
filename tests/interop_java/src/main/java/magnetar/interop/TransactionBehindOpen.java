package magnetar.interop;

import java.util.List;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** Plain messages behind those of an open transaction wait for its end; then all come, in order. */
final class TransactionBehindOpen implements Scenario {
    private static final int COUNT = 16;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        use(server, true);
        use(server, false);
    }

    private static void use(Server server, boolean commits) throws Exception {
        String topic = server.create(server.freshName("transaction-behind"), 1);
        Sent sent = new Sent();
        Received received = new Received();
        try (Producer<String> producer = server.producer(topic);
                StreamConsumer<String> consumer = server.streams("s").topic(topic).subscribe()) {
            Received.Use acknowledge = message -> consumer.acknowledgeCumulative(message.id());
            sent.keyed(producer, COUNT);
            Transaction transaction = server.transaction();
            List<String> inside = sent.in(transaction, producer, COUNT);
            received.takeAll(consumer::receive, sent.values(), acknowledge);
            sent.keyed(producer, COUNT);
            Received.nothing(consumer::receive);
            if (commits) {
                transaction.commit();
                sent.committed(inside);
            } else {
                transaction.abort();
            }
            received.takeAll(consumer::receive, sent.values(), acknowledge);
        }
        received.keepTheOrderOfEachKey();
    }
}
