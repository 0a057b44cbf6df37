package magnetar.interop.v4;

import java.util.List;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/** Messages acknowledged up to one in a transaction: they are done only when it commits. */
final class CumulativeAcks implements Scenario {
    private static final int COUNT = 20;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        use(server, SubscriptionType.Exclusive, false);
        use(server, SubscriptionType.Failover, true);
    }

    private static void use(Server server, SubscriptionType type, boolean batches)
            throws Exception {
        String topic = server.topic("cumulative");
        List<String> values;
        try (Producer<String> producer = server.producers(topic).enableBatching(batches).create()) {
            values = Values.sendTogether(producer, null, "m", COUNT);
        }
        int last = COUNT / 2 - 1;
        try (Consumer<String> consumer = server.consumer(topic, "s", type)) {
            List<Message<String>> messages = Values.inOrder(consumer, values);
            Transaction aborted = server.transaction();
            consumer.acknowledgeCumulativeAsync(messages.get(last).getMessageId(), aborted).get();
            aborted.abort().get();
            // They come again by themselves. To ask for them meanwhile would be a race within the
            // client: one that is just coming may pass the others.
            messages = Values.inOrder(consumer, values);
            Transaction committed = server.transaction();
            // It may go forward within one transaction.
            consumer.acknowledgeCumulativeAsync(messages.get(2).getMessageId(), committed).get();
            consumer.acknowledgeCumulativeAsync(messages.get(last).getMessageId(), committed).get();
            committed.commit().get();
            consumer.redeliverUnacknowledgedMessages();
            Values.inOrder(consumer, values.subList(last + 1, COUNT));
        }
        try (Consumer<String> consumer = server.consumer(topic, "s", type)) {
            Values.inOrder(consumer, values.subList(last + 1, COUNT));
        }
    }
}
