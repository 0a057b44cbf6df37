package magnetar.interop.v4;

import java.io.IOException;
import java.time.Duration;
import java.util.UUID;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import magnetar.interop.common.Admin;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerBuilder;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/** The server under test: its admin interface, and the official client of version 4. */
final class Server implements AutoCloseable {
    /** As applications have it, which leave it at what the client comes with. */
    private static final int OPERATION_SECONDS = 30;
    /** So that who waits for something to be allowed again sees it soon. */
    private static final int BACKOFF_MILLIS = 500;
    private static final int[] TIMES_TO_BE_REFUSED = {1, 10, OPERATION_SECONDS};
    /** Longer than any scenario: a transaction of it ends only when it is told to. */
    private static final Duration PATIENT = Duration.ofMinutes(10);

    private static final Pattern STORAGE_SIZE = Pattern.compile("\"storageSize\":(\\d+)");

    private final String serviceUrl;
    private final Admin admin;
    private final PulsarClient client;

    Server(String serviceUrl, String adminUrl) throws PulsarClientException {
        this(serviceUrl, new Admin(adminUrl));
    }

    private Server(String serviceUrl, Admin admin) throws PulsarClientException {
        this(serviceUrl, admin, OPERATION_SECONDS);
    }

    private Server(String serviceUrl, Admin admin, int operationSeconds)
            throws PulsarClientException {
        this.serviceUrl = serviceUrl;
        this.admin = admin;
        this.client = PulsarClient.builder()
                .serviceUrl(serviceUrl)
                .operationTimeout(operationSeconds, TimeUnit.SECONDS)
                .maxBackoffInterval(BACKOFF_MILLIS, TimeUnit.MILLISECONDS)
                .enableTransaction(true)
                .build();
    }

    /**
     * A producer is refused with that error. The client asks again and again until its time is over
     * and then says why, so it has little time first, and more if even one answer took longer.
     */
    void refusesProducer(Class<? extends Exception> error, String topic) throws Exception {
        for (int seconds : TIMES_TO_BE_REFUSED) {
            Server hasty = new Server(serviceUrl, admin, seconds);
            try {
                hasty.producer(topic);
                throw new AssertionError("a producer came to " + topic);
            } catch (PulsarClientException.TimeoutException late) {
                continue;
            } catch (PulsarClientException found) {
                Expect.refused(error, "a producer", () -> {
                    throw found;
                });
                return;
            } finally {
                hasty.leave();
            }
        }
        throw new AssertionError("no answer to a producer of " + topic);
    }

    /** Closes, and waits for nothing: a client takes seconds for that. */
    void leave() {
        client.closeAsync();
    }

    /** The same server through another client. */
    Server apart() throws PulsarClientException {
        return new Server(serviceUrl, admin);
    }

    /** A new topic without partitions. */
    String topic(String stem) throws IOException, InterruptedException {
        return admin.createRegular(admin.freshName(stem));
    }

    String partitioned(String stem, int partitions) throws IOException, InterruptedException {
        return admin.createPartitioned(admin.freshName(stem), partitions);
    }

    /** A new namespace. */
    String namespace(String stem) throws IOException, InterruptedException {
        return admin.createNamespace(admin.freshName(stem));
    }

    String call(String method, String path, String body) throws IOException, InterruptedException {
        return admin.call(method, path, body);
    }

    /** Something of the admin interface below a topic, such as its policies. */
    String policy(String method, String topic, String name, String body)
            throws IOException, InterruptedException {
        return call(method, topic.replace("://", "/") + "/" + name, body);
    }

    long storageSize(String topic) throws IOException, InterruptedException {
        Matcher found = STORAGE_SIZE.matcher(policy("GET", topic, "stats", ""));
        Expect.that(found.find(), "no size in the statistics");
        return Long.parseLong(found.group(1));
    }

    Transaction transaction() throws ExecutionException, InterruptedException {
        return transaction(PATIENT);
    }

    Transaction transaction(Duration timeout) throws ExecutionException, InterruptedException {
        return client.newTransaction()
                .withTransactionTimeout(timeout.toMillis(), TimeUnit.MILLISECONDS)
                .build()
                .get();
    }

    Producer<String> producer(String topic) throws PulsarClientException {
        return producers(topic).enableBatching(false).create();
    }

    ProducerBuilder<String> producers(String topic) {
        return client.newProducer(Schema.STRING).topic(topic).sendTimeout(0, TimeUnit.SECONDS);
    }

    Consumer<String> consumer(String topic, String subscription, SubscriptionType type)
            throws PulsarClientException {
        return consumers(topic, subscription, type).subscribe();
    }

    ConsumerBuilder<String> consumers(String topic, String subscription, SubscriptionType type) {
        return client.newConsumer(Schema.STRING)
                .topic(topic)
                .subscriptionName(subscription)
                .subscriptionType(type)
                .enableBatchIndexAcknowledgment(true)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest);
    }

    /** A producer with a schema of its own. */
    <T> Producer<T> producer(String topic, Schema<T> schema) throws PulsarClientException {
        return client.newProducer(schema).topic(topic).create();
    }

    /** A consumer with a schema of its own, of a subscription for itself. */
    <T> Consumer<T> consumer(String topic, Schema<T> schema) throws PulsarClientException {
        return client.newConsumer(schema)
                .topic(topic)
                .subscriptionName("s-" + UUID.randomUUID())
                .subscribe();
    }

    Reader<String> reader(String topic) throws PulsarClientException {
        return client.newReader(Schema.STRING)
                .topic(topic)
                .startMessageId(MessageId.earliest)
                .create();
    }

    @Override
    public void close() throws PulsarClientException {
        client.close();
    }
}
