package main

import (
	"bytes"
	"context"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

var discarded = io.Discard

func begin(client pulsar.Client) pulsar.Transaction {
	txn, err := client.NewTransaction(patience)
	must(err)
	return txn
}

func commit(txn pulsar.Transaction) {
	must(txn.Commit(within()))
	expect(txn.GetState() == pulsar.TxnCommitted, "after a commit: %v", txn.GetState())
}

func abort(txn pulsar.Transaction) {
	must(txn.Abort(within()))
	expect(txn.GetState() == pulsar.TxnAborted, "after an abort: %v", txn.GetState())
}

func inTxn(txn pulsar.Transaction, texts []string) []pulsar.ProducerMessage {
	messages := plain(texts)
	for index := range messages {
		messages[index].Transaction = txn
	}
	return messages
}

func isEmpty(client pulsar.Client, topic string) {
	from, err := client.CreateReader(pulsar.ReaderOptions{
		Topic: topic, StartMessageID: pulsar.EarliestMessageID(),
	})
	must(err)
	defer from.Close()
	expect(!from.HasNext(), "%s: what is undecided can be read", topic)
}

// txnCommit: single messages and batches are seen by nobody before the commit, and all after it.
func txnCommit(s *stage) {
	client := s.client()
	for _, batching := range []bool{false, true} {
		topic := s.topic(map[bool]string{false: "single", true: "batched"}[batching])
		from := consumer(client, topic)
		to := producer(client, pulsar.ProducerOptions{Topic: topic, DisableBatching: !batching})
		txn, wanted := begin(client), texts("m", 30)
		sendTogether(to, inTxn(txn, wanted))
		isEmpty(client, topic)
		commit(txn)
		equal(take(from, 30), wanted, "after the commit")
		refused(txn.Abort(within()), "Expected transaction state")
		later := begin(client)
		sendTogether(to, inTxn(later, wanted))
		commit(later)
		equal(take(from, 30), wanted, "of the next transaction")
	}
}

func txnAbort(s *stage) {
	client := s.client()
	for _, batching := range []bool{false, true} {
		topic := s.topic(map[bool]string{false: "single", true: "batched"}[batching])
		from := consumer(client, topic)
		txn := begin(client)
		to := producer(client, pulsar.ProducerOptions{Topic: topic, DisableBatching: !batching})
		sendTogether(to, inTxn(txn, texts("never", 30)))
		sendAll(single(client, topic), nil, texts("beside", 5))
		abort(txn)
		sendAll(single(client, topic), nil, texts("after", 5))
		wanted := append(texts("beside", 5), texts("after", 5)...)
		equal(take(from, 10), wanted, "without the aborted ones")
		again := subscribe(client, pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "later"})
		equal(take(again, 10), wanted, "of a later subscription")
	}
}

// txnAcks: what a transaction acknowledges comes again if it is aborted, and never if it is not; of
// batches too, which this client acknowledges as a whole with their last message.
func txnAcks(s *stage) {
	client := s.client()
	for _, batching := range []bool{false, true} {
		topic := s.topic(map[bool]string{false: "single", true: "batched"}[batching])
		open := func() pulsar.Consumer {
			return subscribe(client, pulsar.ConsumerOptions{Topic: topic, Type: pulsar.Shared})
		}
		to := producer(client, pulsar.ProducerOptions{
			Topic: topic, DisableBatching: !batching,
			BatchingMaxMessages: 4, BatchingMaxPublishDelay: time.Hour,
		})
		wanted, from := texts("m", 12), open()
		sendTogether(to, plain(wanted))
		aborted := begin(client)
		for range wanted {
			must(from.AckWithTxn(receive(from), aborted))
		}
		abort(aborted)
		from.Close()
		from = open()
		committed := begin(client)
		var found []string
		for range 8 {
			message := receive(from)
			must(from.AckWithTxn(message, committed))
			found = append(found, string(message.Payload()))
		}
		commit(committed)
		from.Close()
		sameSet(found, wanted[:8], "after an abort")
		sameSet(take(open(), 4), wanted[8:], "after a commit")
	}
}

// txnBatchIndexes: with indexes of batches the client names what it has acknowledged again, with the
// next message of the batch, and that is a conflict.
func txnBatchIndexes(s *stage) {
	client, topic := s.client(), s.topic("acked")
	from := subscribe(client, pulsar.ConsumerOptions{
		Topic: topic, Type: pulsar.Shared, EnableBatchIndexAcknowledgment: true,
	})
	to := producer(client, pulsar.ProducerOptions{Topic: topic, BatchingMaxPublishDelay: time.Hour})
	sendTogether(to, plain(texts("m", 3)))
	txn := begin(client)
	must(from.AckWithTxn(receive(from), txn))
	refused(from.AckWithTxn(receive(from), txn), "TransactionConflict")
}

// txnTwoTopics: read from one, write to two, all of it or nothing.
func txnTwoTopics(s *stage) {
	client := s.client()
	in, one, two := s.topic("in"), s.topic("one"), s.topic("two")
	must(s.admin().Topics().Create(topicName(two), 2))
	sendAll(single(client, in), nil, texts("m", 10))
	from := subscribe(client, pulsar.ConsumerOptions{Topic: in, Type: pulsar.Shared})
	first, second := single(client, one), single(client, two)
	for number := range 10 {
		message, txn := receive(from), begin(client)
		sendAll(first, txn, []string{string(message.Payload())})
		sendAll(second, txn, []string{string(message.Payload())})
		must(from.AckWithTxn(message, txn))
		if number%2 == 1 {
			commit(txn)
		} else {
			abort(txn)
		}
	}
	from.Close()
	wanted := []string{"m-1", "m-3", "m-5", "m-7", "m-9"}
	sameSet(take(consumer(client, one), 5), wanted, "in the first topic")
	sameSet(take(consumer(client, two), 5), wanted, "in the second topic")
	again := subscribe(client, pulsar.ConsumerOptions{Topic: in, Type: pulsar.Shared})
	sameSet(take(again, 5), []string{"m-0", "m-2", "m-4", "m-6", "m-8"}, "left to read")
}

// txnEnded: a transaction that its deadline ended takes nothing more.
func txnEnded(s *stage) {
	client, topic := s.client(), s.topic("late")
	txn, err := client.NewTransaction(100 * time.Millisecond)
	must(err)
	sendAll(single(client, topic), txn, []string{"lost"})
	from := consumer(client, topic)
	// Behind it, and so readable only once the deadline has ended it.
	sendAll(single(client, topic), nil, []string{"plain"})
	equal(take(from, 1), []string{"plain"}, "behind the deadline")
	err = txn.Commit(within())
	expect(isResult(err, pulsar.InvalidStatus), "a commit behind the deadline: %v", err)
}

// txnLeftOver: plain messages after a transaction. A producer that batches leaves the id of its last
// transaction on them, and is refused; one that does not is fine.
func txnLeftOver(s *stage) {
	told := &records{}
	client, topic := s.clientAt(s.serviceURL, told), s.topic("after")
	from := consumer(client, topic)
	alone := single(client, topic)
	batching := producer(client, pulsar.ProducerOptions{Topic: topic, SendTimeout: time.Second})
	for _, to := range []pulsar.Producer{alone, batching} {
		txn := begin(client)
		sendAll(to, txn, []string{"in it"})
		commit(txn)
		equal(take(from, 1), []string{"in it"}, "of the transaction")
	}
	sendAll(alone, nil, []string{"plain"})
	equal(take(from, 1), []string{"plain"}, "of one that does not batch")
	_, err := batching.Send(context.Background(), &pulsar.ProducerMessage{Payload: []byte("left")})
	expect(err != nil, "a plain message with the id of an ended transaction was stored")
	said := told.String()
	expect(strings.Contains(said, "NotAllowedError"), "the client was told nothing:\n%s", said)
	expect(strings.Contains(said, "left the id of an earlier transaction"), "told:\n%s", said)
	// Nothing of it is stored, and another producer goes on.
	sendAll(producer(client, pulsar.ProducerOptions{Topic: topic}), nil, []string{"next"})
	equal(take(from, 1), []string{"next"}, "of another producer")
}

// A records keeps what a client logs.
type records struct {
	mutex sync.Mutex
	text  bytes.Buffer
}

func (r *records) Write(line []byte) (int, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.text.Write(line)
}

func (r *records) String() string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.text.String()
}

// txnOverHTTP: a client with an http:// address finds the coordinators.
func txnOverHTTP(s *stage) {
	client, topic := s.clientAt(s.adminURL, discarded), s.topic("web")
	from, to := consumer(client, topic), single(client, topic)
	for range 20 { // all coordinators have their turn
		txn := begin(client)
		sendAll(to, txn, []string{"m"})
		commit(txn)
		message, acking := receive(from), begin(client)
		must(from.AckWithTxn(message, acking))
		commit(acking)
	}
}

// restartTxn: a transaction that is open while the server is killed can be committed.
func restartTxn(s *stage) {
	client, topic := s.client(), s.topic("kept")
	to := single(client, topic)
	kept, dropped := begin(client), begin(client)
	sendAll(to, kept, texts("m", 5))
	sendAll(to, dropped, texts("never", 5))
	s.ask("restart")
	sendAll(to, kept, texts("n", 5))
	abort(dropped)
	commit(kept)
	equal(take(consumer(client, topic), 10), append(texts("m", 5), texts("n", 5)...), "over a restart")
}
