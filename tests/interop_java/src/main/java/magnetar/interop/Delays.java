package magnetar.interop;

import java.time.Duration;
import java.time.Instant;
import java.util.List;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** A queue waits for a message's time, over a split too; a stream does not wait. */
final class Delays implements Scenario {
    private static final Duration DELAY = Duration.ofMillis(1200);
    private static final int TICK_MILLIS = 50;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        Server.Own own = server.createApart("delays", 1);
        server.call("POST", "namespaces/" + own.namespace() + "/delayedDelivery",
                "{\"active\": true, \"tickTime\": " + TICK_MILLIS + "}");
        try (Producer<String> producer = server.producer(own.topic());
                QueueConsumer<String> queue =
                        server.queues("q").topic(own.topic()).subscribe();
                StreamConsumer<String> stream =
                        server.streams("s").topic(own.topic()).subscribe()) {
            long began = System.nanoTime();
            producer.newMessage().key("k").value("after").deliverAfter(DELAY).send();
            producer.newMessage().key("k").value("at").deliverAt(Instant.now().plus(DELAY)).send();
            server.call("POST", own.path() + "/split/0", "");
            producer.newMessage().key("k").value("now").send();
            // What follows the split comes once all before it is acknowledged.
            Received streamed = new Received().take(stream::receive, 3,
                    message -> stream.acknowledgeCumulative(message.id()));
            Expect.equal(List.of("after", "at", "now"), streamed.values(), "a stream");
            Received queued = new Received();
            queued.take(queue::receive, 1, message -> queue.acknowledge(message.id()));
            Expect.equal(List.of("now"), queued.values(), "a queue at first");
            queued.take(queue::receive, 2, message -> queue.acknowledge(message.id()));
            Expect.equal(Set.of("after", "at", "now"), Set.copyOf(queued.values()), "a queue");
            long taken = TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - began);
            Expect.that(taken >= DELAY.toMillis() - TICK_MILLIS, "it came after " + taken + " ms");
        }
    }
}
