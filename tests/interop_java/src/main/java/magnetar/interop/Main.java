package magnetar.interop;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * Runs scenarios against one server: `Main SERVICE_URL ADMIN_URL [SCENARIO...]`.
 *
 * <p>Without scenarios it reads them from its input, one a line, with arguments after the name.
 * Each ends with one line on the output: `PASS name` or `FAIL name reason`. What a scenario wants
 * looked at comes before that, as `SHOWN kind hex text`. The code is 1 if one failed.
 */
public final class Main {
    private static final long SCENARIO_SECONDS = 50;

    private static final Map<String, Scenario> SCENARIOS = new TreeMap<>(Map.ofEntries(
            Map.entry("auto-creation", new AutoCreation()),
            Map.entry("byte-forms", new ByteForms()),
            Map.entry("checkpoint-group", new CheckpointGroup()),
            Map.entry("checkpoint-resume", new CheckpointResume()),
            Map.entry("deduplication", new Deduplication()),
            Map.entry("deduplication-across-split", new DeduplicationAcrossSplit()),
            Map.entry("migration", new Migration()),
            Map.entry("migrated-stream", new MigratedStream()),
            Map.entry("namespace-queue", new NamespaceQueue()),
            Map.entry("namespace-stream", new NamespaceStream()),
            Map.entry("queue", new Queue()),
            Map.entry("queue-at-latest", new QueueAtLatest()),
            Map.entry("queue-redelivery", new QueueRedelivery()),
            Map.entry("regular-topic", new RegularTopic()),
            Map.entry("stream", new Stream()),
            Map.entry("stream-replay", new StreamReplay()),
            Map.entry("stream-split-merge", new StreamSplitMerge()),
            Map.entry("streams-auto-split", new StreamsAutoSplit()),
            Map.entry("streams-share", new StreamsShare())));

    private Main() {
    }

    public static void main(String[] arguments) throws Exception {
        boolean passed = true;
        try (Server server = new Server(arguments[0], arguments[1])) {
            if (arguments.length > 2) {
                List<String> names = Arrays.asList(arguments).subList(2, arguments.length);
                for (String name : names.equals(List.of("all")) ? SCENARIOS.keySet() : names) {
                    passed &= run(server, List.of(name));
                }
            } else {
                BufferedReader input = new BufferedReader(
                        new InputStreamReader(System.in, StandardCharsets.UTF_8));
                for (String line = input.readLine(); line != null; line = input.readLine()) {
                    passed &= run(server, List.of(line.split(" ")));
                }
            }
        }
        System.out.flush();
        // A scenario that hangs must not keep the process.
        Runtime.getRuntime().halt(passed ? 0 : 1);
    }

    private static boolean run(Server server, List<String> words) throws InterruptedException {
        String name = words.get(0);
        Scenario scenario = SCENARIOS.get(name);
        if (scenario == null) {
            System.out.println("FAIL " + name + " there is no such scenario");
            return false;
        }
        FutureTask<Void> task = new FutureTask<>(() -> {
            scenario.run(server, words.subList(1, words.size()));
            return null;
        });
        Thread thread = new Thread(task, name);
        thread.setDaemon(true);
        long started = System.nanoTime();
        thread.start();
        String failure = null;
        try {
            task.get(SCENARIO_SECONDS, TimeUnit.SECONDS);
        } catch (ExecutionException error) {
            failure = described(error.getCause());
        } catch (TimeoutException error) {
            failure = "not done in " + SCENARIO_SECONDS + " s: "
                    + Arrays.toString(thread.getStackTrace());
            thread.interrupt();
        }
        long taken = TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - started);
        System.err.println(name + " took " + taken + " ms");
        System.out.println(failure == null ? "PASS " + name : "FAIL " + name + " " + failure);
        return failure == null;
    }

    /** The error in one line; of anything but a failed expectation, with its trace on stderr. */
    private static String described(Throwable error) {
        if (!(error instanceof AssertionError)) {
            StringWriter trace = new StringWriter();
            error.printStackTrace(new PrintWriter(trace));
            System.err.println(trace);
        }
        return (error instanceof AssertionError ? error.getMessage() : error.toString())
                .replace('\n', ' ');
    }
}
