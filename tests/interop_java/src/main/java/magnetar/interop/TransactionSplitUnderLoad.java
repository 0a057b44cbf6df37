package magnetar.interop;

import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClientException;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/**
 * Splits meet sends of transactions that are on their way. This client gives up a transaction whose
 * send had to be repeated on another segment: its commit is refused, and nothing of it is seen.
 * That is once a split at most, and what is committed is seen, once.
 */
final class TransactionSplitUnderLoad implements Scenario {
    private static final int SPLITS = 3;
    private static final int AT_ONCE = 50;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("transaction-split-load");
        String topic = server.create(name, 1);
        Sent sent = new Sent();
        int refused = 0;
        try (Producer<String> producer = server.producer(topic)) {
            for (int split = 0; split < SPLITS; split++) {
                // Segments are numbered in the order of their making, two a split.
                int segment = 2 * split;
                CompletableFuture<Void> splitting =
                        CompletableFuture.runAsync(() -> split(server, name, segment));
                int refusedBefore = refused;
                while (!splitting.isDone()) {
                    refused += commits(server, producer, sent) ? 0 : 1;
                }
                splitting.join();
                refused += commits(server, producer, sent) ? 0 : 1;
                Expect.that(refused - refusedBefore <= 1,
                        "of one split, " + (refused - refusedBefore) + " commits were refused");
                Expect.that(commits(server, producer, sent), "refused although the split is over");
            }
        }
        System.err.println("of " + SPLITS + " splits, " + refused + " commits were refused");
        try (QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }

    private static boolean commits(Server server, Producer<String> producer, Sent sent)
            throws PulsarClientException {
        Transaction transaction = server.transaction();
        Map<String, CompletableFuture<MessageId>> sends =
                sent.sending(producer, AT_ONCE, transaction);
        List<String> inside = Sent.joined(sends);
        try {
            transaction.commit();
        } catch (PulsarClientException error) {
            Expect.equal(Transaction.State.ABORTED, transaction.state(), "a refused commit");
            return false;
        }
        sent.committed(inside);
        return true;
    }

    static void split(Server server, String name, int segment) {
        try {
            server.split(name, segment);
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }
}
