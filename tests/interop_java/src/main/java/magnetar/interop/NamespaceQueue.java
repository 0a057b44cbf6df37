package magnetar.interop;

import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;

/** A queue consumer of a namespace gets the topics with a property, also those that come later. */
final class NamespaceQueue implements Scenario {
    private static final int COUNT = 10;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String owner = server.freshName("namespace-queue");
        String properties = "{\"owner\": \"" + owner + "\"}";
        String early = server.create(owner + "-early", 1, properties);
        String strange = server.create(owner + "-strange", 1);
        Sent sent = new Sent();
        Set<String> topics = new HashSet<>();
        try (QueueConsumer<String> consumer = server.queues("q")
                .namespace(Server.NAMESPACE, Map.of("owner", owner))
                .subscribe()) {
            String late = server.create(owner + "-late", 1, properties);
            for (String topic : List.of(early, late)) {
                try (Producer<String> producer = server.producer(topic)) {
                    sent.keyed(producer, COUNT);
                }
            }
            try (Producer<String> producer = server.producer(strange)) {
                new Sent().unkeyed(producer, COUNT);
            }
            new Received().takeAll(consumer::receive, sent.values(), message -> {
                consumer.acknowledge(message.id());
                topics.add(message.topic());
                Server.show(message.id());
            });
            Expect.equal(Set.of(early, late), topics, "the topics of the messages");
        }
    }
}
