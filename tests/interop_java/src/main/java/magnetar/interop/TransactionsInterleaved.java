package magnetar.interop;

import java.util.ArrayList;
import java.util.List;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** Six transactions write in turns and end in the other order, every second one aborted. */
final class TransactionsInterleaved implements Scenario {
    private static final int TRANSACTIONS = 6;
    private static final int ROUNDS = 10;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("transactions-interleaved"), 2);
        Sent sent = new Sent();
        try (Producer<String> producer = server.producer(topic);
                QueueConsumer<String> consumer = server.queues("q").topic(topic).subscribe()) {
            List<Transaction> open = new ArrayList<>();
            List<List<String>> inside = new ArrayList<>();
            for (int each = 0; each < TRANSACTIONS; each++) {
                open.add(server.transaction());
                inside.add(new ArrayList<>());
            }
            for (int round = 0; round < ROUNDS; round++) {
                for (int each = 0; each < TRANSACTIONS; each++) {
                    inside.get(each).addAll(sent.in(open.get(each), producer, 1));
                }
            }
            for (int each = TRANSACTIONS - 1; each >= 0; each--) {
                if (each % 2 == 0) {
                    open.get(each).commit();
                    sent.committed(inside.get(each));
                } else {
                    open.get(each).abort();
                }
            }
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
        try (QueueConsumer<String> consumer = server.queues("later").topic(topic).subscribe()) {
            new Received().takeAll(consumer::receive, sent.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }
}
