package magnetar.interop;

import java.time.Duration;
import java.util.List;
import magnetar.interop.common.Conversation;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** The server is killed in the middle of transactions, and they go on with the next one. */
final class TransactionRestart implements Scenario {
    private static final int COUNT = 16;
    private static final Duration QUIET = Duration.ofMillis(500);

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("transaction-restart"), 2);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic)) {
            // First a topic where nothing but open transactions wrote, then one with a past.
            for (int restart = 0; restart < 2; restart++) {
                restartAmid(server, topic, producer, sent, "q-" + restart);
            }
        }
        Conversation.ask("restart");
        try (QueueConsumer<String> consumer = server.queueAfterRestart("later", topic)) {
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }

    private static void restartAmid(Server server, String topic, Producer<String> producer,
            Sent sent, String subscription) throws Exception {
        try (QueueConsumer<String> consumer =
                server.queues(subscription).topic(topic).subscribe()) {
            Received.Use acknowledge = message -> consumer.acknowledge(message.id());
            Received received = new Received();
            received.takeAll(consumer::receive, sent.values(), acknowledge);
            Transaction aborted = server.transaction();
            Transaction committed = server.transaction();
            Transaction before = server.transaction();
            sent.in(aborted, producer, COUNT);
            List<String> inside = sent.in(committed, producer, COUNT);
            List<String> earlier = sent.in(before, producer, COUNT);
            before.commit();
            Conversation.ask("restart");
            // Acknowledgements outside of transactions may be lost with the server.
            Received again = new Received();
            while (again.takeOne(consumer::receive, QUIET, acknowledge)) {
                continue;
            }
            Expect.that(sent.values().containsAll(again.values()),
                    "before the end there came " + again.values());
            inside.addAll(sent.in(committed, producer, COUNT));
            sent.in(aborted, producer, COUNT);
            aborted.abort();
            committed.commit();
            Expect.equal(Transaction.State.COMMITTED, committed.state(), "after the commit");
            sent.committed(inside);
            sent.committed(earlier);
            sent.keyed(producer, COUNT);
            received.takeAll(consumer::receive, sent.values(), acknowledge);
        }
    }
}
