package magnetar.interop.v4;

import java.time.Duration;
import java.util.List;
import magnetar.interop.common.Conversation;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.SubscriptionType;

/** A transaction whose client and whose server are gone is aborted in time by the next server. */
final class RestartTimeout implements Scenario {
    private static final int COUNT = 10;
    private static final Duration SHORT = Duration.ofSeconds(3);

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("restart-timeout");
        try (Server gone = server.apart();
                Producer<String> producer = gone.producer(topic)) {
            Values.send(producer, gone.transaction(SHORT), "inside", COUNT);
        }
        List<String> behind;
        try (Producer<String> producer = server.producer(topic)) {
            behind = Values.send(producer, null, "behind", COUNT);
        }
        Conversation.ask("restart");
        try (Consumer<String> consumer =
                server.consumer(topic, "s", SubscriptionType.Exclusive)) {
            Values.inOrder(consumer, behind);
        }
    }
}
