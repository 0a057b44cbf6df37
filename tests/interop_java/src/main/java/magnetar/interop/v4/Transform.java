package magnetar.interop.v4;

import java.util.ArrayList;
import java.util.List;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/**
 * Messages are consumed, and written to another topic in the transaction that acknowledges them.
 * Every second attempt is aborted, and what it took comes again: each is written once.
 */
final class Transform implements Scenario {
    private static final int COUNT = 24;
    private static final int AT_ONCE = 6;
    private static final int ATTEMPTS = 2 * COUNT / AT_ONCE;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String input = server.topic("input");
        String output = server.topic("output");
        List<String> values;
        try (Producer<String> producer = server.producer(input)) {
            values = Values.send(producer, null, "m", COUNT);
        }
        try (Consumer<String> consumer = server.consumer(input, "s", SubscriptionType.Shared);
                Producer<String> producer = server.producer(output)) {
            for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
                List<Message<String>> taken = new ArrayList<>();
                while (taken.size() < AT_ONCE) {
                    taken.add(consumer.receive());
                }
                Transaction transaction = server.transaction();
                for (Message<String> message : taken) {
                    producer.newMessage(transaction).value(message.getValue()).send();
                    consumer.acknowledgeAsync(message.getMessageId(), transaction);
                }
                if (attempt % 2 == 0) {
                    transaction.abort().get();
                } else {
                    transaction.commit().get();
                }
            }
            Values.nothing(consumer);
        }
        try (Consumer<String> consumer = server.consumer(input, "s", SubscriptionType.Shared)) {
            Values.nothing(consumer);
        }
        try (Consumer<String> consumer = server.consumer(output, "s", SubscriptionType.Shared)) {
            Values.inAnyOrder(consumer, values);
        }
    }
}
