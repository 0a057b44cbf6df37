package magnetar.interop.v4;

import java.util.List;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.transaction.Transaction;

/** On a topic that is given: one transaction commits `committed-0` to `-2`, another is aborted. */
final class Beside implements Scenario {
    private static final int COUNT = 3;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        try (Producer<String> producer = server.producer(arguments.get(0))) {
            Transaction committed = server.transaction();
            Transaction aborted = server.transaction();
            Values.send(producer, committed, "committed", COUNT);
            Values.send(producer, aborted, "aborted", COUNT);
            committed.commit().get();
            aborted.abort().get();
        }
    }
}
