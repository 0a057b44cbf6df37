package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsar/log"
	"github.com/apache/pulsar-client-go/pulsaradmin"
	"github.com/apache/pulsar-client-go/pulsaradmin/pkg/utils"
)

// Ends only what hangs.
const patience = 300 * time.Second

// How soon a client asks again for what it negatively acknowledged, or for topics of a pattern.
const soon = 50 * time.Millisecond

// A stage is what a scenario has: clients of one server, and names of its own.
type stage struct {
	name       string
	serviceURL string
	adminURL   string
	lines      *bufio.Scanner
	closing    []func()
}

func (s *stage) close() {
	for _, each := range slices.Backward(s.closing) {
		each()
	}
}

// ask has something done by whoever runs the server.
func (s *stage) ask(favour string) {
	fmt.Println("ASK", favour)
	if !s.lines.Scan() || s.lines.Text() != "DONE" {
		panic(failed("nobody did " + favour))
	}
}

func (s *stage) topic(suffix string) string {
	return "persistent://public/default/" + s.name + "-" + suffix
}

// --- clients

func (s *stage) client() pulsar.Client {
	return s.clientAt(s.serviceURL, os.Stderr)
}

func (s *stage) clientAt(url string, told io.Writer) pulsar.Client {
	handler := slog.NewTextHandler(told, &slog.HandlerOptions{Level: slog.LevelWarn})
	client, err := pulsar.NewClient(pulsar.ClientOptions{
		URL:               url,
		OperationTimeout:  patience,
		EnableTransaction: true,
		Logger:            log.NewLoggerWithSlog(slog.New(handler)),
	})
	must(err)
	s.closing = append(s.closing, client.Close)
	return client
}

func (s *stage) admin() pulsaradmin.Client {
	client, err := pulsaradmin.NewClient(&pulsaradmin.Config{WebServiceURL: s.adminURL})
	must(err)
	return client
}

func topicName(text string) utils.TopicName {
	name, err := utils.GetTopicName(text)
	must(err)
	return *name
}

func producer(client pulsar.Client, options pulsar.ProducerOptions) pulsar.Producer {
	if options.SendTimeout == 0 {
		options.SendTimeout = patience
	}
	made, err := client.CreateProducer(options)
	must(err)
	return made
}

func single(client pulsar.Client, topic string) pulsar.Producer {
	return producer(client, pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
}

func subscribe(client pulsar.Client, options pulsar.ConsumerOptions) pulsar.Consumer {
	options.SubscriptionInitialPosition = pulsar.SubscriptionPositionEarliest
	options.NackRedeliveryDelay = soon
	if options.SubscriptionName == "" {
		options.SubscriptionName = "s"
	}
	made, err := client.Subscribe(options)
	must(err)
	return made
}

func consumer(client pulsar.Client, topic string) pulsar.Consumer {
	return subscribe(client, pulsar.ConsumerOptions{Topic: topic})
}

// --- messages

func within() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(patience, cancel)
	return ctx
}

func send(to pulsar.Producer, message pulsar.ProducerMessage) pulsar.MessageID {
	id, err := to.Send(within(), &message)
	must(err)
	return id
}

// sendAll sends one after the other, in a transaction or (nil) in none.
func sendAll(to pulsar.Producer, txn pulsar.Transaction, texts []string) {
	for _, text := range texts {
		send(to, pulsar.ProducerMessage{Payload: []byte(text), Transaction: txn})
	}
}

// sendTogether sends without waiting, and then waits for all.
func sendTogether(to pulsar.Producer, messages []pulsar.ProducerMessage) []pulsar.MessageID {
	type sent struct {
		index int
		id    pulsar.MessageID
		err   error
	}
	settled := make(chan sent, len(messages))
	for index := range messages {
		to.SendAsync(within(), &messages[index],
			func(id pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
				settled <- sent{index, id, err}
			})
	}
	must(to.Flush())
	ids := make([]pulsar.MessageID, len(messages))
	for range messages {
		each := <-settled
		must(each.err)
		ids[each.index] = each.id
	}
	return ids
}

func plain(texts []string) []pulsar.ProducerMessage {
	messages := make([]pulsar.ProducerMessage, len(texts))
	for index, text := range texts {
		messages[index] = pulsar.ProducerMessage{Payload: []byte(text)}
	}
	return messages
}

func texts(prefix string, count int) []string {
	made := make([]string, count)
	for index := range made {
		made[index] = fmt.Sprintf("%s-%d", prefix, index)
	}
	return made
}

func receive(from pulsar.Consumer) pulsar.Message {
	message, err := from.Receive(within())
	must(err)
	return message
}

// take receives so many and acknowledges each.
func take(from pulsar.Consumer, count int) []string {
	found := make([]string, count)
	for index := range found {
		message := receive(from)
		must(from.Ack(message))
		found[index] = string(message.Payload())
	}
	return found
}

// --- expectations

func must(err error) {
	if err != nil {
		panic(failed(err.Error()))
	}
}

func expect(holds bool, format string, values ...any) {
	if !holds {
		panic(failed(fmt.Sprintf(format, values...)))
	}
}

func equal[T comparable](found, wanted []T, what string) {
	expect(slices.Equal(found, wanted), "%s: %v, not %v", what, found, wanted)
}

func sameSet(found, wanted []string, what string) {
	equal(slices.Sorted(slices.Values(found)), slices.Sorted(slices.Values(wanted)), what)
}

// refused says that an error came, and what its text must hold.
func refused(err error, words string) {
	expect(err != nil, "not refused: %s", words)
	expect(strings.Contains(err.Error(), words), "refused with %v, not %s", err, words)
}

func isResult(err error, result pulsar.Result) bool {
	var found *pulsar.Error
	return errors.As(err, &found) && found.Result() == result
}
