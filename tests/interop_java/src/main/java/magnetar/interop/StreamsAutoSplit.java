package magnetar.interop;

/** As before, but the topic splits by itself: it gets more consumers than it has segments. */
final class StreamsAutoSplit extends StreamsShare {
    @Override
    void beforeConsumers(Server server, String name) throws Exception {
        server.setAutoScale(name, "{\"enabled\": true, \"splitCooldownSeconds\": 1}");
    }

    @Override
    void withConsumers(Server server, String name) {
    }
}
