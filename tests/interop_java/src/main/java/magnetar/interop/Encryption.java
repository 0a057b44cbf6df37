package magnetar.interop;

import java.util.List;
import magnetar.interop.common.PemKeys;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.auth.PemFileKeyProvider;
import org.apache.pulsar.client.api.v5.config.ConsumerEncryptionPolicy;
import org.apache.pulsar.client.api.v5.config.ProducerEncryptionPolicy;

/** Segments pass on what the server cannot read, over a split too; and they can ask for it. */
final class Encryption implements Scenario {
    private static final int COUNT = 10;

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        Server.Own own = server.createApart("encryption", 1);
        server.call("POST", "namespaces/" + own.namespace() + "/encryptionRequired", "true");
        try (PemKeys keys = new PemKeys()) {
            PemFileKeyProvider pem = PemFileKeyProvider.builder()
                    .publicKey("k", keys.publicKey())
                    .privateKey("k", keys.privateKey())
                    .build();
            try (QueueConsumer<String> queue = server.queues("q").topic(own.topic())
                            .encryptionPolicy(ConsumerEncryptionPolicy.builder()
                                    .privateKeyProvider(pem).build())
                            .subscribe();
                    Producer<String> producer = server.producers(own.topic())
                            .encryptionPolicy(ProducerEncryptionPolicy.builder()
                                    .publicKeyProvider(pem).keyName("k").build())
                            .create()) {
                Sent sent = new Sent().keyed(producer, COUNT);
                server.call("POST", own.path() + "/split/0", "");
                sent.keyed(producer, COUNT).batched(producer, COUNT);
                new Received().takeAll(queue::receive, sent.values(),
                        message -> queue.acknowledge(message.id()));
            }
        }
        server.refusesProducer("ncrypt", own.topic());
    }
}
