package magnetar.interop;

import java.time.Duration;
import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.config.BackoffPolicy;

/** What is refused, or left by a consumer that goes, comes again; of a batch, only that part. */
final class QueueRedelivery implements Scenario {
    private static final int COUNT = 40;
    private static final Duration SOON = Duration.ofMillis(100);

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("queue-redelivery"), 2);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producers(topic).create()) {
            sent.batched(producer, COUNT);
        }
        Received kept = new Received();
        try (QueueConsumer<String> consumer = server.queues("q")
                .topic(topic)
                .negativeAckRedeliveryBackoff(BackoffPolicy.exponential(SOON, SOON.multipliedBy(2)))
                .subscribe()) {
            boolean[] refused = new boolean[COUNT];
            Received all = new Received().take(consumer::receive, COUNT + COUNT / 4, message -> {
                int number = Integer.parseInt(message.value().split("/")[1]);
                if (number % 4 == 0 && !refused[number]) {
                    refused[number] = true;
                    consumer.negativeAcknowledge(message.id());
                } else if (number % 4 != 1) {
                    consumer.acknowledge(message.id());
                    kept.values().add(message.value());
                }
                Server.show(message.id());
            });
            Expect.equal(COUNT, (int) all.values().stream().distinct().count(), "all came");
        }
        try (QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            kept.takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }
}
