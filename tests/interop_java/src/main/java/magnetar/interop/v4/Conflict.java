package magnetar.interop.v4;

import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException.TransactionConflictException;
import org.apache.pulsar.client.api.PulsarClientException.TransactionHasOperationFailedException;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/** A message that a transaction acknowledged, open or committed, is no other's to acknowledge. */
final class Conflict implements Scenario {
    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String topic = server.topic("conflict");
        List<String> values;
        try (Producer<String> producer = server.producer(topic)) {
            values = Values.send(producer, null, "m", 3);
        }
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared)) {
            List<Message<String>> messages = Values.inOrder(consumer, values);
            MessageId first = messages.get(0).getMessageId();
            Transaction holder = server.transaction();
            Transaction other = server.transaction();
            consumer.acknowledgeAsync(first, holder).get();
            Expect.refused(TransactionConflictException.class, "a message that another holds",
                    () -> consumer.acknowledgeAsync(first, other).get());
            Expect.refused(TransactionHasOperationFailedException.class,
                    "the commit of the one that was refused", () -> other.commit().get());
            Expect.equal(Transaction.State.ABORTED, other.getState(), "the one that was refused");
            holder.commit().get();
            Transaction late = server.transaction();
            Expect.refused(TransactionConflictException.class, "a message that is done",
                    () -> consumer.acknowledgeAsync(first, late).get());
            late.abort().get();
            // What an aborted one let go is anyone's.
            MessageId second = messages.get(1).getMessageId();
            Transaction aborted = server.transaction();
            consumer.acknowledgeAsync(second, aborted).get();
            aborted.abort().get();
            Values.inOrder(consumer, values.subList(1, 2));
            Transaction next = server.transaction();
            consumer.acknowledgeAsync(second, next).get();
            next.commit().get();
        }
        try (Consumer<String> consumer = server.consumer(topic, "s", SubscriptionType.Shared)) {
            Values.inOrder(consumer, values.subList(2, 3));
        }
    }
}
