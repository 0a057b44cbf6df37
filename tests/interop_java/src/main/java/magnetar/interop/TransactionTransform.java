package magnetar.interop;

import java.util.ArrayList;
import java.util.List;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/**
 * Messages are consumed, and written to another topic in the transaction that acknowledges them.
 * Every second attempt is aborted, and what it took comes again: each is written once.
 */
final class TransactionTransform implements Scenario {
    private static final int COUNT = 60;
    private static final int AT_ONCE = 7;
    private static final int ATTEMPTS_MAX = 2 * COUNT;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String input = server.create(server.freshName("transaction-input"), 2);
        String output = server.create(server.freshName("transaction-output"), 2);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(input)) {
            sent.keyed(producer, COUNT);
        }
        int done = 0;
        try (QueueConsumer<String> consumer = server.queues("q").topic(input).subscribe();
                Producer<String> producer = server.producer(output)) {
            for (int attempt = 0; done < COUNT && attempt < ATTEMPTS_MAX; attempt++) {
                List<Message<String>> taken = new ArrayList<>();
                new Received().take(consumer::receive, Math.min(AT_ONCE, COUNT - done), taken::add);
                Transaction transaction = server.transaction();
                for (Message<String> message : taken) {
                    producer.newMessage()
                            .key(message.key().orElseThrow())
                            .value(message.value())
                            .transaction(transaction)
                            .send();
                    consumer.acknowledge(message.id(), transaction);
                }
                if (attempt % 2 == 0) {
                    transaction.abort();
                } else {
                    transaction.commit();
                    done += taken.size();
                }
            }
            Received.nothing(consumer::receive);
        }
        try (QueueConsumer<String> consumer = server.queues("q").topic(input).subscribe()) {
            Received.nothing(consumer::receive);
        }
        try (QueueConsumer<String> consumer = server.queues("q").topic(output).subscribe()) {
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }
}
