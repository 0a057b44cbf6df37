package magnetar.interop;

import java.time.Duration;
import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;

/** Keyed and other messages over two segments; a queue consumer gets each once, acks for good. */
final class Queue implements Scenario {
    private static final int COUNT = 20;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("queue"), 2);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic);
                QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            sent.keyed(producer, COUNT).unkeyed(producer, COUNT);
            new Received().takeAll(consumer::receive, sent.values(), message -> {
                consumer.acknowledge(message.id());
                Server.show(message.id());
            });
        }
        try (QueueConsumer<String> again = server.queues("q").topic(topic).subscribe()) {
            Message<String> message = again.receive(Duration.ofMillis(500));
            Expect.that(message == null, "an acknowledged message came again");
        }
    }
}
