package magnetar.interop;

import java.util.List;
import java.util.stream.IntStream;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClientException;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.config.BatchingPolicy;

/** What a producer of the same name sends again under the same sequence ids is stored once. */
class Deduplication implements Scenario {
    private static final int COUNT = 10;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("deduplication");
        String topic = server.create(name, 1);
        send(server, topic, COUNT);
        between(server, name);
        send(server, topic, 2 * COUNT);
        Received received = new Received();
        try (QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            received.takeAll(consumer::receive, values(2 * COUNT),
                    message -> consumer.acknowledge(message.id()));
        }
    }

    /** What happens to the topic between the two producers. */
    void between(Server server, String name) throws Exception {
    }

    private static void send(Server server, String topic, int count)
            throws PulsarClientException {
        try (Producer<String> producer = server.producers(topic)
                .producerName("writer")
                .batchingPolicy(BatchingPolicy.ofDisabled())
                .create()) {
            for (int number = 0; number < count; number++) {
                producer.newMessage()
                        .key("k-" + number % Sent.KEYS)
                        .value(value(number))
                        .sequenceId(number)
                        .send();
            }
        }
    }

    private static String value(int number) {
        return "k-" + number % Sent.KEYS + "/" + number;
    }

    private static List<String> values(int count) {
        return IntStream.range(0, count).mapToObj(Deduplication::value).toList();
    }
}
