package magnetar.interop;

import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** A scalable topic that nobody created is made by its first use, with one segment to split. */
final class AutoCreation implements Scenario {
    private static final int COUNT = 20;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("auto-creation");
        String topic = Server.scalable(name);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic);
                StreamConsumer<String> consumer = server.streams("s").topic(topic).subscribe()) {
            Expect.equal(topic, producer.topic(), "the topic of the producer");
            sent.keyed(producer, COUNT);
            server.split(name, 0);
            sent.keyed(producer, COUNT);
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledgeCumulative(message.id()));
        }
    }
}
