package magnetar.interop;

import java.time.Duration;
import java.util.List;
import java.util.Map;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Message;
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
        String last = "";
        for (String suffix : List.of("-a", "-b")) {
            last = server.create(owner + suffix, 2, properties);
            try (Producer<String> producer = server.producer(last)) {
                sent.keyed(producer, COUNT);
            }
        }
        try (Producer<String> producer = server.producer(last);
                StreamConsumer<String> consumer = consumer(server, owner)) {
            Received received = new Received();
            received.takeAll(consumer::receive, sent.values(),
                    message -> Server.show(message.id()));
            // See Stream: only an id that came alone covers all that came before.
            sent.keyed(producer, 1);
            received.take(consumer::receive, 1, message -> {
                Server.show(message.id());
                consumer.acknowledgeCumulative(message.id());
            });
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
