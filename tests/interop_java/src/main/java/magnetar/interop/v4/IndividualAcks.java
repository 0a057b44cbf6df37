package magnetar.interop.v4;

import java.util.List;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/** Messages acknowledged one by one in a transaction: an abort brings them back, a commit not. */
final class IndividualAcks implements Scenario {
    private static final int COUNT = 20;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("individual");
        List<String> even;
        List<String> odd;
        try (Producer<String> producer = server.producer(topic)) {
            even = Values.send(producer, null, "even", COUNT);
            odd = Values.send(producer, null, "odd", COUNT);
        }
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared)) {
            List<Message<String>> messages = Values.inAnyOrder(consumer, Values.all(even, odd));
            Transaction aborted = server.transaction();
            acknowledge(consumer, messages, even, aborted);
            Values.nothing(consumer);
            aborted.abort().get();
            messages = Values.inAnyOrder(consumer, even);
            Transaction committed = server.transaction();
            acknowledge(consumer, messages, even, committed);
            committed.commit().get();
            Values.nothing(consumer);
        }
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared)) {
            Values.inAnyOrder(consumer, odd);
        }
    }

    static void acknowledge(Consumer<String> consumer, List<Message<String>> messages,
            List<String> those, Transaction in) throws Exception {
        for (Message<String> message : messages) {
            if (those.contains(message.getValue())) {
                consumer.acknowledgeAsync(message.getMessageId(), in).get();
            }
        }
    }
}
