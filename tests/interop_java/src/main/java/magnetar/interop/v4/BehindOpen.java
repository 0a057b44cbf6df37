package magnetar.interop.v4;

import java.util.List;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/** Plain messages behind those of an open transaction wait for its end; then all come, in order. */
final class BehindOpen implements Scenario {
    private static final int COUNT = 10;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("behind");
        try (Producer<String> producer = server.producer(topic);
                Consumer<String> consumer =
                        server.consumer(topic, "s", SubscriptionType.Exclusive)) {
            List<String> before = Values.send(producer, null, "before", COUNT);
            Transaction first = server.transaction();
            Transaction second = server.transaction();
            List<String> inFirst = Values.send(producer, first, "first", COUNT);
            List<String> inSecond = Values.send(producer, second, "second", COUNT);
            List<String> after = Values.send(producer, null, "after", COUNT);
            Values.inOrder(consumer, before);
            second.commit().get();
            Values.nothing(consumer);
            first.commit().get();
            Values.inOrder(consumer, Values.all(inFirst, inSecond, after));
        }
    }
}
