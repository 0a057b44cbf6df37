package magnetar.interop;

import java.time.Duration;
import java.util.List;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/**
 * One cumulative acknowledgement covers what came before it on every segment: the next consumer of
 * the subscription goes on behind it, and gets what came later.
 */
final class Stream implements Scenario {
    private static final int COUNT = 30;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("stream"), 2);
        Sent sent = new Sent();
        Received received = new Received();
        try (Producer<String> producer = server.producer(topic)) {
            try (StreamConsumer<String> consumer = consumer(server, topic)) {
                sent.keyed(producer, COUNT);
                received.take(consumer::receive, COUNT, message -> Server.show(message.id()));
                // The client notes what an id covers when the message arrives, unguarded against
                // arrivals on other segments: only an id that came alone covers what it should.
                sent.keyed(producer, 1);
                received.take(consumer::receive, 1,
                        message -> consumer.acknowledgeCumulative(message.id()));
                sent.keyed(producer, COUNT);
                // Not acknowledged, so the next one gets these again.
                new Received().take(consumer::receive, COUNT / 2, message -> { });
            }
        }
        try (StreamConsumer<String> consumer = consumer(server, topic)) {
            received.takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledgeCumulative(message.id()));
        }
        received.keepTheOrderOfEachKey();
    }

    private static StreamConsumer<String> consumer(Server server, String topic) throws Exception {
        return server.streams("s")
                .topic(topic)
                .consumerName("one")
                .acknowledgmentGroupTime(Duration.ZERO)
                .subscribe();
    }
}
