package magnetar.interop;

import java.util.ArrayList;
import java.util.List;
import magnetar.interop.common.Conversation;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/**
 * Acknowledgements of transactions outlive the server: of one that commits right before it is
 * killed, and of those that are open then and end later. Some of them are parts of batches.
 */
final class TransactionRestartOfAcks implements Scenario {
    private static final int COUNT = 40;
    private static final int PARTS = 4;
    /** The client does not tell when an acknowledgement of a transaction was answered. */
    private static final long ANSWERED_MILLIS = 500;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("transaction-restart-acks"), 2);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producers(topic).create()) {
            sent.batched(producer, COUNT);
        }
        Transaction before = server.transaction();
        Transaction after = server.transaction();
        Transaction aborted = server.transaction();
        try (QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            List<Message<String>> taken = new ArrayList<>();
            new Received().takeAll(consumer::receive, sent.values(), taken::add);
            for (Message<String> message : taken) {
                switch (partOf(message.value())) {
                    case 0 -> consumer.acknowledge(message.id(), before);
                    case 1 -> consumer.acknowledge(message.id(), after);
                    case 2 -> consumer.acknowledge(message.id(), aborted);
                    default -> { }
                }
            }
            Thread.sleep(ANSWERED_MILLIS);
            before.commit();
            Conversation.ask("restart");
        }
        try (QueueConsumer<String> consumer = server.queueAfterRestart("q", topic)) {
            // What open transactions acknowledged is theirs until they end.
            new Received().takeAll(consumer::receive, only(sent, 3), message -> { });
        }
        after.commit();
        aborted.abort();
        Conversation.ask("restart");
        try (QueueConsumer<String> consumer = server.queueAfterRestart("q", topic)) {
            List<String> left = new ArrayList<>(only(sent, 2));
            left.addAll(only(sent, 3));
            new Received().takeAll(consumer::receive, left,
                    message -> consumer.acknowledge(message.id()));
        }
    }

    private static List<String> only(Sent sent, int part) {
        return sent.values().stream().filter(value -> partOf(value) == part).toList();
    }

    private static int partOf(String value) {
        return Integer.parseInt(value.split("/")[1]) % PARTS;
    }
}
