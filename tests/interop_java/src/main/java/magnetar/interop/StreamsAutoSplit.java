package magnetar.interop;

/** As before, but the topic splits by itself: it has more consumers than segments. */
final class StreamsAutoSplit extends StreamsShare {
    @Override
    void split(Server server, String name) throws Exception {
        server.setAutoScale(name, "{\"enabled\": true, \"splitCooldownSeconds\": 1}");
    }
}
