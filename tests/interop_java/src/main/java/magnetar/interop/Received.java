package magnetar.interop;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import magnetar.interop.common.Expect;
import magnetar.interop.common.Limits;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.PulsarClientException;

/** What consumers were given, in the order of arrival. */
final class Received {
    private static final Duration TURN = Duration.ofMillis(20);
    /** How long nothing must come before nothing more is taken to come. */
    private static final Duration QUIET = Duration.ofMillis(300);
    private static final int SHOWN_MAX = 5;

    private final List<String> values = new ArrayList<>();

    /** Where messages come from; null if none came in that time. */
    @FunctionalInterface
    interface Source {
        Message<String> receive(Duration patience) throws PulsarClientException;
    }

    /** What is done with a message that came. */
    @FunctionalInterface
    interface Use {
        void accept(Message<String> message);
    }

    List<String> values() {
        return values;
    }

    /** Exactly that many more messages; which ones is looked at later. */
    Received take(Source source, int count, Use use) throws PulsarClientException {
        long deadline = System.nanoTime() + Limits.PATIENCE.toNanos();
        int wanted = values.size() + count;
        while (values.size() < wanted && System.nanoTime() < deadline) {
            takeOne(source, TURN, use);
        }
        Expect.that(values.size() == wanted, "of " + wanted + " messages came " + values.size());
        return this;
    }

    boolean takeOne(Source source, Duration patience, Use use) throws PulsarClientException {
        Message<String> message = source.receive(patience);
        if (message == null) {
            return false;
        }
        values.add(message.value());
        use.accept(message);
        return true;
    }

    /** Until these have come, and nothing comes after them. */
    Received takeAll(Source source, Collection<String> sent, Use use)
            throws PulsarClientException {
        long deadline = System.nanoTime() + Limits.PATIENCE.toNanos();
        while (values.size() < sent.size() && System.nanoTime() < deadline) {
            takeOne(source, TURN, use);
        }
        while (takeOne(source, QUIET, use) && System.nanoTime() < deadline) {
            continue;
        }
        areExactly(sent);
        return this;
    }

    /** Nothing comes for a while. */
    static void nothing(Source source) throws PulsarClientException {
        Message<String> message = source.receive(QUIET);
        Expect.that(message == null, "nothing was to come, there came "
                + (message == null ? "" : message.value()));
    }

    void areExactly(Collection<String> sent) {
        // Sets, not lists: to look for each of n messages in a list takes n times n steps.
        Set<String> came = new HashSet<>(values);
        Set<String> expected = new HashSet<>(sent);
        TreeSet<String> missing = new TreeSet<>(expected);
        missing.removeIf(came::contains);
        TreeSet<String> strange = new TreeSet<>(came);
        strange.removeIf(expected::contains);
        int duplicates = values.size() - came.size();
        Expect.that(missing.isEmpty() && strange.isEmpty() && duplicates == 0,
                "of " + sent.size() + " messages, " + missing.size() + " are missing "
                        + someOf(missing) + ", " + strange.size() + " were never sent "
                        + someOf(strange) + ", " + duplicates + " are duplicates");
    }

    private static List<String> someOf(Collection<String> found) {
        return found.stream().limit(SHOWN_MAX).toList();
    }

    /** Messages without a key go to all segments in turn, so they have no order. */
    void keepTheOrderOfEachKey() {
        Map<String, Integer> last = new HashMap<>();
        for (String value : values) {
            String key = value.substring(0, value.indexOf('/'));
            if (key.equals(Sent.NO_KEY)) {
                continue;
            }
            int number = Integer.parseInt(value.substring(key.length() + 1));
            Integer before = last.put(key, number);
            Expect.that(before == null || before < number,
                    "of key " + key + ", number " + number + " came after " + before);
        }
    }
}
