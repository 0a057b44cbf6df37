package magnetar.interop;

import java.time.Duration;
import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;

/** What is too old is gone from every segment, sealed ones too, whether it waits or not. */
final class Expiry implements Scenario {
    private static final int COUNT = 10;
    private static final long OLD_MILLIS = 1100;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("expiry");
        String topic = server.create(name, 2);
        server.queues("q").topic(topic).subscribe().close();
        try (Producer<String> producer = server.producer(topic)) {
            new Sent().keyed(producer, COUNT);
            producer.newMessage().value("waits").deliverAfter(Duration.ofHours(1)).send();
            server.split(name, 0);
            Thread.sleep(OLD_MILLIS);
            List<String> young = new Sent().keyed(producer, COUNT).values();
            server.call("POST", "scalable/" + Server.NAMESPACE + "/" + name
                    + "/subscriptions/q/expireMessages/1", "");
            try (QueueConsumer<String> queue = server.queues("q").topic(topic).subscribe()) {
                new Received().takeAll(queue::receive, young,
                        message -> queue.acknowledge(message.id()));
                Expect.that(queue.receive(Duration.ofMillis(300)) == null, "an old one came");
            }
        }
    }
}
