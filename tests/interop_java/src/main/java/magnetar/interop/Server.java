package magnetar.interop;

import java.io.IOException;
import java.nio.channels.ClosedChannelException;
import java.time.Duration;
import java.util.HexFormat;
import java.util.List;
import magnetar.interop.common.Admin;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumerBuilder;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.ProducerBuilder;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.PulsarClientException;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.QueueConsumerBuilder;
import org.apache.pulsar.client.api.v5.StreamConsumerBuilder;
import org.apache.pulsar.client.api.v5.Transaction;
import org.apache.pulsar.client.api.v5.config.BatchingPolicy;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.v5.config.TransactionPolicy;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** The server under test: its admin interface, the official client, names that nobody else uses. */
final class Server implements AutoCloseable {
    static final String NAMESPACE = Admin.NAMESPACE;
    /** As applications have it, which leave it at what the client comes with. */
    private static final Duration OPERATION = Duration.ofSeconds(30);
    private static final List<Duration> TIMES_TO_BE_REFUSED =
            List.of(Duration.ofSeconds(1), Duration.ofSeconds(10), OPERATION);
    /** Longer than any scenario: a transaction of it ends only when it is told to. */
    private static final Duration PATIENT = Duration.ofMinutes(10);

    /** What this client says of a connection that it has lost, whenever it notices. */
    private static final List<String> LOST = List.of(
            "Connection closed",
            "Connection already closed",
            "Connection reset",
            "Broken pipe",
            "Disconnected from server");

    private static final int RECONNECTS = 100;
    private static final long RECONNECT_MILLIS = 200;

    private final String serviceUrl;
    private final Admin admin;
    private final PulsarClient client;

    Server(String serviceUrl, String adminUrl) throws PulsarClientException {
        this(serviceUrl, new Admin(adminUrl), PATIENT);
    }

    private Server(String serviceUrl, Admin admin, Duration timeout) throws PulsarClientException {
        this(serviceUrl, admin, timeout, OPERATION);
    }

    private Server(String serviceUrl, Admin admin, Duration timeout, Duration operation)
            throws PulsarClientException {
        this.serviceUrl = serviceUrl;
        this.admin = admin;
        this.client = PulsarClient.builder()
                .serviceUrl(serviceUrl)
                .operationTimeout(operation)
                .transactionPolicy(TransactionPolicy.builder().timeout(timeout).build())
                .build();
    }

    /**
     * No producer is taken, and that is why. The client asks again and again until its time is over
     * and then says it, so it has little time first, and more if even one answer took longer.
     */
    void refusesProducer(String why, String topic) throws PulsarClientException {
        String found = "";
        for (Duration operation : TIMES_TO_BE_REFUSED) {
            Server hasty = new Server(serviceUrl, admin, PATIENT, operation);
            try {
                // The producer of a segment is made for its first message.
                hasty.producer(topic).newMessage().value("refused").send();
                throw new AssertionError("a message was taken by " + topic);
            } catch (PulsarClientException error) {
                found = String.valueOf(error);
                if (found.contains(why)) {
                    return;
                }
            } finally {
                hasty.client.closeAsync();
            }
        }
        throw new AssertionError("a producer was refused, but not as '" + why + "': " + found);
    }

    /** The same server through another client, whose transactions last that long at most. */
    Server hasty(Duration timeout) throws PulsarClientException {
        return new Server(serviceUrl, admin, timeout);
    }

    /** A local name that nothing has yet; it differs between runs on one server too. */
    String freshName(String stem) {
        return admin.freshName(stem);
    }

    static String scalable(String name) {
        return "topic://" + NAMESPACE + "/" + name;
    }

    static String regular(String name) {
        return "persistent://" + NAMESPACE + "/" + name;
    }

    /** Creates a scalable topic whose layout changes only when asked, and gives its name back. */
    String create(String name, int segments) throws IOException, InterruptedException {
        return create(name, segments, "{}");
    }

    String create(String name, int segments, String properties)
            throws IOException, InterruptedException {
        admin.call("PUT", layoutPath(name) + "?numInitialSegments=" + segments, properties);
        setAutoScale(name, "{\"enabled\": false}");
        return scalable(name);
    }

    /** A scalable topic in a new namespace, which may have policies of its own. */
    Own createApart(String stem, int segments) throws IOException, InterruptedException {
        String namespace = admin.createNamespace(freshName(stem));
        String path = "scalable/" + namespace + "/x";
        admin.call("PUT", path + "?numInitialSegments=" + segments, "{}");
        admin.call("POST", path + "/autoScalePolicy", "{\"enabled\": false}");
        return new Own("topic://" + namespace + "/x", namespace, path);
    }

    /** A topic with a namespace for itself, and where the admin interface has it. */
    record Own(String topic, String namespace, String path) {
    }

    /** Something of the admin interface. */
    void call(String method, String path, String body) throws IOException, InterruptedException {
        admin.call(method, path, body);
    }

    void setAutoScale(String name, String policy) throws IOException, InterruptedException {
        admin.call("POST", layoutPath(name) + "/autoScalePolicy", policy);
    }

    void split(String name, int segment) throws IOException, InterruptedException {
        admin.call("POST", layoutPath(name) + "/split/" + segment, "");
    }

    void merge(String name, int left, int right) throws IOException, InterruptedException {
        admin.call("POST", layoutPath(name) + "/merge/" + left + "/" + right, "");
    }

    void migrate(String name) throws IOException, InterruptedException {
        admin.call("POST", layoutPath(name) + "/migrate", "");
    }

    void createRegular(String name) throws IOException, InterruptedException {
        admin.createRegular(name);
    }

    void createPartitioned(String name, int partitions) throws IOException, InterruptedException {
        admin.createPartitioned(name, partitions);
    }

    private static String layoutPath(String name) {
        return "scalable/" + NAMESPACE + "/" + name;
    }

    Transaction transaction() throws PulsarClientException {
        return client.newTransaction();
    }

    /** Without batching: a message at a time is sent without the wait for a full batch. */
    Producer<String> producer(String topic) throws PulsarClientException {
        return producers(topic).batchingPolicy(BatchingPolicy.ofDisabled()).create();
    }

    ProducerBuilder<String> producers(String topic) {
        return client.newProducer(Schema.string()).topic(topic);
    }

    QueueConsumerBuilder<String> queues(String subscription) {
        return client.newQueueConsumer(Schema.string())
                .subscriptionName(subscription)
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST);
    }

    /**
     * Subscribes once the server is back. This client fails if it notices only now that its
     * connection died with the former process, and does not try again by itself.
     */
    QueueConsumer<String> queueAfterRestart(String subscription, String topic)
            throws PulsarClientException, InterruptedException {
        for (int left = RECONNECTS; ; left--) {
            try {
                return queues(subscription).topic(topic).subscribe();
            } catch (PulsarClientException error) {
                if (left == 0 || !isLost(error)) {
                    throw error;
                }
                Thread.sleep(RECONNECT_MILLIS);
            }
        }
    }

    /** Whether a request failed with its connection: while it was written, or waited. */
    private static boolean isLost(Throwable error) {
        if (error == null) {
            return false;
        }
        String text = String.valueOf(error.getMessage());
        return error instanceof ClosedChannelException
                || LOST.stream().anyMatch(text::contains)
                || isLost(error.getCause());
    }

    StreamConsumerBuilder<String> streams(String subscription) {
        return client.newStreamConsumer(Schema.string())
                .subscriptionName(subscription)
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST);
    }

    CheckpointConsumerBuilder<String> checkpoints(String topic, Checkpoint start) {
        return client.newCheckpointConsumer(Schema.string()).topic(topic).startPosition(start);
    }

    static void show(MessageId id) {
        show("message-id", id.toByteArray(), id.toString());
    }

    static void show(Checkpoint checkpoint) {
        show("checkpoint", checkpoint.toByteArray(), "");
    }

    static void show(String kind, byte[] bytes, String text) {
        System.out.println("SHOWN " + kind + " " + HexFormat.of().formatHex(bytes) + " " + text);
    }

    @Override
    public void close() throws PulsarClientException {
        client.close();
    }
}
