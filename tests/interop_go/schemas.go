package main

import (
	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsaradmin/pkg/utils"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// What may follow orderDefinition by any strategy that compares, and what by none. The names of the
// second are words that the client looks for in the text of an error.
const (
	largerOrder = `{"type":"record","name":"Order","namespace":"shop","fields":` +
		`[{"name":"id","type":"int"},{"name":"item","type":"string"},` +
		`{"name":"count","type":"int","default":1}]}`
	otherOrder = `{"type":"record","name":"TopicNotFound","fields":` +
		`[{"name":"id","type":"int"},{"name":"item","type":"boolean"},` +
		`{"name":"ProducerFenced","type":"int"}]}`
)

// schemaRules: what a producer or consumer may bring beside what the topic has.
func schemaRules(s *stage) {
	client := s.client()
	kinds := map[string]func(string) pulsar.Schema{
		"json": func(text string) pulsar.Schema { return pulsar.NewJSONSchema(text, nil) },
		"avro": func(text string) pulsar.Schema { return pulsar.NewAvroSchema(text, nil) },
	}
	for name, schema := range kinds {
		topic := s.topic(name)
		opened := func(text string) error {
			made, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic, Schema: schema(text)})
			if err == nil {
				made.Close()
			}
			return err
		}
		must(opened(orderDefinition))
		must(opened(largerOrder))
		must(opened("  " + orderDefinition))
		refused(opened(otherOrder), "IncompatibleSchema")
		_, err := client.Subscribe(pulsar.ConsumerOptions{
			Topic: topic, SubscriptionName: "s", Schema: schema(otherOrder),
		})
		refused(err, "IncompatibleSchema")
		subscribe(client, pulsar.ConsumerOptions{Topic: topic, Schema: schema(orderDefinition)})
		found, err := s.admin().Schemas().GetAllSchemas(topic)
		must(err)
		expect(len(found) == 2, "%s: %d versions", name, len(found))
	}
	simple := map[string]pulsar.Schema{
		"string": pulsar.NewStringSchema(nil), "int8": pulsar.NewInt8Schema(nil),
		"int16": pulsar.NewInt16Schema(nil), "int32": pulsar.NewInt32Schema(nil),
		"int64": pulsar.NewInt64Schema(nil), "float": pulsar.NewFloatSchema(nil),
		"double": pulsar.NewDoubleSchema(nil),
	}
	for name, schema := range simple {
		producer(client, pulsar.ProducerOptions{Topic: s.topic(name), Schema: schema})
	}
}

// schemaNative: messages of protobuf, which keep their name.
func schemaNative(s *stage) {
	client, topic := s.client(), s.topic("native")
	schema := pulsar.NewProtoNativeSchemaWithMessage(&timestamppb.Timestamp{}, nil)
	to := producer(client, pulsar.ProducerOptions{Topic: topic, Schema: schema})
	from := subscribe(client, pulsar.ConsumerOptions{Topic: topic, Schema: schema})
	send(to, pulsar.ProducerMessage{Value: &timestamppb.Timestamp{Seconds: 7}})
	found := timestamppb.Timestamp{}
	must(receive(from).GetSchemaValue(&found))
	expect(found.Seconds == 7, "%v", found.Seconds)
	_, err := client.CreateProducer(pulsar.ProducerOptions{
		Topic:  topic,
		Schema: pulsar.NewProtoNativeSchemaWithMessage(&durationpb.Duration{}, nil),
	})
	refused(err, "IncompatibleSchema")
}

// schemaAdmin: the registry by the admin client.
func schemaAdmin(s *stage) {
	topic, admin := s.topic("admin"), s.admin().Schemas()
	payload := func(text string) utils.PostSchemaPayload {
		return utils.PostSchemaPayload{SchemaType: "AVRO", Schema: text, Properties: map[string]string{}}
	}
	fits := func(text string) bool {
		found, err := admin.TestCompatibilityWithPostSchemaPayload(topic, payload(text))
		must(err)
		expect(found.SchemaCompatibilityStrategy == "FULL", "%v", found.SchemaCompatibilityStrategy)
		return found.IsCompatibility
	}
	version := func(text string) int64 {
		found, err := admin.GetVersionByPayload(topic, payload(text))
		must(err)
		return found
	}
	must(admin.CreateSchemaByPayload(topic, payload(orderDefinition)))
	expect(fits(orderDefinition) && fits(largerOrder) && !fits(otherOrder), "what fits")
	must(admin.CreateSchemaByPayload(topic, payload(largerOrder)))
	refused(admin.CreateSchemaByPayload(topic, payload(otherOrder)), "409")
	refused(admin.CreateSchemaByPayload(topic, payload("{}")), "422")
	equal([]int64{version(orderDefinition), version(largerOrder), version(otherOrder)},
		[]int64{0, 1, -1}, "versions")
	latest, err := admin.GetSchemaInfoWithVersion(topic)
	must(err)
	expect(latest.Version == 1 && string(latest.SchemaInfo.Schema) == largerOrder, "%v", latest)
	must(admin.DeleteSchema(topic))
	must(admin.DeleteSchema(topic))
	_, err = admin.GetSchemaInfo(topic)
	refused(err, "404")
	must(admin.CreateSchemaByPayload(topic, payload(otherOrder)))
	equal([]int64{version(otherOrder)}, []int64{3}, "behind the deletion")
	must(admin.ForceDeleteSchema(topic))
	must(admin.CreateSchemaByPayload(topic, payload(orderDefinition)))
	equal([]int64{version(orderDefinition)}, []int64{0}, "anew")
}
