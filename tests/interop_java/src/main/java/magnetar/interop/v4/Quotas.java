package magnetar.interop.v4;

import java.util.List;
import java.util.concurrent.CompletableFuture;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.PulsarClientException.ProducerBlockedQuotaExceededException;
import org.apache.pulsar.client.api.SubscriptionType;

/** A backlog that is too large: who waits, who fails, and who loses the oldest messages. */
final class Quotas implements Scenario {
    private static final int COUNT = 10;
    private static final int TRIES = 200;
    private static final long TRY_MILLIS = 50;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        holds(server);
        fails(server);
        evicts(server);
    }

    private static void holds(Server server) throws Exception {
        String topic = server.topic("quota-hold");
        try (Consumer<String> consumer = consumer(server, topic);
                Producer<String> producer = server.producer(topic)) {
            List<String> values = Values.send(producer, null, "m", COUNT);
            exceed(server, topic, server.storageSize(topic), "producer_request_hold");
            CompletableFuture<MessageId> held = producer.sendAsync("held");
            take(consumer, values);
            held.get();
            take(consumer, List.of("held"));
        }
    }

    private static void fails(Server server) throws Exception {
        String topic = server.topic("quota-exception");
        consumer(server, topic).close();
        try (Producer<String> producer = server.producer(topic)) {
            Values.send(producer, null, "m", COUNT);
            exceed(server, topic, 1, "producer_exception");
            Expect.refused(ProducerBlockedQuotaExceededException.class, "a message",
                    () -> producer.send("too much"));
            server.refusesProducer(ProducerBlockedQuotaExceededException.class, topic);
            // It goes on trying: with room it is there again.
            server.policy("DELETE", topic, "backlogQuota", "");
            again(producer);
        }
    }

    private static void again(Producer<String> producer) throws Exception {
        for (int left = TRIES; ; left--) {
            try {
                producer.send("again");
                return;
            } catch (PulsarClientException error) {
                if (left == 0) {
                    throw error;
                }
                Thread.sleep(TRY_MILLIS);
            }
        }
    }

    private static void evicts(Server server) throws Exception {
        String topic = server.topic("quota-eviction");
        consumer(server, topic).close();
        try (Producer<String> producer = server.producer(topic)) {
            List<String> values = Values.send(producer, null, "m", COUNT);
            // Nine tenths of this are a little less than one half of all.
            long quota = server.storageSize(topic) * COUNT / (2 * COUNT - 2);
            exceed(server, topic, quota, "consumer_backlog_eviction");
            producer.send("goes on");
            try (Consumer<String> consumer = consumer(server, topic)) {
                String first = consumer.receive().getValue();
                // One that is a little too many is kept by Pulsar.
                int kept = COUNT - values.indexOf(first);
                Expect.that(kept == COUNT / 2 - 1 || kept == COUNT / 2, kept + " are kept");
                take(consumer, values.subList(COUNT - kept + 1, COUNT));
                take(consumer, List.of("goes on"));
            }
        }
    }

    private static void exceed(Server server, String topic, long bytes, String policy)
            throws Exception {
        server.policy("POST", topic, "backlogQuota",
                "{\"limitSize\": " + bytes + ", \"policy\": \"" + policy + "\"}");
        server.call("GET", "brokers/backlog-quota-check", "");
    }

    private static Consumer<String> consumer(Server server, String topic) throws Exception {
        return server.consumer(topic, "s", SubscriptionType.Exclusive);
    }

    private static void take(Consumer<String> consumer, List<String> values) throws Exception {
        for (String value : values) {
            Expect.equal(value, consumer.receive().getValue(), "the next message");
        }
        consumer.acknowledgeCumulative(consumer.getLastMessageIds().get(0));
    }
}
