package magnetar.interop;

import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.FutureTask;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;

/** A queue subscription at the latest message misses nothing that is sent while segments split. */
final class QueueAtLatest implements Scenario {
    private static final int COUNT = 100;
    private static final int SPLITS = 3;

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
                for (int segment = 0; segment < SPLITS; segment++) {
                    int parent = segment;
                    sendDuring(sent, producer, () -> {
                        server.split(name, parent);
                        return null;
                    });
                }
                new Received().takeAll(consumer::receive, sent.values(),
                        message -> consumer.acknowledge(message.id()));
            }
        }
    }

    private static void sendDuring(Sent sent, Producer<String> producer, Callable<Void> change)
            throws Exception {
        FutureTask<Void> changing = new FutureTask<>(change);
        sent.batched(producer, COUNT);
        new Thread(changing).start();
        while (!changing.isDone()) {
            sent.batched(producer, COUNT);
        }
        changing.get();
        sent.batched(producer, COUNT);
    }
}
