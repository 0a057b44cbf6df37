package magnetar.interop.v4;

import java.util.List;
import java.util.concurrent.TimeUnit;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.SubscriptionType;

/** What is too old is gone, also what waits for its time; acknowledging it late is no error. */
final class Expiry implements Scenario {
    private static final int COUNT = 5;
    private static final long OLD_MILLIS = 1100;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("expiry");
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared);
                Producer<String> producer = server.producer(topic)) {
            Values.send(producer, null, "old", COUNT);
            producer.newMessage().value("waits").deliverAfter(1, TimeUnit.HOURS).send();
            var held = consumer.receive();
            Thread.sleep(OLD_MILLIS);
            producer.send("young");
            server.policy("POST", topic, "subscription/s/expireMessages/1", "");
            consumer.acknowledge(held);
            consumer.redeliverUnacknowledgedMessages();
        }
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared)) {
            Expect.equal("young", consumer.receive().getValue(), "what is left");
        }
    }
}
