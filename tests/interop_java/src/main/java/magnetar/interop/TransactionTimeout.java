package magnetar.interop;

import java.time.Duration;
import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClientException;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/**
 * A transaction that nobody ends is aborted when its time is up, whether its client is there or
 * not: what it acknowledged comes again, what it wrote does not, and what waited behind it comes.
 */
final class TransactionTimeout implements Scenario {
    private static final int COUNT = 12;
    private static final Duration SHORT = Duration.ofSeconds(2);

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        try (Server hasty = server.hasty(SHORT)) {
            Transaction transaction = use(server, hasty);
            Expect.equal(Transaction.State.TIMED_OUT, transaction.state(), "after its time");
            Expect.refused(PulsarClientException.class, "a late commit", transaction::commit);
        }
        try (Server gone = server.hasty(SHORT)) {
            use(server, gone);
        }
    }

    private static Transaction use(Server server, Server hasty) throws Exception {
        String topic = server.create(server.freshName("transaction-timeout"), 1);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic);
                QueueConsumer<String> consumer = server.queues("other").topic(topic).subscribe()) {
            Transaction transaction;
            sent.keyed(producer, COUNT);
            try (Producer<String> inside = hasty.producer(topic)) {
                transaction = hasty.transaction();
                try (QueueConsumer<String> taker = hasty.queues("q").topic(topic).subscribe()) {
                    new Received().takeAll(taker::receive, sent.values(),
                            message -> taker.acknowledge(message.id(), transaction));
                }
                sent.in(transaction, inside, COUNT);
            }
            sent.keyed(producer, COUNT);
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
            try (QueueConsumer<String> taker = server.queues("q").topic(topic).subscribe()) {
                new Received().takeAll(taker::receive, sent.values(),
                        message -> taker.acknowledge(message.id()));
            }
            return transaction;
        }
    }
}
