package magnetar.interop.v4;

import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException.NotAllowedException;
import org.apache.pulsar.client.api.SubscriptionType;

/** Who waits for a message's time, who does not, and what is too late to be waited for. */
final class Delays implements Scenario {
    private static final Duration DELAY = Duration.ofMillis(700);
    private static final List<SubscriptionType> ORDERED =
            List.of(SubscriptionType.Exclusive, SubscriptionType.Failover);
    private static final List<SubscriptionType> SHARING =
            List.of(SubscriptionType.Shared, SubscriptionType.Key_Shared);
    private static final int TICK_MILLIS = 50;
    private static final int DELAY_MAX_MILLIS = 60_000;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("delays");
        server.policy("POST", topic, "delayedDelivery", "{\"active\": true, \"tickTime\": "
                + TICK_MILLIS + ", \"maxDeliveryDelayInMillis\": " + DELAY_MAX_MILLIS + "}");
        Map<SubscriptionType, Consumer<String>> consumers = new HashMap<>();
        for (SubscriptionType type : SubscriptionType.values()) {
            consumers.put(type, server.consumer(topic, type.name(), type));
        }
        long began = System.nanoTime();
        try (Producer<String> producer = server.producers(topic).create()) {
            producer.newMessage().key("k").value("after")
                    .deliverAfter(DELAY.toMillis(), TimeUnit.MILLISECONDS).send();
            producer.newMessage().key("k").value("at")
                    .deliverAt(System.currentTimeMillis() + DELAY.toMillis()).send();
            producer.newMessage().key("k").value("now").send();
            Expect.refused(NotAllowedException.class, "a delay that is too long",
                    producer.newMessage().value("late").deliverAfter(1, TimeUnit.HOURS)::send);
        }
        for (SubscriptionType type : ORDERED) {
            for (String value : List.of("after", "at", "now")) {
                Expect.equal(value, next(consumers.get(type)), type + " in order");
            }
        }
        for (SubscriptionType type : SHARING) {
            Consumer<String> consumer = consumers.get(type);
            Expect.equal("now", next(consumer), type + " first");
            Set<String> late = Set.of(next(consumer), next(consumer));
            Expect.equal(Set.of("after", "at"), late, type + " later");
            long taken = TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - began);
            Expect.that(taken >= DELAY.toMillis() - TICK_MILLIS, type + " after " + taken + " ms");
        }
        for (Consumer<String> consumer : consumers.values()) {
            consumer.close();
        }
    }

    private static String next(Consumer<String> consumer) throws Exception {
        Message<String> message = consumer.receive();
        consumer.acknowledge(message);
        return message.getValue();
    }
}
