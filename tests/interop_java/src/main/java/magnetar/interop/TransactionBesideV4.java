package magnetar.interop;

import java.util.List;
import magnetar.interop.common.Conversation;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** Transactions of both clients on one regular topic: neither's end has to do with the other's. */
final class TransactionBesideV4 implements Scenario {
    private static final int COUNT = 10;
    private static final List<String> OF_THE_OTHER =
            List.of("committed-0", "committed-1", "committed-2");

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("transaction-beside");
        server.createRegular(name);
        String topic = Server.regular(name);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic);
                QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            Transaction committed = server.transaction();
            Transaction aborted = server.transaction();
            List<String> inside = sent.in(committed, producer, COUNT);
            sent.in(aborted, producer, COUNT);
            Conversation.ask("beside " + topic);
            Received.nothing(consumer::receive);
            inside.addAll(sent.in(committed, producer, COUNT));
            aborted.abort();
            committed.commit();
            sent.committed(inside);
            sent.committed(OF_THE_OTHER);
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
            Conversation.ask("beside " + topic);
            new Received().takeAll(consumer::receive, OF_THE_OTHER,
                    message -> consumer.acknowledge(message.id()));
        }
        try (Producer<String> producer = server.producer(topic);
                QueueConsumer<String> later = server.queues("later").topic(topic).subscribe()) {
            new Received().take(later::receive, sent.values().size() + OF_THE_OTHER.size(),
                    message -> later.acknowledge(message.id()));
            Received.nothing(later::receive);
            Sent after = new Sent().keyed(producer, 1);
            new Received().takeAll(later::receive, after.values(),
                    message -> later.acknowledge(message.id()));
        }
    }
}
