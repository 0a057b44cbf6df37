package magnetar.interop;

import java.util.List;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumer;
import org.apache.pulsar.client.api.v5.Producer;

/** A new consumer goes on from a checkpoint's bytes: in a batch, over a split and a merge. */
final class CheckpointResume implements Scenario {
    private static final int COUNT = 60;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("checkpoint-resume");
        String topic = server.create(name, 1);
        Sent sent = new Sent();
        Received received = new Received();
        try (Producer<String> batching = server.producers(topic).create()) {
            sent.batched(batching, COUNT);
        }
        try (Producer<String> producer = server.producer(topic)) {
            byte[] stored = taken(server, topic, received, Checkpoint.earliest(), COUNT / 2);
            server.split(name, 0);
            sent.keyed(producer, COUNT);
            // All of it: the client forgets where it starts on a segment that gives it nothing.
            stored = taken(server, topic, received, Checkpoint.fromByteArray(stored),
                    COUNT / 2 + COUNT);
            server.merge(name, 1, 2);
            sent.keyed(producer, COUNT);
            taken(server, topic, received, Checkpoint.fromByteArray(stored), COUNT);
        }
        received.areExactly(sent.values());
    }

    /** Reads some more with a consumer of its own, and gives its checkpoint. */
    private static byte[] taken(
            Server server, String topic, Received received, Checkpoint start, int count)
            throws Exception {
        try (CheckpointConsumer<String> consumer = server.checkpoints(topic, start).create()) {
            received.take(consumer::receive, count, message -> { });
            Checkpoint checkpoint = consumer.checkpoint();
            Server.show(checkpoint);
            return checkpoint.toByteArray();
        }
    }
}
