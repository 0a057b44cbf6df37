package magnetar.interop.common;

import java.time.Duration;

/** How long scenarios wait before they give up: many times what it takes on a busy machine. */
public final class Limits {
    /** For one thing that is waited for. */
    public static final Duration PATIENCE = Duration.ofSeconds(300);
    /** For a whole scenario; below the limit of the test that runs it. */
    public static final Duration SCENARIO = Duration.ofSeconds(500);

    private Limits() {
    }
}
