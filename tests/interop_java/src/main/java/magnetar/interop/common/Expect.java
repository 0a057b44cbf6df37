package magnetar.interop.common;

/** Expectations of scenarios. */
public final class Expect {
    private Expect() {
    }

    /** Something of a client that may refuse. */
    @FunctionalInterface
    public interface Attempt {
        void run() throws Exception;
    }

    public static void that(boolean holds, String otherwise) {
        if (!holds) {
            throw new AssertionError(otherwise);
        }
    }

    public static void equal(Object expected, Object found, String what) {
        that(expected.equals(found), what + ": expected " + expected + ", found " + found);
    }

    /** It is refused with that error, or with one that has it as a cause. */
    public static void refused(Class<? extends Exception> error, String what, Attempt attempt) {
        try {
            attempt.run();
        } catch (Exception found) {
            for (Throwable cause = found; cause != null; cause = cause.getCause()) {
                if (error.isInstance(cause)) {
                    return;
                }
            }
            throw new AssertionError(
                    what + ": expected " + error.getSimpleName() + ", found " + found, found);
        }
        throw new AssertionError(what + ": expected " + error.getSimpleName() + ", found nothing");
    }
}
