package magnetar.interop;

import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** The topic splits, and merges again, in the middle of a transaction, and that commits. */
final class TransactionSplit implements Scenario {
    private static final int COUNT = 24;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("transaction-split");
        String topic = server.create(name, 1);
        Sent sent = new Sent();
        Received received = new Received();
        try (Producer<String> producer = server.producer(topic);
                StreamConsumer<String> consumer = server.streams("s").topic(topic).subscribe()) {
            Transaction transaction = server.transaction();
            sent.committed(sent.in(transaction, producer, COUNT));
            server.split(name, 0);
            // This client gives a transaction up if one of its messages is on its way when the new
            // layout comes. A plain message is sent again, and then the client has that layout.
            sent.keyed(producer, 1);
            sent.committed(sent.in(transaction, producer, COUNT));
            server.merge(name, 1, 2);
            sent.keyed(producer, 1);
            sent.committed(sent.in(transaction, producer, COUNT));
            Received.nothing(consumer::receive);
            transaction.commit();
            Expect.equal(Transaction.State.COMMITTED, transaction.state(), "after the commit");
            received.takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledgeCumulative(message.id()));
        }
        received.keepTheOrderOfEachKey();
    }
}
