package magnetar.interop;

import java.util.ArrayList;
import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClientException;
import org.apache.pulsar.client.api.v5.Transaction;
import org.apache.pulsar.client.api.v5.async.AsyncMessageBuilder;

/**
 * Messages that were sent and acknowledged. A value is `key/number`, and numbers grow within a key,
 * so that values alone tell whether all arrived, once, and in the order of their key.
 */
final class Sent {
    static final int KEYS = 8;
    /** Stands in a value for the key that its message lacks. */
    static final String NO_KEY = "none";

    private final List<String> values = new ArrayList<>();
    private int next;

    /** What consumers must get. */
    List<String> values() {
        return values;
    }

    /** One at a time, over all keys in turn. */
    Sent keyed(Producer<String> producer, int count) throws PulsarClientException {
        for (int sent = 0; sent < count; sent++) {
            String key = nextKey();
            String value = nextValue(key);
            producer.newMessage().key(key).value(value).send();
            values.add(value);
        }
        return this;
    }

    Sent unkeyed(Producer<String> producer, int count) throws PulsarClientException {
        for (int sent = 0; sent < count; sent++) {
            String value = nextValue(NO_KEY);
            producer.newMessage().value(value).send();
            values.add(value);
        }
        return this;
    }

    /** All at once, so that the client makes batches. */
    Sent batched(Producer<String> producer, int count) {
        values.addAll(joined(sending(producer, count, null)));
        return this;
    }

    /** One at a time; these count as sent only when their transaction is said to be committed. */
    List<String> in(Transaction transaction, Producer<String> producer, int count)
            throws PulsarClientException {
        List<String> inside = new ArrayList<>();
        for (int sent = 0; sent < count; sent++) {
            String key = nextKey();
            String value = nextValue(key);
            producer.newMessage().key(key).value(value).transaction(transaction).send();
            inside.add(value);
        }
        return inside;
    }

    /** Like `in`, all at once. */
    List<String> batchedIn(Transaction transaction, Producer<String> producer, int count) {
        return joined(sending(producer, count, transaction));
    }

    void committed(Collection<String> inside) {
        values.addAll(inside);
    }

    /** Sends without waiting, within a transaction unless it is null. */
    Map<String, CompletableFuture<MessageId>> sending(
            Producer<String> producer, int count, Transaction transaction) {
        Map<String, CompletableFuture<MessageId>> sends = new LinkedHashMap<>();
        for (int sent = 0; sent < count; sent++) {
            String key = nextKey();
            String value = nextValue(key);
            AsyncMessageBuilder<String> message =
                    producer.async().newMessage().key(key).value(value);
            if (transaction != null) {
                message.transaction(transaction);
            }
            sends.put(value, message.send());
        }
        return sends;
    }

    /** The values, when all of them were acknowledged. */
    static List<String> joined(Map<String, CompletableFuture<MessageId>> sends) {
        sends.values().forEach(CompletableFuture::join);
        return List.copyOf(sends.keySet());
    }

    private String nextKey() {
        return "k-" + next % KEYS;
    }

    private String nextValue(String key) {
        return key + "/" + next++;
    }
}
