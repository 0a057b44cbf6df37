package magnetar.interop;

import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.impl.BatchMessageIdImpl;
import org.apache.pulsar.client.impl.MessageIdImpl;
import org.apache.pulsar.client.impl.v5.MessageIdV5;

/**
 * Shows the bytes of ids that the other side knows by heart, and what the client makes of bytes
 * that the other side wrote: `message-id=HEX` and `checkpoint=HEX`.
 */
final class ByteForms implements Scenario {
    private static final String PARENT = "topic://public/default/x";

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        if (arguments.isEmpty()) {
            showKnown();
        }
        for (String argument : arguments) {
            int end = argument.indexOf('=');
            byte[] bytes = HexFormat.of().parseHex(argument.substring(end + 1));
            if (argument.startsWith("message-id=")) {
                Server.show(org.apache.pulsar.client.api.v5.MessageId.fromByteArray(bytes));
            } else {
                Server.show(Checkpoint.fromByteArray(bytes));
            }
        }
    }

    private static void showKnown() {
        MessageId single = new MessageIdImpl(5, 7, -1);
        MessageId batched = new BatchMessageIdImpl(5, 7, -1, 2, 10, null);
        Map<Long, MessageId> positions = new TreeMap<>(Map.of(1L, batched, 3L, single));
        show("v4-single", single.toByteArray());
        show("v4-batched", batched.toByteArray());
        show("v4-partition", new MessageIdImpl(5, 7, 4).toByteArray());
        show("v4-earliest", MessageId.earliest.toByteArray());
        show("v4-latest", MessageId.latest.toByteArray());
        show("single", new MessageIdV5(single, 3).toByteArray());
        show("batched", new MessageIdV5(batched, 3).toByteArray());
        show("positions", new MessageIdV5(single, 3, positions).toByteArray());
        show("parent", new MessageIdV5(single, 3, positions, PARENT).toByteArray());
        show("topics", new MessageIdV5(
                single, 3, Map.of(), PARENT, Map.of(PARENT, positions)).toByteArray());
        show("earliest", org.apache.pulsar.client.api.v5.MessageId.earliest().toByteArray());
        show("latest", org.apache.pulsar.client.api.v5.MessageId.latest().toByteArray());
        show("checkpoint-earliest", Checkpoint.earliest().toByteArray());
        show("checkpoint-latest", Checkpoint.latest().toByteArray());
    }

    private static void show(String name, byte[] bytes) {
        Server.show(name, bytes, "");
    }
}
