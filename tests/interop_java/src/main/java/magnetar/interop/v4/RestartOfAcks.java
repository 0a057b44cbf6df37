package magnetar.interop.v4;

import java.util.List;
import magnetar.interop.common.Conversation;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/**
 * Acknowledgements of transactions outlive the server: of one that commits right before it is
 * killed, and of those that are open then and end later. All are parts of batches.
 */
final class RestartOfAcks implements Scenario {
    private static final int COUNT = 12;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("restart-acks");
        List<String> values;
        try (Producer<String> producer = server.producers(topic).create()) {
            values = Values.sendTogether(producer, null, "m", COUNT);
        }
        List<String> first = values.subList(0, 3);
        List<String> second = values.subList(3, 6);
        List<String> third = values.subList(6, 9);
        List<String> rest = values.subList(9, COUNT);
        Transaction before = server.transaction();
        Transaction after = server.transaction();
        Transaction aborted = server.transaction();
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared)) {
            List<Message<String>> messages = Values.inAnyOrder(consumer, values);
            IndividualAcks.acknowledge(consumer, messages, first, before);
            IndividualAcks.acknowledge(consumer, messages, second, after);
            IndividualAcks.acknowledge(consumer, messages, third, aborted);
            before.commit().get();
            Conversation.ask("restart");
        }
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared)) {
            // What open transactions acknowledged is theirs until they end.
            Values.inAnyOrder(consumer, rest);
        }
        after.commit().get();
        aborted.abort().get();
        Conversation.ask("restart");
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared)) {
            Values.inAnyOrder(consumer, Values.all(third, rest));
        }
    }
}
