package magnetar.interop.v4;

import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException.TransactionConflictException;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/** One open transaction acknowledges cumulatively, and only forwards. */
final class CumulativeAcksConflict implements Scenario {
    private static final int COUNT = 10;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("cumulative-conflict");
        List<String> values;
        try (Producer<String> producer = server.producer(topic)) {
            values = Values.send(producer, null, "m", COUNT);
        }
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Exclusive)) {
            List<Message<String>> messages = Values.inOrder(consumer, values);
            Transaction holder = server.transaction();
            Transaction other = server.transaction();
            acknowledge(consumer, messages.get(4), holder);
            refused(consumer, messages.get(6), other, "while another holds one");
            refused(consumer, messages.get(4), holder, "the same again");
            other.abort().get();
            // A failed operation makes the client abort, so the holder must not be committed.
            holder.abort().get();
            Transaction next = server.transaction();
            acknowledge(consumer, messages.get(6), next);
            next.commit().get();
            Transaction late = server.transaction();
            refused(consumer, messages.get(5), late, "below what is done");
            late.abort().get();
        }
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Exclusive)) {
            Values.inOrder(consumer, values.subList(7, COUNT));
        }
    }

    private static void acknowledge(Consumer<String> consumer, Message<String> last, Transaction in)
            throws Exception {
        consumer.acknowledgeCumulativeAsync(last.getMessageId(), in).get();
    }

    private static void refused(
            Consumer<String> consumer, Message<String> last, Transaction in, String what) {
        Expect.refused(TransactionConflictException.class, what,
                () -> acknowledge(consumer, last, in));
    }
}
