package magnetar.interop;

import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** Of a stream consumer of a namespace, one acknowledgement covers all its topics. */
final class NamespaceStream implements Scenario {
    private static final int COUNT = 10;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String owner = server.freshName("namespace-stream");
        String properties = "{\"owner\": \"" + owner + "\"}";
        Sent sent = new Sent();
        for (String suffix : List.of("-a", "-b")) {
            String topic = server.create(owner + suffix, 2, properties);
            try (Producer<String> producer = server.producer(topic)) {
                sent.keyed(producer, COUNT);
            }
        }
        try (StreamConsumer<String> consumer = consumer(server, owner)) {
            MessageId[] last = new MessageId[1];
            new Received().takeAll(consumer::receive, sent.values(), message -> {
                last[0] = message.id();
                Server.show(message.id());
            });
            consumer.acknowledgeCumulative(last[0]);
        }
        try (StreamConsumer<String> again = consumer(server, owner)) {
            Message<String> message = again.receive(Duration.ofMillis(500));
            Expect.that(message == null, "an acknowledged message came again");
        }
    }

    private static StreamConsumer<String> consumer(Server server, String owner) throws Exception {
        return server.streams("s")
                .namespace(Server.NAMESPACE, Map.of("owner", owner))
                .consumerName("one")
                .acknowledgmentGroupTime(Duration.ZERO)
                .subscribe();
    }
}
