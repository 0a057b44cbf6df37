package magnetar.interop;

/** As before, but what is sent again goes to the children of the segment that has it. */
final class DeduplicationAcrossSplit extends Deduplication {
    @Override
    void between(Server server, String name) throws Exception {
        server.split(name, 0);
    }
}
