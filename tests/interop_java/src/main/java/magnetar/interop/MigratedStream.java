package magnetar.interop;

import java.util.List;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** A stream consumer reads a migrated topic: first what it had as a regular one, then the rest. */
final class MigratedStream implements Scenario {
    private static final int COUNT = 40;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("migrated-stream");
        server.createPartitioned(name, 2);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(Server.regular(name))) {
            sent.keyed(producer, COUNT);
            server.migrate(name);
            sent.keyed(producer, COUNT);
        }
        Received received = new Received();
        try (StreamConsumer<String> consumer =
                server.streams("s").topic(Server.scalable(name)).subscribe()) {
            received.takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledgeCumulative(message.id()));
        }
        received.keepTheOrderOfEachKey();
    }
}
