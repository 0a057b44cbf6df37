package magnetar.interop;

import java.util.ArrayList;
import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClientException;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** Of two transactions that acknowledge one message, one commits, and the other's writes vanish. */
final class TransactionAcksConflict implements Scenario {
    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String input = server.create(server.freshName("transaction-contended"), 1);
        String output = server.create(server.freshName("transaction-outcome"), 1);
        Sent sent = new Sent();
        Sent written = new Sent();
        try (Producer<String> producer = server.producer(input);
                Producer<String> outcome = server.producer(output);
                QueueConsumer<String> consumer = server.queues("q").topic(input).subscribe()) {
            sent.keyed(producer, 1);
            List<Message<String>> taken = new ArrayList<>();
            new Received().takeAll(consumer::receive, sent.values(), taken::add);
            int refused = 0;
            Transaction[] transactions = {server.transaction(), server.transaction()};
            List<List<String>> values = new ArrayList<>();
            for (Transaction transaction : transactions) {
                values.add(written.in(transaction, outcome, 1));
                consumer.acknowledge(taken.get(0).id(), transaction);
            }
            for (int each = 0; each < transactions.length; each++) {
                try {
                    transactions[each].commit();
                    written.committed(values.get(each));
                } catch (PulsarClientException error) {
                    refused++;
                    Expect.equal(Transaction.State.ABORTED, transactions[each].state(), "refused");
                }
            }
            Expect.equal(1, refused, "refused commits");
        }
        try (QueueConsumer<String> consumer = server.queues("q").topic(input).subscribe()) {
            Received.nothing(consumer::receive);
        }
        try (QueueConsumer<String> consumer = server.queues("q").topic(output).subscribe()) {
            new Received().takeAll(consumer::receive, written.values(),
                    message -> consumer.acknowledge(message.id()));
        }
    }
}
