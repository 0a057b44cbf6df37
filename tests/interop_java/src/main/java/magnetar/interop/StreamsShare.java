package magnetar.interop;

import java.time.Duration;
import java.util.List;
import magnetar.interop.common.Expect;
import magnetar.interop.common.Limits;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** After a split two stream consumers share a topic, each with keys of its own. */
class StreamsShare implements Scenario {
    private static final int COUNT = 100;
    private static final int ROUNDS = 10;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        String name = server.freshName("streams-share");
        String topic = server.create(name, 1);
        beforeConsumers(server, name);
        Sent sent = new Sent();
        Received ofOne = new Received();
        Received ofTwo = new Received();
        try (Producer<String> producer = server.producer(topic);
                StreamConsumer<String> one = consumer(server, topic, "one");
                StreamConsumer<String> two = consumer(server, topic, "two")) {
            sent.keyed(producer, COUNT);
            takeBoth(one, ofOne, two, ofTwo, sent);
            withConsumers(server, name);
            // How soon a client has heard of its new share is its own affair: more rounds, until
            // both had some.
            int before = least(ofOne, ofTwo);
            for (int round = 0; round < ROUNDS && before == least(ofOne, ofTwo); round++) {
                sent.keyed(producer, COUNT);
                takeBoth(one, ofOne, two, ofTwo, sent);
            }
            Expect.that(least(ofOne, ofTwo) > before,
                    "shares are " + ofOne.values().size() + " and " + ofTwo.values().size());
        }
        ofOne.keepTheOrderOfEachKey();
        ofTwo.keepTheOrderOfEachKey();
        Received all = new Received();
        all.values().addAll(ofOne.values());
        all.values().addAll(ofTwo.values());
        all.areExactly(sent.values());
    }

    void beforeConsumers(Server server, String name) throws Exception {
    }

    void withConsumers(Server server, String name) throws Exception {
        server.split(name, 0);
    }

    private static int least(Received one, Received two) {
        return Math.min(one.values().size(), two.values().size());
    }

    private static StreamConsumer<String> consumer(Server server, String topic, String name)
            throws Exception {
        return server.streams("s").topic(topic).consumerName(name).subscribe();
    }

    private static void takeBoth(
            StreamConsumer<String> one, Received ofOne,
            StreamConsumer<String> two, Received ofTwo, Sent sent) throws Exception {
        long deadline = System.nanoTime() + Limits.PATIENCE.toNanos();
        Duration turn = Duration.ofMillis(5);
        while (ofOne.values().size() + ofTwo.values().size() < sent.values().size()) {
            Expect.that(System.nanoTime() < deadline, "of " + sent.values().size()
                    + " messages came " + ofOne.values().size() + " and " + ofTwo.values().size());
            ofOne.takeOne(one::receive, turn, m -> one.acknowledgeCumulative(m.id()));
            ofTwo.takeOne(two::receive, turn, m -> two.acknowledgeCumulative(m.id()));
        }
    }
}
