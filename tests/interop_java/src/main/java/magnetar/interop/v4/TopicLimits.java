package magnetar.interop.v4;

import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException.ConsumerBusyException;
import org.apache.pulsar.client.api.PulsarClientException.NotAllowedException;
import org.apache.pulsar.client.api.PulsarClientException.ProducerBusyException;
import org.apache.pulsar.client.api.SubscriptionType;

/** What a topic may have: how many of each, how large, of which type, and how often. */
final class TopicLimits implements Scenario {
    private static final int BYTES_MAX = 1000;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        producers(server);
        consumers(server);
        subscribing(server);
        sizes(server);
    }

    private static void producers(Server server) throws Exception {
        String topic = server.topic("limit-producers");
        server.policy("POST", topic, "maxProducers", "1");
        Producer<String> first = server.producer(topic);
        Expect.refused(ProducerBusyException.class, "a second producer",
                () -> server.producer(topic));
        first.close();
        server.producer(topic).close();
    }

    private static void consumers(Server server) throws Exception {
        String topic = server.topic("limit-consumers");
        Consumer<String> first = server.consumer(topic, "s", SubscriptionType.Shared);
        server.policy("POST", topic, "maxConsumersPerSubscription", "1");
        Expect.refused(ConsumerBusyException.class, "a second consumer",
                () -> server.consumer(topic, "s", SubscriptionType.Shared));
        server.policy("POST", topic, "maxConsumers", "1");
        Expect.refused(ConsumerBusyException.class, "a consumer of another subscription",
                () -> server.consumer(topic, "other", SubscriptionType.Shared));
        first.close();
        server.policy("POST", topic, "subscriptionTypesEnabled", "[\"Shared\"]");
        Expect.refused(NotAllowedException.class, "a type that is switched off",
                () -> server.consumer(topic, "other", SubscriptionType.Exclusive));
        server.policy("POST", topic, "maxSubscriptionsPerTopic", "1");
        Expect.refused(NotAllowedException.class, "a second subscription",
                () -> server.consumer(topic, "other", SubscriptionType.Shared));
    }

    private static void subscribing(Server server) throws Exception {
        String topic = server.topic("limit-rate");
        server.policy("POST", topic, "subscribeRate",
                "{\"subscribeThrottlingRatePerConsumer\": 1, \"ratePeriodInSecond\": 60}");
        come(server, topic, "often");
        Expect.refused(NotAllowedException.class, "a consumer that comes too often",
                () -> come(server, topic, "often"));
        come(server, topic, "once");
    }

    /** Of each client it is the first consumer, and so the same one to the server. */
    private static void come(Server server, String topic, String name) throws Exception {
        Server apart = server.apart();
        try {
            apart.consumers(topic, "s", SubscriptionType.Shared)
                    .consumerName(name)
                    .subscribe()
                    .close();
        } finally {
            apart.leave();
        }
    }

    private static void sizes(Server server) throws Exception {
        String topic = server.topic("limit-size");
        server.policy("POST", topic, "maxMessageSize", Integer.toString(BYTES_MAX));
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Exclusive);
                Producer<String> producer = server.producer(topic)) {
            Expect.refused(NotAllowedException.class, "a message that is too large",
                    () -> producer.send("x".repeat(BYTES_MAX + 1)));
            producer.send("small");
            Expect.equal("small", consumer.receive().getValue(), "what was taken");
        }
    }
}
