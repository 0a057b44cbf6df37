package magnetar.interop;

/** Expectations of scenarios. */
final class Expect {
    private Expect() {
    }

    static void that(boolean holds, String otherwise) {
        if (!holds) {
            throw new AssertionError(otherwise);
        }
    }

    static void equal(Object expected, Object found, String what) {
        that(expected.equals(found), what + ": expected " + expected + ", found " + found);
    }
}
