package magnetar.interop;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClientException;

/**
 * Messages that were sent and acknowledged. A value is `key/number`, and numbers grow within a key,
 * so that values alone tell whether all arrived, once, and in the order of their key.
 */
final class Sent {
    static final int KEYS = 8;
    /** Stands in a value for the key that its message lacks. */
    static final String NO_KEY = "none";

    private final List<String> values = new ArrayList<>();

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
        List<CompletableFuture<MessageId>> sends = new ArrayList<>();
        for (int sent = 0; sent < count; sent++) {
            String key = nextKey();
            String value = nextValue(key);
            sends.add(producer.async().newMessage().key(key).value(value).send());
            values.add(value);
        }
        for (CompletableFuture<MessageId> send : sends) {
            send.join();
        }
        return this;
    }

    private String nextKey() {
        return "k-" + values.size() % KEYS;
    }

    private String nextValue(String key) {
        return key + "/" + values.size();
    }
}
