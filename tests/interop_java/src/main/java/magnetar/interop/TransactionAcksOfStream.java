package magnetar.interop;

import java.util.ArrayList;
import java.util.List;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/**
 * A stream consumer of three segments acknowledges each message in a transaction of its own. The
 * client names all segments every time, also those where nothing is new: that is no conflict.
 */
final class TransactionAcksOfStream implements Scenario {
    private static final int SEGMENTS = 3;
    private static final int COUNT = 30;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("transaction-stream"), SEGMENTS);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic)) {
            sent.keyed(producer, COUNT);
        }
        List<Message<String>> taken = new ArrayList<>();
        try (StreamConsumer<String> consumer = consumer(server, topic)) {
            new Received().takeAll(consumer::receive, sent.values(), taken::add);
            Transaction aborted = server.transaction();
            consumer.acknowledgeCumulative(taken.get(COUNT - 1).id(), aborted);
            aborted.abort();
        }
        taken.clear();
        try (StreamConsumer<String> consumer = consumer(server, topic)) {
            Received received = new Received();
            received.takeAll(consumer::receive, sent.values(), taken::add);
            received.keepTheOrderOfEachKey();
            for (Message<String> message : taken) {
                Transaction transaction = server.transaction();
                consumer.acknowledgeCumulative(message.id(), transaction);
                transaction.commit();
            }
        }
        try (StreamConsumer<String> consumer = consumer(server, topic);
                Producer<String> producer = server.producer(topic)) {
            Sent later = new Sent().keyed(producer, COUNT);
            new Received().takeAll(consumer::receive, later.values(), message -> { });
        }
    }

    private static StreamConsumer<String> consumer(Server server, String topic) throws Exception {
        return server.streams("s").topic(topic).consumerName("one").subscribe();
    }
}
