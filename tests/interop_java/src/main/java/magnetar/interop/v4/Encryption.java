package magnetar.interop.v4;

import java.util.List;
import magnetar.interop.common.Expect;
import magnetar.interop.common.PemKeys;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerCryptoFailureAction;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClientException.BrokerMetadataException;
import org.apache.pulsar.client.api.SubscriptionType;

/** The server passes on what it cannot read, and can ask for it. */
final class Encryption implements Scenario {
    private static final int COUNT = 5;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        try (PemKeys keys = new PemKeys()) {
            for (boolean batches : List.of(false, true)) {
                passesUntouched(server, keys, batches);
            }
            isRequired(server, keys);
        }
    }

    private static void passesUntouched(Server server, PemKeys keys, boolean batches)
            throws Exception {
        String topic = server.topic("encrypted");
        try (Consumer<String> consumer =
                        server.consumers(topic, "s", SubscriptionType.Exclusive)
                                .defaultCryptoKeyReader(keys.privateKey().toUri().toString())
                                .subscribe();
                Consumer<String> sealed =
                        server.consumers(topic, "sealed", SubscriptionType.Exclusive)
                                .cryptoFailureAction(ConsumerCryptoFailureAction.CONSUME)
                                .subscribe();
                Producer<String> producer =
                        encrypting(server, keys, topic).enableBatching(batches).create()) {
            for (String value : Values.send(producer, null, "secret", COUNT)) {
                Expect.equal(value, consumer.receive().getValue(), "what was decrypted");
            }
            Message<String> message = sealed.receive();
            Expect.that(message.getEncryptionCtx().isPresent(), "it is not said to be encrypted");
            String seen = new String(message.getData());
            Expect.that(!seen.contains("secret"), "it can be read: " + seen);
        }
    }

    private static void isRequired(Server server, PemKeys keys) throws Exception {
        String namespace = server.namespace("locked");
        server.call("POST", "namespaces/" + namespace + "/encryptionRequired", "true");
        String topic = "persistent://" + namespace + "/x";
        server.refusesProducer(BrokerMetadataException.class, topic);
        try (Producer<String> producer = encrypting(server, keys, topic).create()) {
            producer.send("secret");
        }
    }

    private static ProducerBuilder<String> encrypting(Server server, PemKeys keys, String topic) {
        return server.producers(topic)
                .addEncryptionKey("k")
                .defaultCryptoKeyReader(keys.publicKey().toUri().toString());
    }
}
