"""The blocking client: the same names as the asyncio one, for threads, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness.limits import PATIENCE_S
from magnetar import blocking
from magnetar.client.blocking import loop_thread
from magnetar.client.blocking.loop_thread import LoopThread
from magnetar.client.client import Client
from magnetar.client.consume.checkpoint import FROM_EARLIEST, CheckpointConsumer
from magnetar.client.consume.consumer import Consumer
from magnetar.client.consume.queue import QueueConsumer
from magnetar.client.consume.reader import Reader
from magnetar.client.consume.stream import StreamConsumer
from magnetar.client.produce.producer import Producer
from magnetar.client.transaction.group import TransactionGroup
from magnetar.client.transaction.state import TransactionState
from magnetar.client.transaction.transaction import Transaction
from magnetar.errors import AlreadyClosed, DeadlineExceeded, InvalidServiceUrl, NotAllowed
from magnetar.model.ids import EARLIEST
from magnetar.model.subscriptions import InitialPosition
from tests.integration.client.service import service
from tests.meta.tree import ROOT

REGULAR = "persistent://public/default/regular"
SCALABLE = "topic://public/default/scalable"
PAIRS = [
    (Client, blocking.Client),
    (Transaction, blocking.Transaction),
    (TransactionGroup, blocking.TransactionGroup),
    (Producer, blocking.Producer),
    (Consumer, blocking.Consumer),
    (QueueConsumer, blocking.QueueConsumer),
    (StreamConsumer, blocking.StreamConsumer),
    (CheckpointConsumer, blocking.CheckpointConsumer),
    (Reader, blocking.Reader),
]
ONLY_BLOCKING = {"run"}
"""What only threads need: a coroutine of theirs on the client's thread."""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with service(tmp_path) as found:
        yield found


def client_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "magnetar client"]


# --- the same names


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
def test_names_and_parameters_are_those_of_asyncio(pair: tuple[type[Any], type[Any]]) -> None:
    theirs, ours = (_public(each) for each in pair)
    assert ours.keys() - ONLY_BLOCKING == theirs.keys()
    for name, member in ours.items():
        if name in ONLY_BLOCKING:
            continue
        if isinstance(member, property):
            assert isinstance(theirs[name], property)
            continue
        assert _parameters(member) == _parameters(theirs[name]), name


def _public(kind: type[Any]) -> dict[str, Any]:
    members = inspect.getmembers(kind, lambda each: inspect.isfunction(each) or _is_property(each))
    return {name: each for name, each in members if not name.startswith("_")}


def _is_property(member: object) -> bool:
    return isinstance(member, property)


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


def test_the_written_files_are_up_to_date() -> None:
    script = ROOT / "scripts" / "make_blocking.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- use


def test_messages_go_through_a_regular_topic(url: str) -> None:
    with blocking.Client(url) as client:
        with client.consumer(REGULAR, "sub") as consumer, client.producer(REGULAR) as producer:
            assert producer.send(b"one", key="k") != producer.send(b"two")
            later = [producer.submit(b"%d" % number) for number in range(100)]
            producer.flush()
            assert len({each.result(5) for each in later}) == 100
            first = consumer.receive(timeout=5)
            assert (first.value, first.key, first.topic) == (b"one", "k", REGULAR)
            consumer.ack(first).wait(5)
            rest = [consumer.receive(5) for _ in range(101)]
            acked = consumer.ack_many(rest)
            acked.wait()
            assert acked.done()
            with pytest.raises(DeadlineExceeded):
                consumer.receive(timeout=0.01)
            assert consumer.receive_many(timeout=0.01) == []
            with pytest.raises(NotAllowed):
                client.queue_consumer("segment://public/default/x/0000-ffff-0", "sub")
        with client.reader(REGULAR, start=EARLIEST) as reader:
            assert reader.has_message_available()
            assert reader.receive(5).value == b"one"


def test_messages_go_through_a_scalable_topic(url: str) -> None:
    with blocking.Client(url) as client, client.producer(SCALABLE) as producer:
        for number in range(50):
            producer.submit(b"%d" % number, key=f"k{number % 5}")
        producer.flush()
        with client.stream_consumer(
            SCALABLE, "stream", initial_position=InitialPosition.EARLIEST
        ) as stream:
            got = [stream.receive(5) for _ in range(50)]
            assert got[-1].id != got[0].id
            stream.ack_cumulative(got[-1]).wait(5)
        with client.checkpoint_consumer(SCALABLE, start=FROM_EARLIEST) as consumer:
            first = consumer.receive_many(10, timeout=5)
            place = consumer.checkpoint()
        with client.checkpoint_consumer(SCALABLE, start=place) as consumer:
            rest = [consumer.receive(5) for _ in range(50 - len(first))]
            everything = sorted(each.value for each in [*first, *rest])
            assert everything == sorted(b"%d" % number for number in range(50))


def test_a_loop_over_messages_ends_with_the_consumer(url: str) -> None:
    topic = f"{REGULAR}-loop"
    with blocking.Client(url) as client, client.producer(topic) as producer:
        consumer = client.consumer(topic, "sub")
        producer.send(b"a")
        producer.send(b"b")
        got = []
        for message in consumer:
            got.append(message.value)
            consumer.ack(message)
            if len(got) == 2:
                consumer.close()
        assert got == [b"a", b"b"]
        with pytest.raises(AlreadyClosed):
            consumer.receive()
        assert consumer.name


def test_many_threads_share_a_producer_and_a_consumer(url: str) -> None:
    topic = f"{SCALABLE}-threads"
    with blocking.Client(url) as client, client.producer(topic) as producer:
        consumer = client.queue_consumer(topic, "sub")

        def send(thread: int) -> None:
            for number in range(50):
                producer.send(b"%d-%d" % (thread, number), key=str(thread))

        def receive(_: int) -> list[bytes]:
            got = []
            for _ in range(50):
                message = consumer.receive(10)
                consumer.ack(message).wait(5)
                got.append(message.value)
            return got

        with ThreadPoolExecutor(16) as pool:
            sent = pool.map(send, range(8))
            received = [value for got in pool.map(receive, range(8)) for value in got]
            list(sent)
        assert sorted(received) == sorted(b"%d-%d" % (t, n) for t in range(8) for n in range(50))


def test_transactions_commit_or_abort_with_their_block(url: str) -> None:
    topic = f"{SCALABLE}-txn"
    with blocking.Client(url) as client, client.producer(topic) as producer:
        consumer = client.queue_consumer(topic, "sub", initial_position=InitialPosition.EARLIEST)
        with client.transaction(timeout=30) as txn:
            producer.send(b"seen", txn=txn)
        assert txn.state is TransactionState.COMMITTED
        with suppress(ZeroDivisionError), client.transaction() as txn:
            producer.send(b"never seen", txn=txn)
            raise ZeroDivisionError
        assert txn.state is TransactionState.ABORTED
        txn = client.transaction()
        first = consumer.receive(5)
        consumer.ack_many((each for each in [first]), txn=txn)
        producer.send(b"answer", txn=txn)
        txn.commit()
        assert (first.value, consumer.receive(5).value) == (b"seen", b"answer")


def test_a_group_commits_what_its_members_sent(url: str) -> None:
    topic = f"{SCALABLE}-group"
    with blocking.Client(url) as client, client.producer(topic) as producer:
        group = client.open_group("job", generation="g", run="r")
        with group.transaction(sequence=0) as txn:
            producer.send(b"row", txn=txn)
        assert group.commit(0, [txn])
        assert group.status().committed_sequence == 0
        with client.checkpoint_consumer(topic, start=FROM_EARLIEST) as consumer:
            assert consumer.receive(5).value == b"row"


# --- the end


def test_closing_leaves_no_thread_and_wakes_whoever_waits(url: str) -> None:
    before = len(client_threads())
    client = blocking.Client(url)
    consumer = client.consumer(f"{REGULAR}-end", "sub")
    started = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        started.set()
        try:
            consumer.receive()
        except AlreadyClosed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait(5)
    client.close()
    client.close()
    consumer.close()
    thread.join(5)
    assert len(errors) == 1
    assert len(client_threads()) == before
    with pytest.raises(AlreadyClosed):
        client.producer(REGULAR)


def test_many_clients_leave_nothing_behind(url: str) -> None:
    before = len(client_threads())
    for _ in range(20):
        with blocking.Client(url) as client:
            client.producer(REGULAR).send(b"x")
    assert len(client_threads()) == before


def test_a_forgotten_client_ends_with_a_warning(url: str) -> None:
    before = len(client_threads())
    clients = [blocking.Client(url)]
    gc.collect()
    with pytest.warns(ResourceWarning):
        clients.clear()
    assert len(client_threads()) == before


def test_a_wrong_url_leaves_no_thread() -> None:
    before = len(client_threads())
    with pytest.raises(InvalidServiceUrl):
        blocking.Client("localhost")
    assert len(client_threads()) == before


FORGETS = """
import sys
from magnetar.blocking import Client
client = Client(sys.argv[1])
producer = client.producer("persistent://public/default/forgotten")
producer.send(b"x")
"""
INTERRUPTED = """
import os, signal, sys, threading
from magnetar.blocking import Client
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
with Client(sys.argv[1]) as client:
    consumer = client.consumer("persistent://public/default/interrupted", "sub")
    try:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        consumer.receive()
    except KeyboardInterrupt:
        print("interrupted")
    with client.producer("persistent://public/default/interrupted") as producer:
        producer.send(b"still there")
    print(consumer.receive(5).value.decode())
"""


@pytest.mark.parametrize(
    ("program", "printed"), [(FORGETS, ""), (INTERRUPTED, "interrupted\nstill there\n")]
)
def test_a_process_ends(url: str, program: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, url], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


# --- the thread


def test_a_blocking_call_in_the_thread_itself_is_refused() -> None:
    thread = LoopThread()
    with pytest.raises(NotAllowed):
        thread.call(lambda: thread.call(lambda: None))
    thread.stop()
    assert thread.is_stopped
    assert thread.call(lambda: 5) == 5
    with pytest.raises(AlreadyClosed):
        thread.wait(lambda: asyncio.sleep(0))


def test_an_interrupted_wait_ends_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread()
    ended = threading.Event()
    begun = threading.Event()

    async def long() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    class Interrupted(Future[None]):
        def result(self, timeout: float | None = None) -> Any:
            begun.wait(5)
            raise KeyboardInterrupt

    monkeypatch.setattr(loop_thread, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.wait(long)
    assert ended.is_set()
    thread.stop()
