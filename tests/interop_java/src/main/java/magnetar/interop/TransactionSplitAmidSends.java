package magnetar.interop;

import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** The topic splits while messages of a transaction are on their way, and that commits. */
final class TransactionSplitAmidSends implements Scenario {
    private static final int AT_ONCE = 20;
    /** A split may take longer: it may wait for transactions. */
    private static final long SPLIT_SECONDS = 2;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("transaction-split-amid");
        String topic = server.create(name, 1);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic)) {
            Transaction transaction = server.transaction();
            Map<String, CompletableFuture<MessageId>> before =
                    sent.sending(producer, AT_ONCE, transaction);
            CompletableFuture<Void> splitting = CompletableFuture.runAsync(
                    () -> TransactionSplitUnderLoad.split(server, name, 0));
            long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(SPLIT_SECONDS);
            // At any time some are on their way.
            for (boolean last = false; !last;) {
                last = splitting.isDone() || System.nanoTime() > deadline;
                Map<String, CompletableFuture<MessageId>> next =
                        sent.sending(producer, AT_ONCE, transaction);
                sent.committed(Sent.joined(before));
                before = next;
            }
            sent.committed(Sent.joined(before));
            transaction.commit();
            splitting.join();
        }
        try (QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }
}
