package magnetar.interop.v4;

import java.util.List;
import magnetar.interop.common.Expect;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClientException.IncompatibleSchemaException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.schema.GenericRecord;
import org.apache.pulsar.common.schema.KeyValue;
import org.apache.pulsar.common.schema.KeyValueEncodingType;

/** What a producer or consumer may bring beside the schema that a topic has. */
final class SchemaRules implements Scenario {
    /** The first version; its name in Avro holds a dollar. */
    public static final class Order {
        public int id;
        public String item;
    }

    /** A later one: fields of objects may be null, which is their default. */
    public static final class LaterOrder {
        public int id;
        public String item;
        public String customer;
    }

    /** What fits neither. */
    public static final class OtherOrder {
        public String id;
    }

    /** A schema for a class, of a kind. */
    private interface Kind {
        <T> Schema<T> of(Class<T> values);
    }

    @Override
    public void run(Server server, List<String> arguments) throws Exception {
        evolves(server, "avro", Schema::AVRO);
        evolves(server, "json", Schema::JSON);
        for (KeyValueEncodingType encoding : KeyValueEncodingType.values()) {
            pairs(server, encoding);
        }
        primitives(server);
        whateverThereIs(server);
    }

    private static void evolves(Server server, String name, Kind kind) throws Exception {
        String topic = server.topic("schema-" + name);
        bring(server, topic, kind.of(Order.class));
        bring(server, topic, kind.of(LaterOrder.class));
        bring(server, topic, kind.of(Order.class));
        refused(server, topic, kind.of(OtherOrder.class));
        refused(server, topic, Schema.STRING);
        read(server, topic, kind.of(LaterOrder.class));
        read(server, topic, kind.of(Order.class));
    }

    private static void pairs(Server server, KeyValueEncodingType encoding) throws Exception {
        String topic = server.topic("schema-pairs");
        Schema<KeyValue<String, Order>> pair =
                Schema.KeyValue(Schema.STRING, Schema.AVRO(Order.class), encoding);
        try (Consumer<KeyValue<String, Order>> consumer = server.consumer(topic, pair);
                Producer<KeyValue<String, Order>> producer = server.producer(topic, pair)) {
            Order sent = new Order();
            sent.id = 7;
            sent.item = "book";
            producer.send(new KeyValue<>("key", sent));
            KeyValue<String, Order> found = consumer.receive().getValue();
            Expect.equal("key", found.getKey(), "the key");
            Expect.equal("book", found.getValue().item, "the item");
        }
        bring(server, topic, Schema.KeyValue(Schema.STRING, Schema.AVRO(LaterOrder.class), encoding));
        refused(server, topic, Schema.KeyValue(Schema.STRING, Schema.AVRO(OtherOrder.class), encoding));
        refused(server, topic, Schema.KeyValue(Schema.INT32, Schema.AVRO(Order.class), encoding));
        refused(server, topic, Schema.KeyValue(Schema.STRING, Schema.JSON(Order.class), encoding));
    }

    private static void primitives(Server server) throws Exception {
        List<Schema<?>> all = List.of(
                Schema.STRING, Schema.BOOL, Schema.INT8, Schema.INT16, Schema.INT32, Schema.INT64,
                Schema.FLOAT, Schema.DOUBLE, Schema.DATE, Schema.TIME, Schema.TIMESTAMP,
                Schema.INSTANT, Schema.LOCAL_DATE, Schema.LOCAL_TIME, Schema.LOCAL_DATE_TIME);
        for (Schema<?> schema : all) {
            String topic = server.topic("schema-primitive");
            bring(server, topic, schema);
            read(server, topic, schema);
            refused(server, topic, Schema.AVRO(Order.class));
        }
    }

    /** Consumers of whatever there is are no reason to refuse the first schema. */
    private static void whateverThereIs(Server server) throws Exception {
        String topic = server.topic("schema-whatever");
        try (Consumer<GenericRecord> any = server.consumer(topic, Schema.AUTO_CONSUME())) {
            read(server, topic, Schema.AVRO(Order.class));
            refused(server, topic, Schema.STRING);
            try (Producer<Order> producer = server.producer(topic, Schema.AVRO(Order.class))) {
                Order sent = new Order();
                sent.id = 7;
                producer.send(sent);
            }
            Message<GenericRecord> found = any.receive();
            Expect.equal(7, found.getValue().getField("id"), "the id");
            bring(server, topic, Schema.AUTO_PRODUCE_BYTES());
        }
    }

    private static void bring(Server server, String topic, Schema<?> schema) throws Exception {
        server.producer(topic, schema).close();
    }

    private static void read(Server server, String topic, Schema<?> schema) throws Exception {
        server.consumer(topic, schema).close();
    }

    private static void refused(Server server, String topic, Schema<?> schema) {
        String what = "a schema of " + schema.getSchemaInfo().getType();
        Expect.refused(IncompatibleSchemaException.class, what, () -> bring(server, topic, schema));
        Expect.refused(IncompatibleSchemaException.class, what, () -> read(server, topic, schema));
    }
}
