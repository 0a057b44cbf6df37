package magnetar.interop;

import java.util.List;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumer;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;

/** Regular topics, with partitions and without, through the client for scalable ones. */
final class RegularTopic implements Scenario {
    private static final int COUNT = 40;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String plain = server.freshName("regular");
        server.createRegular(plain);
        use(server, Server.regular(plain));
        String partitioned = server.freshName("partitioned");
        server.createPartitioned(partitioned, 3);
        use(server, Server.regular(partitioned));
    }

    private static void use(Server server, String topic) throws Exception {
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic)) {
            sent.keyed(producer, COUNT).unkeyed(producer, COUNT);
        }
        Received received = new Received();
        try (QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            received.takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
        received.keepTheOrderOfEachKey();
        try (CheckpointConsumer<String> consumer =
                server.checkpoints(topic, Checkpoint.earliest()).create()) {
            new Received().takeAll(consumer::receive, sent.values(), message -> { });
            Server.show(consumer.checkpoint());
        }
    }
}
