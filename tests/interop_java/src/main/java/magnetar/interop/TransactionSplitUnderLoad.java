package magnetar.interop;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClientException;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/**
 * Splits meet batches of transactions, several at a time and one after the other without a pause.
 * This client refuses to commit a transaction of which a send failed, though it repeats that on
 * another segment: every commit succeeds, so none failed, and everything is seen once.
 */
final class TransactionSplitUnderLoad implements Scenario {
    private static final int SPLITS = 3;
    private static final int WORKERS = 4;
    private static final int AT_ONCE = 50;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("transaction-split-load");
        String topic = server.create(name, 1);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producers(topic).create()) {
            for (int split = 0; split < SPLITS; split++) {
                AtomicBoolean enough = new AtomicBoolean();
                List<CompletableFuture<Void>> working = new ArrayList<>();
                for (int worker = 0; worker < WORKERS; worker++) {
                    working.add(CompletableFuture.runAsync(
                            () -> transact(server, producer, sent, enough)));
                }
                try {
                    // Segments are numbered in the order of their making, two a split.
                    split(server, name, 2 * split);
                } finally {
                    enough.set(true);
                    working.forEach(CompletableFuture::join);
                }
            }
        }
        try (QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }

    /** One transaction after the other, and a last one when it is enough. */
    private static void transact(
            Server server, Producer<String> producer, Sent sent, AtomicBoolean enough) {
        try {
            for (boolean last = false; !last;) {
                last = enough.get();
                Transaction transaction = server.transaction();
                Map<String, CompletableFuture<MessageId>> sends;
                synchronized (sent) {
                    sends = sent.sending(producer, AT_ONCE, transaction);
                }
                List<String> inside = Sent.joined(sends);
                transaction.commit();
                synchronized (sent) {
                    sent.committed(inside);
                }
            }
        } catch (PulsarClientException error) {
            throw new IllegalStateException(error);
        }
    }

    static void split(Server server, String name, int segment) {
        try {
            server.split(name, segment);
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }
}
