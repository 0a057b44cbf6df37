package magnetar.interop;

import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumer;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClientException;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** What an aborted transaction wrote is never seen, by those who wait nor by those who come. */
final class TransactionAbort implements Scenario {
    private static final int COUNT = 24;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("transaction-abort"), 2);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic);
                Producer<String> batching = server.producers(topic).create();
                StreamConsumer<String> stream = server.streams("s").topic(topic).subscribe();
                QueueConsumer<String> queue = server.queues("q").topic(topic).subscribe()) {
            sent.keyed(producer, COUNT);
            Transaction transaction = server.transaction();
            sent.in(transaction, producer, COUNT);
            sent.batchedIn(transaction, batching, COUNT);
            sent.keyed(producer, COUNT);
            transaction.abort();
            Expect.equal(Transaction.State.ABORTED, transaction.state(), "after the abort");
            Expect.refused(PulsarClientException.class, "a commit after the abort",
                    transaction::commit);
            sent.keyed(producer, COUNT);
            new Received().takeAll(stream::receive, sent.values(), message -> { })
                    .keepTheOrderOfEachKey();
            new Received().takeAll(queue::receive, sent.values(),
                    message -> queue.acknowledge(message.id()));
        }
        try (QueueConsumer<String> queue = server.queues("later").topic(topic).subscribe()) {
            new Received().takeAll(queue::receive, sent.values(),
                    message -> queue.acknowledge(message.id()));
        }
        try (StreamConsumer<String> stream = server.streams("later-s").topic(topic).subscribe()) {
            new Received().takeAll(stream::receive, sent.values(), message -> { });
        }
        try (CheckpointConsumer<String> consumer =
                server.checkpoints(topic, Checkpoint.earliest()).create()) {
            new Received().takeAll(consumer::receive, sent.values(), message -> { });
        }
    }
}
