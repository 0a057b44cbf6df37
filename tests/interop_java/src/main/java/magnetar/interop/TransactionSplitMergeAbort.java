package magnetar.interop;

import java.util.List;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** A transaction that lived through a split and a merge is aborted: nothing of it is seen. */
final class TransactionSplitMergeAbort implements Scenario {
    private static final int COUNT = 24;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("transaction-split-abort");
        String topic = server.create(name, 1);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic);
                QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            sent.keyed(producer, COUNT);
            Transaction transaction = server.transaction();
            sent.in(transaction, producer, COUNT);
            server.split(name, 0);
            sent.in(transaction, producer, COUNT);
            sent.keyed(producer, COUNT);
            server.merge(name, 1, 2);
            sent.in(transaction, producer, COUNT);
            sent.keyed(producer, COUNT);
            transaction.abort();
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
        try (QueueConsumer<String> consumer = server.queues("later").topic(topic).subscribe()) {
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }
}
