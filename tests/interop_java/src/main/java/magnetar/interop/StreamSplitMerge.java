package magnetar.interop;

import java.util.List;
import java.util.concurrent.CompletableFuture;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClientException;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** While a producer sends and a stream consumer reads, the topic splits, and merges again. */
final class StreamSplitMerge implements Scenario {
    private static final int COUNT = 600;
    private static final int TAKEN_BETWEEN = 150;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("stream-split-merge");
        String topic = server.create(name, 1);
        Sent sent = new Sent();
        Received received = new Received();
        try (Producer<String> producer = server.producer(topic);
                StreamConsumer<String> consumer = server.streams("s").topic(topic).subscribe()) {
            CompletableFuture<Void> sending =
                    CompletableFuture.runAsync(() -> send(sent, producer));
            Received.Use acknowledge = message -> consumer.acknowledgeCumulative(message.id());
            received.take(consumer::receive, TAKEN_BETWEEN, acknowledge);
            server.split(name, 0);
            received.take(consumer::receive, TAKEN_BETWEEN, acknowledge);
            server.merge(name, 1, 2);
            received.take(consumer::receive, TAKEN_BETWEEN, acknowledge);
            sending.join();
            received.takeAll(consumer::receive, sent.values(), acknowledge);
        }
        received.keepTheOrderOfEachKey();
    }

    private static void send(Sent sent, Producer<String> producer) {
        try {
            sent.keyed(producer, COUNT);
        } catch (PulsarClientException error) {
            throw new IllegalStateException(error);
        }
    }
}
