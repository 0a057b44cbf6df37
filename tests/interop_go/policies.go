package main

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsar/crypto"
	"github.com/apache/pulsar-client-go/pulsaradmin/pkg/utils"
)

// call is for what the admin client has no function for.
func (s *stage) call(method, path, body string) {
	request, err := http.NewRequest(method, s.adminURL+"/admin/v2/"+path, strings.NewReader(body))
	must(err)
	request.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(request)
	must(err)
	defer answer.Body.Close()
	told, err := io.ReadAll(answer.Body)
	must(err)
	expect(answer.StatusCode < 300, "%s %s: %d %s", method, path, answer.StatusCode, told)
}

// checkQuotas has the server look at the quotas now.
func (s *stage) checkQuotas() {
	s.call("GET", "brokers/backlog-quota-check", "")
}

// delays: who waits for a message's time, and who does not.
func delays(s *stage) {
	const delay, tick = 700 * time.Millisecond, 50 * time.Millisecond
	client, topic, admin := s.client(), s.topic("x"), s.admin().Topics()
	kinds := map[string]pulsar.SubscriptionType{
		"shared": pulsar.Shared, "keys": pulsar.KeyShared,
		"exclusive": pulsar.Exclusive, "failover": pulsar.Failover,
	}
	made := map[string]pulsar.Consumer{}
	for name, kind := range kinds {
		made[name] = subscribe(client, pulsar.ConsumerOptions{
			Topic: topic, SubscriptionName: name, Type: kind,
		})
	}
	policy := utils.DelayedDeliveryData{TickTime: float64(tick.Milliseconds()), Active: true}
	must(admin.SetDelayedDelivery(topicName(topic), policy))
	found, err := admin.GetDelayedDelivery(topicName(topic))
	must(err)
	expect(found.Active && found.TickTime == policy.TickTime, "the policy is %v", *found)
	to := producer(client, pulsar.ProducerOptions{Topic: topic}) // such a message is in no batch
	began := time.Now()
	after := pulsar.ProducerMessage{Payload: []byte("after"), Key: "k", DeliverAfter: delay}
	at := pulsar.ProducerMessage{Payload: []byte("at"), Key: "k", DeliverAt: began.Add(delay)}
	sendTogether(to, []pulsar.ProducerMessage{after, at, {Payload: []byte("now"), Key: "k"}})
	for _, name := range []string{"exclusive", "failover"} {
		equal(take(made[name], 3), []string{"after", "at", "now"}, name)
	}
	for _, name := range []string{"shared", "keys"} {
		equal(take(made[name], 1), []string{"now"}, name)
		sameSet(take(made[name], 2), []string{"after", "at"}, name)
		taken := time.Since(began)
		expect(taken >= delay-tick, "%s: it came after %v", name, taken)
	}
	must(admin.SetDelayedDelivery(topicName(topic), utils.DelayedDeliveryData{Active: false}))
	send(to, pulsar.ProducerMessage{Payload: []byte("later"), DeliverAfter: time.Hour})
	equal(take(made["shared"], 1), []string{"later"}, "switched off")
}

// expiry: what is too old is gone, whether it waits or not.
func expiry(s *stage) {
	client, topic, admin := s.client(), s.topic("x"), s.admin()
	shared := pulsar.ConsumerOptions{Topic: topic, Type: pulsar.Shared}
	subscribe(client, shared).Close()
	name, to := topicName(topic), single(client, topic)
	sendAll(to, nil, texts("old", 5))
	send(to, pulsar.ProducerMessage{Payload: []byte("waits"), DeliverAfter: time.Hour})
	time.Sleep(1100 * time.Millisecond)
	send(to, pulsar.ProducerMessage{Payload: []byte("young")})
	must(admin.Subscriptions().ExpireMessages(name, "s", 1))
	// Pulsar answers before it is done.
	for began := time.Now(); ; time.Sleep(soon) {
		stats, err := admin.Topics().GetStats(name)
		must(err)
		left := stats.Subscriptions["s"].MsgBacklog
		if left == 1 {
			break
		}
		expect(time.Since(began) < patience, "%d are left", left)
	}
	equal(take(subscribe(client, shared), 1), []string{"young"}, "what is left")
	must(admin.Topics().SetMessageTTL(name, 60))
	seconds, err := admin.Topics().GetMessageTTL(name)
	must(err)
	expect(seconds == 60, "a time to live of %d", seconds)
	must(admin.Topics().RemoveMessageTTL(name))
}

// quotaHold: a producer waits until there is room again.
func quotaHold(s *stage) {
	client, topic := s.client(), s.topic("x")
	from, to := consumer(client, topic), single(client, topic)
	sendAll(to, nil, texts("m", 10))
	s.setQuota(topic, s.storageSize(topic), utils.ProducerRequestHold)
	s.checkQuotas()
	settled := make(chan error, 1)
	to.SendAsync(within(), &pulsar.ProducerMessage{Payload: []byte("held")},
		func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) { settled <- err })
	equal(take(from, 10), texts("m", 10), "before")
	must(<-settled)
	equal(take(from, 1), []string{"held"}, "what was held")
	_, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic})
	must(err)
}

// quotaException: a producer fails at once, what is pending and what comes.
func quotaException(s *stage) {
	client, topic := s.client(), s.topic("x")
	subscribe(client, pulsar.ConsumerOptions{Topic: topic}).Close()
	to := single(client, topic)
	sendAll(to, nil, texts("m", 3))
	s.setQuota(topic, 1, utils.ProducerException)
	_, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic})
	refused(err, "ProducerBlockedQuotaExceededException")
	s.checkQuotas()
	_, err = to.Send(within(), &pulsar.ProducerMessage{Payload: []byte("too much")})
	expect(isResult(err, pulsar.ProducerBlockedQuotaExceededException), "%v", err)
	// It goes on trying: with room it is there again.
	must(s.admin().Topics().RemoveBacklogQuota(topicName(topic), utils.DestinationStorage))
	for range 100 {
		if _, err = to.Send(within(), &pulsar.ProducerMessage{Payload: []byte("again")}); err == nil {
			break
		}
		time.Sleep(soon)
	}
	must(err)
}

// quotaEviction: a producer goes on, and consumers lose the oldest messages.
func quotaEviction(s *stage) {
	client, topic := s.client(), s.topic("x")
	subscribe(client, pulsar.ConsumerOptions{Topic: topic}).Close()
	to := single(client, topic)
	sendAll(to, nil, texts("m", 20))
	s.setQuota(topic, s.storageSize(topic)*10/18, utils.ConsumerBacklogEviction)
	s.checkQuotas()
	sendAll(to, nil, []string{"goes on"})
	// Nine tenths of the quota are just below half of all: ten messages are a little too many for
	// that, and Pulsar keeps them all the same.
	from, all := consumer(client, topic), append(texts("m", 20), "goes on")
	first := take(from, 1)
	kept := len(all) - slices.Index(all, first[0])
	expect(kept == 10 || kept == 11, "%d are kept", kept)
	equal(append(first, take(from, kept-1)...), all[len(all)-kept:], "the rest")
}

func (s *stage) storageSize(topic string) int64 {
	stats, err := s.admin().Topics().GetStats(topicName(topic))
	must(err)
	return stats.StorageSize
}

func (s *stage) setQuota(topic string, size int64, policy utils.RetentionPolicy) {
	quota, name := utils.NewBacklogQuota(size, -1, policy), topicName(topic)
	must(s.admin().Topics().SetBacklogQuota(name, quota, utils.DestinationStorage))
	found, err := s.admin().Topics().GetBacklogQuotaMap(name, false)
	must(err)
	expect(found[utils.DestinationStorage] == quota, "quotas: %v", found)
}

// limits: which error says that there are too many.
func limits(s *stage) {
	client, topic, admin := s.client(), s.topic("x"), s.admin().Topics()
	name := topicName(topic)
	producer(client, pulsar.ProducerOptions{Topic: topic})
	must(admin.SetMaxProducers(name, 1))
	_, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic})
	refused(err, "ProducerBusy")
	asked := func(subscription string, kind pulsar.SubscriptionType) error {
		_, err := client.Subscribe(pulsar.ConsumerOptions{
			Topic: topic, SubscriptionName: subscription, Type: kind,
		})
		return err
	}
	must(asked("s", pulsar.Shared))
	must(admin.SetMaxConsumersPerSubscription(name, 1))
	refused(asked("s", pulsar.Shared), "ConsumerBusy")
	must(admin.SetMaxConsumers(name, 1))
	refused(asked("other", pulsar.Shared), "ConsumerBusy")
	must(admin.RemoveMaxConsumers(name))
	must(admin.SetMaxSubscriptionsPerTopic(name, 1))
	refused(asked("other", pulsar.Shared), "NotAllowed")
	must(admin.RemoveMaxSubscriptionsPerTopic(name))
	path := "persistent/public/default/" + s.name + "-x/subscriptionTypesEnabled"
	s.call("POST", path, `["Shared", "Failover"]`)
	refused(asked("other", pulsar.Exclusive), "NotAllowed")
	must(asked("other", pulsar.Failover))
}

// subscribeRate: a consumer that comes too often is refused, another is not.
func subscribeRate(s *stage) {
	topic, admin := s.topic("x"), s.admin().Topics()
	come := func(name string) error {
		// Of each client it is the first consumer, and so the same one to the server.
		from, err := s.client().Subscribe(pulsar.ConsumerOptions{
			Topic: topic, SubscriptionName: "s", Name: name,
		})
		if err == nil {
			from.Close()
		}
		return err
	}
	must(come("often"))
	rate := utils.SubscribeRate{SubscribeThrottlingRatePerConsumer: 1, RatePeriodInSecond: 60}
	must(admin.SetSubscribeRate(topicName(topic), rate))
	found, err := admin.GetSubscribeRate(topicName(topic))
	must(err)
	expect(*found == rate, "the rate is %v", *found)
	must(come("often"))
	refused(come("often"), "NotAllowed")
	must(come("once"))
}

// messageSize: a message that is too large is refused, and it alone.
func messageSize(s *stage) {
	client, topic, admin := s.client(), s.topic("x"), s.admin().Topics()
	from, other := consumer(client, topic), single(client, topic)
	must(admin.SetMaxMessageSize(topicName(topic), 1000))
	// This client waits for an answer to such a message until it is too late for it.
	to := producer(client, pulsar.ProducerOptions{
		Topic: topic, DisableBatching: true, SendTimeout: time.Second,
	})
	_, err := to.Send(within(), &pulsar.ProducerMessage{Payload: make([]byte, 2000)})
	expect(err != nil, "2000 bytes were taken")
	send(other, pulsar.ProducerMessage{Payload: []byte("small")})
	equal(take(from, 1), []string{"small"}, "what was taken")
}

// encryption: the server passes on what it cannot read, and can ask for it.
func encryption(s *stage) {
	client, topic := s.client(), s.topic("x")
	keys := keyFiles()
	defer os.RemoveAll(keys)
	reader := crypto.NewFileKeyReader(filepath.Join(keys, "public"), filepath.Join(keys, "private"))
	encrypted := &pulsar.ProducerEncryptionInfo{KeyReader: reader, Keys: []string{"k"}}
	from := subscribe(client, pulsar.ConsumerOptions{
		Topic: topic, Decryption: &pulsar.MessageDecryptionInfo{KeyReader: reader},
	})
	sealed := subscribe(client, pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "sealed",
		Decryption: &pulsar.MessageDecryptionInfo{
			ConsumerCryptoFailureAction: crypto.ConsumerCryptoFailureActionConsume,
		},
	})
	for _, batches := range []bool{false, true} {
		to := producer(client, pulsar.ProducerOptions{
			Topic: topic, DisableBatching: !batches, Encryption: encrypted,
		})
		sendTogether(to, plain(texts("secret", 5)))
		equal(take(from, 5), texts("secret", 5), fmt.Sprintf("batches: %v", batches))
	}
	message := receive(sealed)
	expect(!bytes.Contains(message.Payload(), []byte("secret")), "%q", message.Payload())
	expect(message.GetEncryptionContext() != nil, "it is not said how it is encrypted")

	namespace := "public/" + s.name
	must(s.admin().Namespaces().CreateNamespace(namespace))
	name, err := utils.GetNamespaceName(namespace)
	must(err)
	must(s.admin().Namespaces().SetEncryptionRequiredStatus(*name, true))
	locked := "persistent://" + namespace + "/x"
	// This client does not say of any producer that it encrypts, so none is taken, as in Pulsar.
	for _, options := range []pulsar.ProducerOptions{
		{Topic: locked}, {Topic: locked, Encryption: encrypted},
	} {
		_, err = client.CreateProducer(options)
		refused(err, "MetadataError")
	}
	// Its admin client sends the flag as text.
	must(s.admin().Namespaces().SetEncryptionRequiredStatus(*name, false))
	producer(client, pulsar.ProducerOptions{Topic: locked})
}

// keyFiles is a folder with a public and a private key.
func keyFiles() string {
	folder, err := os.MkdirTemp("", "keys")
	must(err)
	private, err := rsa.GenerateKey(rand.Reader, 2048)
	must(err)
	public, err := x509.MarshalPKIXPublicKey(&private.PublicKey)
	must(err)
	for name, block := range map[string]*pem.Block{
		"public":  {Type: "PUBLIC KEY", Bytes: public},
		"private": {Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(private)},
	} {
		must(os.WriteFile(filepath.Join(folder, name), pem.EncodeToMemory(block), 0o600))
	}
	return folder
}
