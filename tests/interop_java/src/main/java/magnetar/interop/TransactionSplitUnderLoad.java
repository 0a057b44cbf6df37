package magnetar.interop;

import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** Splits meet sends of transactions that are on their way: every transaction commits. */
final class TransactionSplitUnderLoad implements Scenario {
    private static final int TRANSACTIONS = 24;
    private static final int AT_ONCE = 100;
    private static final int SPLIT_EVERY = 8;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("transaction-split-load");
        String topic = server.create(name, 1);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic)) {
            for (int number = 0; number < TRANSACTIONS; number++) {
                Transaction transaction = server.transaction();
                Map<String, CompletableFuture<MessageId>> sends =
                        sent.sending(producer, AT_ONCE, transaction);
                if (number % SPLIT_EVERY == SPLIT_EVERY / 2) {
                    // Segments are numbered in the order of their making, two a split.
                    server.split(name, 2 * (number / SPLIT_EVERY));
                }
                List<String> inside = Sent.joined(sends);
                transaction.commit();
                Expect.equal(Transaction.State.COMMITTED, transaction.state(), "after the commit");
                sent.committed(inside);
            }
        }
        try (QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }
}
