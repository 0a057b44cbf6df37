package magnetar.interop;

import java.util.List;

/** One thing that must work through the official client; it throws what is wrong. */
@FunctionalInterface
interface Scenario {
    void run(Server server, List<String> arguments) throws Exception;
}
