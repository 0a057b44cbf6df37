package magnetar.interop;

import java.util.List;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;

/** A queue subscription at the latest message misses nothing that is sent while segments split. */
final class QueueAtLatest implements Scenario {
    private static final int COUNT = 500;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("queue-at-latest");
        String topic = server.create(name, 1);
        Sent before = new Sent();
        Sent sent = new Sent();
        try (Producer<String> producer = server.producers(topic).create()) {
            before.keyed(producer, 5);
            try (QueueConsumer<String> consumer = server.queues("q")
                    .topic(topic)
                    .subscriptionInitialPosition(SubscriptionInitialPosition.LATEST)
                    .subscribe()) {
                sent.batched(producer, COUNT);
                server.split(name, 0);
                sent.batched(producer, COUNT);
                server.split(name, 1);
                sent.batched(producer, COUNT);
                new Received().takeAll(consumer::receive, sent.values(),
                        message -> consumer.acknowledge(message.id()));
            }
        }
    }
}
