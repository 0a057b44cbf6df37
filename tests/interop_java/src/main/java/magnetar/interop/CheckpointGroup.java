package magnetar.interop;

import java.util.List;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumer;
import org.apache.pulsar.client.api.v5.Producer;

/**
 * A checkpoint consumer of a group reads over a split and a merge in the order of each key; the
 * next one with its name goes on from its checkpoint.
 */
final class CheckpointGroup implements Scenario {
    private static final int COUNT = 60;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("checkpoint-group");
        String topic = server.create(name, 1);
        Sent sent = new Sent();
        Received received = new Received();
        try (Producer<String> producer = server.producer(topic)) {
            sent.keyed(producer, COUNT);
            server.split(name, 0);
            sent.keyed(producer, COUNT);
            byte[] stored;
            try (CheckpointConsumer<String> consumer =
                    consumer(server, topic, Checkpoint.earliest())) {
                received.takeAll(consumer::receive, sent.values(), message -> { });
                stored = consumer.checkpoint().toByteArray();
                Server.show(consumer.checkpoint());
            }
            server.merge(name, 1, 2);
            sent.keyed(producer, COUNT);
            try (CheckpointConsumer<String> consumer =
                    consumer(server, topic, Checkpoint.fromByteArray(stored))) {
                received.takeAll(consumer::receive, sent.values(), message -> { });
            }
        }
        received.keepTheOrderOfEachKey();
    }

    private static CheckpointConsumer<String> consumer(
            Server server, String topic, Checkpoint start) throws Exception {
        return server.checkpoints(topic, start).consumerGroup("g").consumerName("one").create();
    }
}
