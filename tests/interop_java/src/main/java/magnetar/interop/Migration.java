package magnetar.interop;

import java.util.List;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;

/** A regular topic becomes a scalable one under a producer and a queue consumer that go on. */
final class Migration implements Scenario {
    private static final int COUNT = 40;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String plain = server.freshName("migration");
        server.createRegular(plain);
        use(server, plain, 1);
        String partitioned = server.freshName("migration-partitioned");
        server.createPartitioned(partitioned, 2);
        use(server, partitioned, 2);
    }

    private static void use(Server server, String name, int partitions) throws Exception {
        String topic = Server.regular(name);
        Sent sent = new Sent();
        Received received = new Received();
        try (Producer<String> producer = server.producer(topic);
                QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            Received.Use acknowledge = message -> consumer.acknowledge(message.id());
            sent.keyed(producer, COUNT);
            received.take(consumer::receive, COUNT / 2, acknowledge);
            server.migrate(name);
            sent.keyed(producer, COUNT);
            // The children of the old partitions are scalable segments as any other.
            server.split(name, partitions);
            sent.keyed(producer, COUNT);
            received.takeAll(consumer::receive, sent.values(), acknowledge);
        }
        try (QueueConsumer<String> consumer =
                server.queues("later").topic(Server.scalable(name)).subscribe()) {
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }
}
