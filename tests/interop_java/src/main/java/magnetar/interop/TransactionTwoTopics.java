package magnetar.interop;

import java.util.List;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** A transaction over two topics shows itself in both or in none. */
final class TransactionTwoTopics implements Scenario {
    private static final int COUNT = 20;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String left = server.create(server.freshName("transaction-left"), 2);
        String right = server.create(server.freshName("transaction-right"), 1);
        use(server, left, right);
    }

    static void use(Server server, String left, String right) throws Exception {
        Sent toLeft = new Sent();
        Sent toRight = new Sent();
        try (Producer<String> leftProducer = server.producer(left);
                Producer<String> rightProducer = server.producer(right);
                QueueConsumer<String> leftConsumer = server.queues("q").topic(left).subscribe();
                QueueConsumer<String> rightConsumer = server.queues("q").topic(right).subscribe()) {
            Transaction aborted = server.transaction();
            toLeft.in(aborted, leftProducer, COUNT);
            toRight.in(aborted, rightProducer, COUNT);
            Transaction committed = server.transaction();
            toLeft.committed(toLeft.in(committed, leftProducer, COUNT));
            toRight.committed(toRight.in(committed, rightProducer, COUNT));
            Received.nothing(leftConsumer::receive);
            Received.nothing(rightConsumer::receive);
            aborted.abort();
            Received.nothing(leftConsumer::receive);
            committed.commit();
            new Received().takeAll(leftConsumer::receive, toLeft.values(),
                    message -> leftConsumer.acknowledge(message.id()));
            new Received().takeAll(rightConsumer::receive, toRight.values(),
                    message -> rightConsumer.acknowledge(message.id()));
        }
    }
}
