package magnetar.interop.v4;

import java.util.List;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.transaction.Transaction;

/** For a reader, the last message is the last that it may see. */
final class LastMessage implements Scenario {
    private static final int COUNT = 5;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("last-message");
        try (Producer<String> producer = server.producer(topic)) {
            List<String> before = Values.send(producer, null, "before", COUNT);
            Transaction committed = server.transaction();
            List<String> inside = Values.send(producer, committed, "inside", COUNT);
            Transaction aborted = server.transaction();
            Values.send(producer, aborted, "aborted", COUNT);
            isRead(server, topic, before);
            committed.commit().get();
            isRead(server, topic, Values.all(before, inside));
            aborted.abort().get();
            isRead(server, topic, Values.all(before, inside));
            List<String> after = Values.send(producer, null, "after", COUNT);
            isRead(server, topic, Values.all(before, inside, after));
        }
    }

    private static void isRead(Server server, String topic, List<String> values) throws Exception {
        try (Reader<String> reader = server.reader(topic)) {
            Values.readToTheEnd(reader, values);
        }
    }
}
