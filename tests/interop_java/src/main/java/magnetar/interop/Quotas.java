package magnetar.interop;

import java.util.List;
import java.util.concurrent.CompletableFuture;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;

/** Who sends to a segment with too large a backlog waits for room, or is told. */
final class Quotas implements Scenario {
    private static final int COUNT = 10;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        holds(server);
        fails(server);
    }

    private static void holds(Server server) throws Exception {
        Server.Own own = server.createApart("quota-hold", 1);
        try (QueueConsumer<String> queue = server.queues("q").topic(own.topic()).subscribe();
                Producer<String> producer = server.producer(own.topic())) {
            new Sent().unkeyed(producer, COUNT);
            // Any backlog is larger, and none is not.
            exceed(server, own, "producer_request_hold");
            CompletableFuture<MessageId> held =
                    producer.async().newMessage().value("held").send();
            Received received = new Received();
            received.take(queue::receive, COUNT, message -> queue.acknowledge(message.id()));
            held.get();
            received.take(queue::receive, 1, message -> queue.acknowledge(message.id()));
            Expect.equal("held", received.values().get(COUNT), "the last message");
        }
    }

    private static void fails(Server server) throws Exception {
        Server.Own own = server.createApart("quota-exception", 1);
        server.queues("q").topic(own.topic()).subscribe().close();
        try (Producer<String> producer = server.producer(own.topic())) {
            new Sent().unkeyed(producer, COUNT);
        }
        exceed(server, own, "producer_exception");
        server.refusesProducer("quota", own.topic());
    }

    private static void exceed(Server server, Server.Own own, String policy) throws Exception {
        server.call("POST", "namespaces/" + own.namespace() + "/backlogQuota",
                "{\"limitSize\": 1, \"policy\": \"" + policy + "\"}");
        server.call("GET", "brokers/backlog-quota-check", "");
    }
}
