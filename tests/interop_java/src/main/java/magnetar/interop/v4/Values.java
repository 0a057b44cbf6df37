package magnetar.interop.v4;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import magnetar.interop.common.Expect;
import magnetar.interop.common.Limits;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.TypedMessageBuilder;
import org.apache.pulsar.client.api.transaction.Transaction;

/** Values of messages: sent, and looked at when they come. */
final class Values {
    private static final int NEXT_SECONDS = (int) Limits.PATIENCE.toSeconds();
    private static final int QUIET_MILLIS = 300;

    private Values() {
    }

    /** One at a time, `stem-0` and so on, within a transaction unless it is null. */
    static List<String> send(Producer<String> producer, Transaction in, String stem, int count)
            throws PulsarClientException {
        List<String> values = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            values.add(stem + "-" + number);
            message(producer, in, values.get(number)).send();
        }
        return values;
    }

    /** All at once, so that the client makes batches. */
    static List<String> sendTogether(
            Producer<String> producer, Transaction in, String stem, int count) {
        List<String> values = new ArrayList<>();
        List<CompletableFuture<MessageId>> sends = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            values.add(stem + "-" + number);
            sends.add(message(producer, in, values.get(number)).sendAsync());
        }
        sends.forEach(CompletableFuture::join);
        return values;
    }

    private static TypedMessageBuilder<String> message(
            Producer<String> producer, Transaction in, String value) {
        return (in == null ? producer.newMessage() : producer.newMessage(in)).value(value);
    }

    @SafeVarargs
    static List<String> all(List<String>... parts) {
        List<String> values = new ArrayList<>();
        for (List<String> part : parts) {
            values.addAll(part);
        }
        return values;
    }

    /** These come, in this order, and nothing after them. */
    static List<Message<String>> inOrder(Consumer<String> consumer, List<String> expected)
            throws PulsarClientException {
        List<Message<String>> messages = taken(consumer, expected.size());
        Expect.equal(expected, messages.stream().map(Message::getValue).toList(), "what came");
        nothing(consumer);
        return messages;
    }

    /** These come, in any order, and nothing after them. */
    static List<Message<String>> inAnyOrder(Consumer<String> consumer, List<String> expected)
            throws PulsarClientException {
        List<Message<String>> messages = taken(consumer, expected.size());
        Expect.equal(expected.stream().sorted().toList(),
                messages.stream().map(Message::getValue).sorted().toList(), "what came");
        nothing(consumer);
        return messages;
    }

    private static List<Message<String>> taken(Consumer<String> consumer, int count)
            throws PulsarClientException {
        List<Message<String>> messages = new ArrayList<>();
        while (messages.size() < count) {
            Message<String> message = consumer.receive(NEXT_SECONDS, TimeUnit.SECONDS);
            Expect.that(message != null, "of " + count + " came " + messages.size() + ": "
                    + messages.stream().map(Message::getValue).toList());
            messages.add(message);
        }
        return messages;
    }

    static void nothing(Consumer<String> consumer) throws PulsarClientException {
        Message<String> message = consumer.receive(QUIET_MILLIS, TimeUnit.MILLISECONDS);
        Expect.that(message == null, "nothing was to come, there came "
                + (message == null ? "" : message.getValue()));
    }

    /** A reader that is told there is nothing more has read these. */
    static void readToTheEnd(Reader<String> reader, List<String> expected)
            throws PulsarClientException {
        List<String> found = new ArrayList<>();
        while (reader.hasMessageAvailable()) {
            Message<String> message = reader.readNext(NEXT_SECONDS, TimeUnit.SECONDS);
            Expect.that(message != null, "a message that is available does not come, after "
                    + found);
            found.add(message.getValue());
        }
        Expect.equal(expected, found, "what was read");
    }
}
