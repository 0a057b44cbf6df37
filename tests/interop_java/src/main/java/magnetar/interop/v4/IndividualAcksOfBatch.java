package magnetar.interop.v4;

import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/** Two transactions acknowledge parts of one batch; what they share is a conflict. */
final class IndividualAcksOfBatch implements Scenario {
    private static final int COUNT = 12;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("individual-batch");
        List<String> values;
        try (Producer<String> producer = server.producers(topic).create()) {
            values = Values.sendTogether(producer, null, "m", COUNT);
        }
        List<String> first = values.subList(0, COUNT / 3);
        List<String> second = values.subList(COUNT / 3, 2 * COUNT / 3);
        List<String> third = values.subList(2 * COUNT / 3, COUNT);
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared)) {
            List<Message<String>> messages = Values.inAnyOrder(consumer, values);
            Transaction committed = server.transaction();
            Transaction aborted = server.transaction();
            IndividualAcks.acknowledge(consumer, messages, first, committed);
            IndividualAcks.acknowledge(consumer, messages, second, aborted);
            Expect.refused(PulsarClientException.TransactionConflictException.class,
                    "one message in two transactions",
                    () -> consumer.acknowledgeAsync(messages.get(0).getMessageId(), aborted)
                            .get());
            committed.commit().get();
            aborted.abort().get();
        }
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared)) {
            Values.inAnyOrder(consumer, Values.all(second, third));
        }
    }
}
