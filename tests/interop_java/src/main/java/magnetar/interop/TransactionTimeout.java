package magnetar.interop;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Message;
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
            String topic = server.create(server.freshName("transaction-timeout"), 1);
            Sent sent = new Sent();
            Transaction transaction = open(server, hasty, topic, sent);
            isAborted(server, topic, sent);
            Expect.equal(Transaction.State.TIMED_OUT, transaction.state(), "after its time");
            Expect.refused(PulsarClientException.class, "a late commit", transaction::commit);
        }
        String topic = server.create(server.freshName("transaction-timeout"), 1);
        Sent sent = new Sent();
        try (Server gone = server.hasty(SHORT)) {
            open(server, gone, topic, sent);
        }
        isAborted(server, topic, sent);
    }

    /** A transaction that acknowledged messages and wrote some, with others behind them. */
    private static Transaction open(Server server, Server hasty, String topic, Sent sent)
            throws Exception {
        try (Producer<String> producer = server.producer(topic);
                Producer<String> inside = hasty.producer(topic);
                QueueConsumer<String> consumer = hasty.queues("q").topic(topic).subscribe()) {
            sent.keyed(producer, COUNT);
            List<Message<String>> taken = new ArrayList<>();
            new Received().takeAll(consumer::receive, sent.values(), taken::add);
            Transaction transaction = hasty.transaction();
            for (Message<String> message : taken) {
                consumer.acknowledge(message.id(), transaction);
            }
            sent.in(transaction, inside, COUNT);
            sent.keyed(producer, COUNT);
            return transaction;
        }
    }

    private static void isAborted(Server server, String topic, Sent sent) throws Exception {
        for (String subscription : List.of("other", "q")) {
            try (QueueConsumer<String> consumer =
                    server.queues(subscription).topic(topic).subscribe()) {
                new Received().takeAll(consumer::receive, sent.values(),
                        message -> consumer.acknowledge(message.id()));
            }
        }
    }
}
