package main

import (
	"bytes"
	"fmt"
	"reflect"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsaradmin/pkg/utils"
)

type order struct {
	ID   int    `json:"id" avro:"id"`
	Item string `json:"item" avro:"item"`
}

const orderDefinition = `{"type":"record","name":"Order","namespace":"shop","fields":` +
	`[{"name":"id","type":"int"},{"name":"item","type":"string"}]}`

// batches: every compression, batched and not; payloads, keys, properties and order are kept.
func batches(s *stage) {
	client := s.client()
	kinds := map[string]pulsar.CompressionType{
		"none": pulsar.NoCompression, "lz4": pulsar.LZ4, "zlib": pulsar.ZLib, "zstd": pulsar.ZSTD,
		"snappy": pulsar.SNAPPY,
	}
	const count = 120
	for name, kind := range kinds {
		for _, single := range []bool{true, false} {
			topic := s.topic(fmt.Sprint(name, single))
			from := consumer(client, topic)
			to := producer(client, pulsar.ProducerOptions{
				Topic: topic, CompressionType: kind, DisableBatching: single,
				BatchingMaxMessages: 50, BatchingMaxPublishDelay: time.Hour,
			})
			messages := make([]pulsar.ProducerMessage, count)
			for index := range messages {
				messages[index] = pulsar.ProducerMessage{
					Payload:    bytes.Repeat([]byte{byte(index)}, 100+index),
					Key:        fmt.Sprint(index % 5),
					Properties: map[string]string{"number": fmt.Sprint(index)},
					EventTime:  time.UnixMilli(int64(index + 1)),
				}
			}
			ids := sendTogether(to, messages)
			for index, sent := range messages {
				message := receive(from)
				must(from.Ack(message))
				expect(bytes.Equal(message.Payload(), sent.Payload), "%s: payload %d", topic, index)
				expect(message.Key() == sent.Key, "%s: key %q", topic, message.Key())
				expect(message.Properties()["number"] == fmt.Sprint(index), "%s: property", topic)
				expect(message.EventTime().Equal(sent.EventTime), "%s: event time", topic)
				found := fmt.Sprint(message.ID().LedgerID(), message.ID().EntryID(), message.ID().BatchIdx())
				said := fmt.Sprint(ids[index].LedgerID(), ids[index].EntryID(), ids[index].BatchIdx())
				expect(found == said, "%s: received as %s, sent as %s", topic, found, said)
			}
			entries := ids[count-1].EntryID() - ids[0].EntryID() + 1
			expect((entries == count) == single, "%s: %d entries", topic, entries)
		}
	}
}

// chunks: a message larger than the largest comes back whole.
func chunks(s *stage) {
	client, topic := s.client(), s.topic("large")
	from := consumer(client, topic)
	to := producer(client, pulsar.ProducerOptions{
		Topic: topic, DisableBatching: true, EnableChunking: true, ChunkMaxMessageSize: 64 * 1024,
	})
	payload := bytes.Repeat([]byte("0123456789abcdef"), 64*1024)
	send(to, pulsar.ProducerMessage{Payload: payload})
	send(to, pulsar.ProducerMessage{Payload: []byte("small")})
	first := receive(from)
	expect(bytes.Equal(first.Payload(), payload), "%d bytes", len(first.Payload()))
	must(from.Ack(first))
	equal(take(from, 1), []string{"small"}, "behind it")
}

// schemas: JSON, Avro and a primitive one are registered, and known by their version to who reads.
func schemas(s *stage) {
	client := s.client()
	made := map[string]pulsar.Schema{
		"json": pulsar.NewJSONSchema(orderDefinition, nil),
		"avro": pulsar.NewAvroSchema(orderDefinition, nil),
	}
	for name, schema := range made {
		topic := s.topic(name)
		to := producer(client, pulsar.ProducerOptions{Topic: topic, Schema: schema})
		knowing := subscribe(client, pulsar.ConsumerOptions{Topic: topic, Schema: schema})
		asking := subscribe(client, pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "asking"})
		sent := order{7, "book"}
		send(to, pulsar.ProducerMessage{Value: &sent})
		for _, from := range []pulsar.Consumer{knowing, asking} {
			message, found := receive(from), order{}
			must(message.GetSchemaValue(&found))
			expect(found == sent, "%s: %v", name, found)
			expect(len(message.SchemaVersion()) == 8, "%s: version %v", name, message.SchemaVersion())
		}
		_, err := client.CreateProducer(pulsar.ProducerOptions{
			Topic: topic, Schema: pulsar.NewStringSchema(nil),
		})
		refused(err, "IncompatibleSchema")
	}
	topic := s.topic("text")
	to := producer(client, pulsar.ProducerOptions{Topic: topic, Schema: pulsar.NewStringSchema(nil)})
	from := subscribe(client, pulsar.ConsumerOptions{
		Topic: topic, Schema: pulsar.NewStringSchema(nil),
	})
	text := "größer"
	send(to, pulsar.ProducerMessage{Value: text})
	var found *string
	must(receive(from).GetSchemaValue(&found))
	expect(*found == text, "a text: %q", *found)
}

// plainBytes: a schema of bytes is none; whoever reads gets them, with that schema or without one.
func plainBytes(s *stage) {
	client, topic := s.client(), s.topic("raw")
	schema := pulsar.NewBytesSchema(nil)
	knowing := subscribe(client, pulsar.ConsumerOptions{Topic: topic, Schema: schema})
	raw := subscribe(client, pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "raw"})
	for _, batching := range []bool{true, false} {
		to := producer(client, pulsar.ProducerOptions{
			Topic: topic, Schema: schema, DisableBatching: !batching,
		})
		send(to, pulsar.ProducerMessage{Value: []byte{1, 2, 3}})
		message, found := receive(knowing), []byte{}
		must(message.GetSchemaValue(&found))
		expect(bytes.Equal(found, []byte{1, 2, 3}), "%v", found)
		expect(len(message.SchemaVersion()) == 0, "a version: %v", message.SchemaVersion())
		expect(bytes.Equal(receive(raw).Payload(), []byte{1, 2, 3}), "raw")
	}
}

// partitioned: a key stays in its partition, and consumers get all partitions, later ones too.
func partitioned(s *stage) {
	client, topic, admin := s.client(), s.topic("parts"), s.admin()
	must(admin.Topics().Create(topicName(topic), 3))
	from := subscribe(client, pulsar.ConsumerOptions{
		Topic: topic, AutoDiscoveryPeriod: soon, Type: pulsar.Shared,
	})
	to := producer(client, pulsar.ProducerOptions{
		Topic: topic, PartitionsAutoDiscoveryInterval: soon,
	})
	place, wanted := map[string]int32{}, texts("m", 60)
	for index, text := range wanted {
		send(to, pulsar.ProducerMessage{Payload: []byte(text), Key: fmt.Sprint(index % 12)})
	}
	var found []string
	for range wanted {
		message := receive(from)
		must(from.Ack(message))
		found = append(found, string(message.Payload()))
		partition, known := place[message.Key()]
		expect(!known || partition == message.ID().PartitionIdx(), "a key in two partitions")
		place[message.Key()] = message.ID().PartitionIdx()
	}
	sameSet(found, wanted, "of all partitions")
	must(admin.Topics().Update(topicName(topic), 5))
	single := single(client, topic+"-partition-4")
	send(single, pulsar.ProducerMessage{Payload: []byte("new")})
	equal(take(from, 1), []string{"new"}, "of a partition that came later")
	parts, err := client.TopicPartitions(topic)
	must(err)
	expect(len(parts) == 5, "partitions: %v", parts)
	stats, err := admin.Topics().GetPartitionedStats(topicName(topic), true)
	must(err)
	expect(len(stats.Partitions) == 5, "statistics of %d partitions", len(stats.Partitions))
}

// access: one producer alone, one that waits for it, and one that takes its place.
func access(s *stage) {
	client, topic := s.client(), s.topic("own")
	options := func(mode pulsar.ProducerAccessMode) pulsar.ProducerOptions {
		return pulsar.ProducerOptions{Topic: topic, ProducerAccessMode: mode, DisableBatching: true}
	}
	first := producer(client, options(pulsar.ProducerAccessModeExclusive))
	_, err := client.CreateProducer(options(pulsar.ProducerAccessModeExclusive))
	refused(err, "ProducerFenced")
	_, err = client.CreateProducer(options(pulsar.ProducerAccessModeShared))
	refused(err, "ProducerBusy")
	send(first, pulsar.ProducerMessage{Payload: []byte("first")})
	first.Close()
	second := producer(client, options(pulsar.ProducerAccessModeWaitForExclusive))
	send(second, pulsar.ProducerMessage{Payload: []byte("second")})
	equal(take(consumer(client, topic), 2), []string{"first", "second"}, "of both")
}

// tableView: the last value of each key.
func tableView(s *stage) {
	client, topic := s.client(), s.topic("table")
	to := single(client, topic)
	for index := range 30 {
		send(to, pulsar.ProducerMessage{Key: fmt.Sprint(index % 3), Payload: fmt.Append(nil, index)})
	}
	var last []byte
	table, err := client.CreateTableView(pulsar.TableViewOptions{
		Topic: topic, Schema: pulsar.NewBytesSchema(nil), SchemaValueType: reflect.TypeOf(last),
	})
	must(err)
	defer table.Close()
	expect(table.Size() == 3, "%d keys", table.Size())
	found := string(table.Get("1").([]byte))
	expect(found == "28", "the last value is %s", found)
}

// adminClient: the official one for Go reads what it knows of topics.
func adminClient(s *stage) {
	client, topic, admin := s.client(), s.topic("seen"), s.admin()
	from := consumer(client, topic)
	id := send(single(client, topic), pulsar.ProducerMessage{
		Payload: []byte("shown"), Properties: map[string]string{"colour": "red"},
	})
	name := topicName(topic)
	stats, err := admin.Topics().GetStats(name)
	must(err)
	expect(len(stats.Publishers) == 1, "%d publishers", len(stats.Publishers))
	expect(len(stats.Subscriptions["s"].Consumers) == 1, "consumers: %v", stats.Subscriptions)
	expect(stats.Subscriptions["s"].LastConsumedFlowTimestamp > 0, "no time of permits")
	expect(stats.TopicCreationTimeStamp > 0, "no time of creation")
	expect(stats.LastPublishTimestamp >= stats.TopicCreationTimeStamp, "published before it was created")
	short, err := admin.Topics().GetStatsWithOption(name, utils.GetStatsOptions{
		ExcludePublishers: true, ExcludeConsumers: true,
	})
	must(err)
	expect(len(short.Publishers) == 0, "publishers: %v", short.Publishers)
	expect(len(short.Subscriptions["s"].Consumers) == 0, "consumers: %v", short.Subscriptions)
	entry, err := admin.Subscriptions().GetMessageByID(name, id.LedgerID(), id.EntryID())
	must(err)
	expect(string(entry.GetPayload()) == "shown", "an entry: %q", entry.GetPayload())
	expect(entry.GetProperties()["colour"] == "red", "its properties: %v", entry.GetProperties())
	peeked, err := admin.Subscriptions().PeekMessages(name, "s", 1)
	must(err)
	expect(string(peeked[0].GetPayload()) == "shown", "a peek: %q", peeked[0].GetPayload())
	equal(take(from, 1), []string{"shown"}, "received")
}

// overHTTP: what a client with an http:// address looks up it finds.
func overHTTP(s *stage) {
	client, topic := s.clientAt(s.adminURL, discarded), s.topic("web")
	schema := pulsar.NewJSONSchema(orderDefinition, nil)
	to := producer(client, pulsar.ProducerOptions{Topic: topic, Schema: schema})
	from := subscribe(client, pulsar.ConsumerOptions{
		TopicsPattern: "public/default/" + s.name + "-.*", AutoDiscoveryPeriod: soon,
	})
	sent, found := order{1, "pen"}, order{}
	send(to, pulsar.ProducerMessage{Value: &sent})
	message := receive(from)
	must(message.GetSchemaValue(&found))
	expect(found == sent, "%v", found)
	must(from.Ack(message))
	must(s.admin().Topics().Create(topicName(s.topic("parts")), 2))
	parts, err := client.TopicPartitions(s.topic("parts"))
	must(err)
	expect(len(parts) == 2, "partitions: %v", parts)
}
