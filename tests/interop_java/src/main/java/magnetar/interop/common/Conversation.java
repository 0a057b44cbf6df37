package magnetar.interop.common;

import java.io.BufferedReader;
import java.io.IOException;
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
 * Runs the scenarios that it is told to.
 *
 * <p>It reads them from the input, one a line, with arguments after the name, unless they were
 * given. Each ends with one line on the output: `PASS name` or `FAIL name reason`. What a scenario
 * wants looked at comes before that, as `SHOWN kind hex text`; what it wants done, as `ASK what`,
 * and then it waits for a line `DONE`.
 */
public final class Conversation<S> {
    private static final BufferedReader INPUT =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));

    private final Map<String, ? extends ScenarioOf<S>> scenarios;
    private final S server;

    public Conversation(Map<String, ? extends ScenarioOf<S>> scenarios, S server) {
        this.scenarios = new TreeMap<>(scenarios);
        this.server = server;
    }

    /** Has the other side do something; only for a scenario, while it runs. */
    public static void ask(String what) throws IOException {
        System.out.println("ASK " + what);
        Expect.equal("DONE", INPUT.readLine(), "the answer to " + what);
    }

    /** Those scenarios, or the ones that the input names; whether all passed. */
    public boolean run(List<String> names) throws IOException, InterruptedException {
        boolean passed = true;
        for (String name : names.equals(List.of("all")) ? scenarios.keySet() : names) {
            passed &= runOne(List.of(name));
        }
        if (names.isEmpty()) {
            for (String line = INPUT.readLine(); line != null; line = INPUT.readLine()) {
                passed &= runOne(List.of(line.split(" ")));
            }
        }
        return passed;
    }

    private boolean runOne(List<String> words) throws InterruptedException {
        String name = words.get(0);
        ScenarioOf<S> scenario = scenarios.get(name);
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
            task.get(Limits.SCENARIO.toSeconds(), TimeUnit.SECONDS);
        } catch (ExecutionException error) {
            failure = described(error.getCause());
        } catch (TimeoutException error) {
            failure = "not done in " + Limits.SCENARIO.toSeconds() + " s: "
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
