package magnetar.interop;

import java.time.Duration;
import java.util.List;
import magnetar.interop.common.Conversation;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;

/** A transaction whose client and whose server are gone is aborted in time by the next server. */
final class TransactionRestartTimeout implements Scenario {
    private static final int COUNT = 12;
    private static final Duration SHORT = Duration.ofSeconds(3);

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("transaction-restart-timeout"), 1);
        Sent sent = new Sent();
        try (Server gone = server.hasty(SHORT);
                Producer<String> inside = gone.producer(topic)) {
            sent.in(gone.transaction(), inside, COUNT);
        }
        try (Producer<String> producer = server.producer(topic)) {
            sent.keyed(producer, COUNT);
        }
        Conversation.ask("restart");
        try (QueueConsumer<String> consumer = server.queueAfterRestart("q", topic)) {
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }
}
