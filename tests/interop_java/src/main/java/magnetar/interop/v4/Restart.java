package magnetar.interop.v4;

import java.util.List;
import magnetar.interop.common.Conversation;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/** The server is killed in the middle of transactions, and they go on with the next one. */
final class Restart implements Scenario {
    private static final int COUNT = 10;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("restart");
        List<String> seen;
        try (Producer<String> producer = server.producer(topic);
                Consumer<String> consumer =
                        server.consumer(topic, "s", SubscriptionType.Exclusive)) {
            Transaction aborted = server.transaction();
            Transaction committed = server.transaction();
            Transaction before = server.transaction();
            Values.send(producer, aborted, "aborted", COUNT);
            List<String> first = Values.send(producer, committed, "first", COUNT);
            List<String> early = Values.send(producer, before, "early", COUNT);
            before.commit().get();
            Conversation.ask("restart");
            Values.nothing(consumer);
            List<String> second = Values.send(producer, committed, "second", COUNT);
            Values.send(producer, aborted, "aborted-too", COUNT);
            committed.commit().get();
            Expect.equal(Transaction.State.COMMITTED, committed.getState(), "after the commit");
            Values.nothing(consumer);
            aborted.abort().get();
            List<String> after = Values.send(producer, null, "after", COUNT);
            seen = Values.all(first, early, second, after);
            Values.inOrder(consumer, seen);
        }
        Conversation.ask("restart");
        try (Reader<String> reader = server.reader(topic)) {
            Values.readToTheEnd(reader, seen);
        }
    }
}
