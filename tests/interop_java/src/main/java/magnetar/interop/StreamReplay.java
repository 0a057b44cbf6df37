package magnetar.interop;

import java.util.List;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** A stream consumer that comes after a split and a merge reads parents before children. */
final class StreamReplay implements Scenario {
    private static final int COUNT = 40;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("stream-replay");
        String topic = server.create(name, 1);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic)) {
            sent.keyed(producer, COUNT);
            server.split(name, 0);
            sent.keyed(producer, COUNT);
            server.merge(name, 1, 2);
            sent.keyed(producer, COUNT);
        }
        Received received = new Received();
        try (StreamConsumer<String> consumer = server.streams("s").topic(topic).subscribe()) {
            received.takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledgeCumulative(message.id()));
        }
        received.keepTheOrderOfEachKey();
    }
}
