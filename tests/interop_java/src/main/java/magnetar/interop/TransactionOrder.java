package magnetar.interop;

import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** Plain and transactional messages that one producer sends without waiting keep their order. */
final class TransactionOrder implements Scenario {
    private static final int ROUNDS = 20;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.create(server.freshName("transaction-order"), 1);
        Sent sent = new Sent();
        Received received = new Received();
        try (Producer<String> producer = server.producer(topic);
                StreamConsumer<String> consumer = server.streams("s").topic(topic).subscribe()) {
            Transaction first = server.transaction();
            Transaction second = server.transaction();
            // Before its first message of a transaction the client makes the topic known, and lets
            // later ones of the producer pass meanwhile.
            sent.committed(sent.in(first, producer, 1));
            sent.committed(sent.in(second, producer, 1));
            Map<String, CompletableFuture<MessageId>> sends = new LinkedHashMap<>();
            for (int round = 0; round < ROUNDS; round++) {
                sends.putAll(sent.sending(producer, 3, first));
                sends.putAll(sent.sending(producer, 3, null));
                sends.putAll(sent.sending(producer, 3, second));
            }
            sent.committed(Sent.joined(sends));
            second.commit();
            Received.nothing(consumer::receive);
            first.commit();
            received.takeAll(consumer::receive, sent.values(), message -> { });
        }
        Expect.equal(sent.values(), received.values(), "the order");
    }
}
