package magnetar.interop;

import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** What a transaction wrote to three segments is seen when it commits, all of it, in order. */
final class TransactionCommit implements Scenario {
    private static final int SEGMENTS = 3;
    private static final int COUNT = 48;
    private static final int BATCHED = 2000;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("transaction-commit"), SEGMENTS);
        Sent sent = new Sent();
        Received inOrder = new Received();
        Received shared = new Received();
        try (Producer<String> producer = server.producer(topic);
                Producer<String> batching = server.producers(topic).create();
                StreamConsumer<String> stream = server.streams("s").topic(topic).subscribe();
                QueueConsumer<String> queue = server.queues("q").topic(topic).subscribe()) {
            Transaction transaction = server.transaction();
            Expect.equal(Transaction.State.OPEN, transaction.state(), "before it ends");
            sent.committed(sent.in(transaction, producer, COUNT));
            sent.committed(sent.batchedIn(transaction, batching, BATCHED));
            Received.nothing(stream::receive);
            Received.nothing(queue::receive);
            transaction.commit();
            Expect.equal(Transaction.State.COMMITTED, transaction.state(), "after the commit");
            inOrder.takeAll(stream::receive, sent.values(),
                    message -> stream.acknowledgeCumulative(message.id()));
            shared.takeAll(queue::receive, sent.values(),
                    message -> queue.acknowledge(message.id()));
        }
        inOrder.keepTheOrderOfEachKey();
    }
}
