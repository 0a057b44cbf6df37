package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

func exclusive(s *stage) {
	client, topic := s.client(), s.topic("own")
	from := consumer(client, topic)
	_, err := s.client().Subscribe(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "s"})
	refused(err, "ConsumerBusy")
	wanted := texts("m", 50)
	sendTogether(producer(client, pulsar.ProducerOptions{Topic: topic}), plain(wanted))
	equal(take(from, 50), wanted, "in order")
	last, err := from.GetLastMessageIDs()
	must(err)
	expect(len(last) == 1 && last[0].Topic() == topic, "last ids: %v", last)
	must(from.Unsubscribe())
	again := consumer(client, topic)
	equal(take(again, 50), wanted, "of a new subscription")
}

// several opens consumers of one subscription whose messages come by one channel.
func several(
	client pulsar.Client, count int, options pulsar.ConsumerOptions,
) ([]pulsar.Consumer, chan pulsar.ConsumerMessage) {
	options.MessageChannel = make(chan pulsar.ConsumerMessage, 10)
	options.ReceiverQueueSize = 10
	made := make([]pulsar.Consumer, count)
	for index := range made {
		options.Name = fmt.Sprintf("c%d", index)
		made[index] = subscribe(client, options)
	}
	return made, options.MessageChannel
}

func next(messages chan pulsar.ConsumerMessage) pulsar.ConsumerMessage {
	select {
	case message := <-messages:
		return message
	case <-time.After(patience):
		panic(failed("no message came"))
	}
}

func shared(s *stage) {
	client, topic := s.client(), s.topic("work")
	_, messages := several(client, 3, pulsar.ConsumerOptions{Topic: topic, Type: pulsar.Shared})
	wanted := texts("m", 90)
	sendAll(single(client, topic), nil, wanted)
	var found, names []string
	for range wanted {
		message := next(messages)
		must(message.Ack(message.Message))
		found = append(found, string(message.Payload()))
		names = append(names, message.Consumer.Name())
	}
	sameSet(found, wanted, "of all consumers")
	expect(len(slices.Compact(slices.Sorted(slices.Values(names)))) == 3, "not all worked")
}

func failover(s *stage) {
	client, topic := s.client(), s.topic("one")
	options := pulsar.ConsumerOptions{Topic: topic, Type: pulsar.Failover}
	open, messages := several(client, 2, options)
	to := single(client, topic)
	sendAll(to, nil, texts("before", 20))
	var found []string
	active := ""
	for range 20 {
		message := next(messages)
		must(message.AckID(message.ID()))
		found = append(found, string(message.Payload()))
		active = message.Consumer.Name()
	}
	equal(found, texts("before", 20), "of the active consumer")
	for _, each := range open {
		if each.Name() == active {
			each.Close()
		}
	}
	sendAll(to, nil, texts("after", 20))
	found = nil
	for len(found) < 20 {
		message := next(messages)
		must(message.Ack(message.Message))
		expect(message.Consumer.Name() != active, "of the closed consumer")
		// What it had acknowledged may be on its way still.
		if text := string(message.Payload()); text[0] == 'a' {
			found = append(found, text)
		}
	}
	equal(found, texts("after", 20), "of the one that took over")
}

// keyShared: each key in order, at one consumer at a time, while others come and go.
func keyShared(s *stage) {
	client, topic := s.client(), s.topic("keys")
	options := pulsar.ConsumerOptions{Topic: topic, Type: pulsar.KeyShared}
	open, messages := several(client, 2, options)
	options.MessageChannel = messages
	to := producer(client, pulsar.ProducerOptions{
		Topic: topic, BatcherBuilderType: pulsar.KeyBasedBatchBuilder,
	})
	const rounds, keys, perRound = 4, 16, 10
	last, names, number := map[string]int{}, map[string]bool{}, 0
	for round := range rounds {
		var sent []pulsar.ProducerMessage
		for range perRound * keys {
			key := fmt.Sprint(number % keys)
			sent = append(sent, pulsar.ProducerMessage{Key: key, Payload: fmt.Append(nil, number)})
			number++
		}
		sendTogether(to, sent)
		owner := map[string]string{}
		for range sent {
			message := next(messages)
			found := 0
			_, err := fmt.Sscan(string(message.Payload()), &found)
			must(err)
			before, known := last[message.Key()]
			expect(!known || found == before+keys, "key %s: %d after %d", message.Key(), found, before)
			last[message.Key()] = found
			name := message.Consumer.Name()
			expect(owner[message.Key()] == "" || owner[message.Key()] == name, "a key at two consumers")
			owner[message.Key()], names[name] = name, true
			must(message.Ack(message.Message))
		}
		if round == 1 {
			options.Name = "late"
			subscribe(client, options)
		}
		if round == 2 {
			open[0].Close()
		}
	}
	expect(len(names) == 3, "consumers with messages: %v", names)
}

// sticky: each consumer has the hash ranges that it names, and nobody else may have them.
func sticky(s *stage) {
	client, topic := s.client(), s.topic("ranges")
	lower, err := pulsar.NewKeySharedPolicySticky([]int{0, 32767})
	must(err)
	upper, err := pulsar.NewKeySharedPolicySticky([]int{32768, 65535})
	must(err)
	messages := make(chan pulsar.ConsumerMessage, 10)
	open := func(name string, policy *pulsar.KeySharedPolicy) {
		subscribe(client, pulsar.ConsumerOptions{
			Topic: topic, Type: pulsar.KeyShared, KeySharedPolicy: policy, Name: name,
			MessageChannel: messages,
		})
	}
	open("lower", lower)
	open("upper", upper)
	_, err = client.Subscribe(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "s", Type: pulsar.KeyShared, KeySharedPolicy: upper,
	})
	refused(err, "ConsumerAssignError")
	to := single(client, topic)
	for index := range 60 {
		send(to, pulsar.ProducerMessage{Key: fmt.Sprint("k", index%20), Payload: []byte("m")})
	}
	owner, names := map[string]string{}, map[string]bool{}
	for range 60 {
		message := next(messages)
		must(message.Ack(message.Message))
		name := message.Consumer.Name()
		known := owner[message.Key()]
		expect(known == "" || known == name, "key %s at both", message.Key())
		owner[message.Key()], names[name] = name, true
	}
	expect(len(names) == 2, "only one got messages")
}

// acks: one by one, cumulative, in lists and in batches; what is not acknowledged comes again.
func acks(s *stage) {
	client, topic := s.client(), s.topic("acked")
	options := pulsar.ConsumerOptions{
		Topic: topic, Type: pulsar.Shared, AckWithResponse: true, EnableBatchIndexAcknowledgment: true,
	}
	from := subscribe(client, options)
	sendTogether(producer(client, pulsar.ProducerOptions{
		Topic: topic, BatchingMaxPublishDelay: time.Hour,
	}), plain(texts("m", 10)))
	var list []pulsar.MessageID
	for index := range 10 {
		message := receive(from)
		switch {
		case index < 3:
			must(from.Ack(message))
		case index < 6:
			list = append(list, message.ID())
		}
	}
	must(from.AckIDList(list))
	from.Close()
	again := subscribe(client, options)
	equal(take(again, 4), texts("m", 10)[6:], "the rest of a batch")
	again.Close()
	sendAll(single(client, topic), nil, texts("n", 10))
	ordered := subscribe(client, pulsar.ConsumerOptions{Topic: topic, AckWithResponse: true})
	for index := range 10 {
		if message := receive(ordered); index == 6 {
			must(ordered.AckCumulative(message))
		}
	}
	ordered.Close()
	equal(take(consumer(client, topic), 3), texts("n", 10)[7:], "behind a cumulative one")
}

func redelivery(s *stage) {
	client, topic := s.client(), s.topic("again")
	from := subscribe(client, pulsar.ConsumerOptions{Topic: topic, Type: pulsar.Shared})
	sendAll(single(client, topic), nil, texts("m", 6))
	for range 6 {
		message := receive(from)
		if string(message.Payload()) == "m-2" {
			from.Nack(message)
			continue
		}
		must(from.Ack(message))
	}
	for count := range 3 {
		message := receive(from)
		expect(string(message.Payload()) == "m-2", "again: %s", message.Payload())
		found := message.RedeliveryCount()
		expect(found == uint32(count+1), "delivered again for the %d. time, not the %d.", found, count+1)
		if count == 2 {
			must(from.Ack(message))
			break
		}
		from.Nack(message)
	}
}

func deadLetter(s *stage) {
	client, topic := s.client(), s.topic("bad")
	from := subscribe(client, pulsar.ConsumerOptions{
		Topic: topic, Type: pulsar.Shared, DLQ: &pulsar.DLQPolicy{
			MaxDeliveries: 2, DeadLetterTopic: topic + "-dead", InitialSubscriptionName: "s",
		},
	})
	to := single(client, topic)
	send(to, pulsar.ProducerMessage{Payload: []byte("poison"), Key: "k"})
	for range 2 {
		from.Nack(receive(from))
	}
	// The subscription is made by the first message there, which would be lost to a later one.
	dead := subscribe(client, pulsar.ConsumerOptions{Topic: topic + "-dead"})
	message := receive(dead)
	expect(string(message.Payload()) == "poison", "dead: %s", message.Payload())
	expect(message.Key() == "k", "its key: %s", message.Key())
	must(dead.Ack(message))
	send(to, pulsar.ProducerMessage{Payload: []byte("fine")})
	equal(take(from, 1), []string{"fine"}, "behind it")
}

func pattern(s *stage) {
	client := s.client()
	sendAll(single(client, s.topic("a")), nil, []string{"a"})
	sendAll(single(client, "persistent://public/default/other-"+s.name), nil, []string{"other"})
	from := subscribe(client, pulsar.ConsumerOptions{
		TopicsPattern: "persistent://public/default/" + s.name + "-.*", AutoDiscoveryPeriod: soon,
	})
	equal(take(from, 1), []string{"a"}, "of a topic that is there")
	sendAll(single(client, s.topic("b")), nil, []string{"b"})
	equal(take(from, 1), []string{"b"}, "of a topic that came")
}

// patternEarly: a consumer that comes before its namespace.
func patternEarly(s *stage) {
	client := s.client()
	from := subscribe(client, pulsar.ConsumerOptions{
		TopicsPattern: "persistent://public/coming/t-.*", AutoDiscoveryPeriod: soon,
	})
	must(s.admin().Namespaces().CreateNamespace("public/coming"))
	sendAll(single(client, "persistent://public/coming/t-1"), nil, []string{"first"})
	equal(take(from, 1), []string{"first"}, "of a namespace that came")
}

func reader(s *stage) {
	client, topic := s.client(), s.topic("read")
	wanted := texts("m", 40)
	ids := sendTogether(producer(client, pulsar.ProducerOptions{
		Topic: topic, BatchingMaxMessages: 10, BatchingMaxPublishDelay: time.Hour,
	}), plain(wanted))
	read := func(start pulsar.MessageID, inclusive bool) []string {
		from, err := client.CreateReader(pulsar.ReaderOptions{
			Topic: topic, StartMessageID: start, StartMessageIDInclusive: inclusive,
		})
		must(err)
		defer from.Close()
		return toTheEnd(from)
	}
	equal(read(pulsar.EarliestMessageID(), false), wanted, "from the earliest")
	equal(read(ids[14], false), wanted[15:], "behind a message of a batch")
	equal(read(ids[14], true), wanted[14:], "from a message of a batch")
	equal(read(pulsar.LatestMessageID(), true), wanted[39:], "from the last one")
	equal(read(pulsar.LatestMessageID(), false), nil, "from the latest")
	from, err := client.CreateReader(pulsar.ReaderOptions{
		Topic: topic, StartMessageID: pulsar.EarliestMessageID(), StartMessageIDInclusive: true,
	})
	must(err)
	defer from.Close()
	equal(toTheEnd(from), wanted, "once")
	must(from.Seek(ids[20]))
	equal(toTheEnd(from), wanted[20:], "after a seek")
}

func toTheEnd(from pulsar.Reader) []string {
	var found []string
	for from.HasNext() {
		message, err := from.Next(within())
		must(err)
		found = append(found, string(message.Payload()))
	}
	return found
}

func seek(s *stage) {
	client, topic := s.client(), s.topic("back")
	// Without it the client itself leaves out the message to which it seeks.
	from := subscribe(client, pulsar.ConsumerOptions{Topic: topic, StartMessageIDInclusive: true})
	wanted := texts("m", 20)
	to := single(client, topic)
	sendAll(to, nil, wanted[:10])
	var ids []pulsar.MessageID
	for range 10 {
		message := receive(from)
		must(from.Ack(message))
		ids = append(ids, message.ID())
	}
	must(from.SeekByTime(time.UnixMilli(1)))
	equal(take(from, 10), wanted[:10], "after a seek to a time")
	must(from.Seek(ids[4]))
	equal(take(from, 6), wanted[4:10], "after a seek to a message")
	sendAll(to, nil, wanted[10:])
	equal(take(from, 10), wanted[10:], "behind it")
}

// restartProduce: the server is killed in the middle; what was receipted is there, in order.
func restartProduce(s *stage) {
	client, topic := s.client(), s.topic("log")
	to := producer(client, pulsar.ProducerOptions{Topic: topic, BatchingMaxMessages: 20})
	wanted := texts("m", 2000)
	sendTogether(to, plain(wanted[:500]))
	settled := make(chan error, 1500)
	for index, message := range plain(wanted[500:]) {
		to.SendAsync(within(), &message,
			func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) { settled <- err })
		if index == 700 {
			s.ask("restart")
		}
	}
	must(to.Flush())
	for range 1500 {
		must(<-settled)
	}
	from, seen, found := consumer(client, topic), map[string]bool{}, []string{}
	for !seen["m-1999"] {
		text := string(receive(from).Payload())
		// Sent again because its receipt was lost, as without deduplication it may be.
		if !seen[text] {
			seen[text] = true
			found = append(found, text)
		}
	}
	equal(found, wanted, "over a restart")
}
