package magnetar.interop.common;

import java.util.List;

/** One thing that must work through a client of kind `S`; it throws what is wrong. */
@FunctionalInterface
public interface ScenarioOf<S> {
    void run(S server, List<String> arguments) throws Exception;
}
