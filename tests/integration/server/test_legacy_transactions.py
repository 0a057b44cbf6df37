"""Legacy transactions through the wire: begin, add, end, deadlines, restarts, the two kinds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from harness.limits import PATIENCE_S
from harness.simulation.scalable.clients import QueueConsumer
from harness.simulation.scalable.links import Links
from magnetar.errors import ServiceNotReady, WireCode
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.server.app import Server
from magnetar.server.authority import Authority, Principal
from magnetar.txn.ids import METADATA_BIT, is_metadata
from magnetar.txn.legacy import coordinators
from magnetar.txn.legacy.coordinators import LegacyCoordinators
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.legacy_stage import V4, A, B, Decided, ids, play
from tests.integration.server.scalable_stage import nothing_comes, read
from tests.unit.server.serving import refused

SEGMENT = "segment://public/default/x/0000-ffff-0"


async def state(server: Server, txn: TxnId) -> str | None:
    known = await server.coordinators.legacy.find(txn)
    return None if known is None else known.state


# --- commit and abort


def test_produce_and_commit(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        for topic in (A, B):
            await client.subscribe(topic)
        txn = await client.begin(5)
        assert (txn.most, is_metadata(txn)) == (5, False)
        await client.publish(A, b"#a1", txn)
        await client.publish(A, b"#a2", txn)
        await client.publish(B, b"#b1", txn)
        await client.publish(A, b"#plain")
        await client.sees_nothing()
        await client.end(txn)
        assert sorted(await client.payloads(4)) == [b"a1", b"a2", b"b1", b"plain"]
        await client.publish(A, b"#later")
        assert await client.payloads(1) == [b"later"]
        await client.sees_nothing()

    async def again(server: Server, client: V4) -> None:
        await client.subscribe(A, "new")
        assert await client.payloads(4) == [b"a1", b"a2", b"plain", b"later"]
        await client.sees_nothing()

    play(tmp_path, scene, again)


def test_produce_and_abort(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        await client.subscribe(A)
        txn = await client.begin()
        await client.publish(A, b"#a1", txn)
        await client.publish(A, b"#plain", None)
        await client.sees_nothing()
        await client.end(txn, commit=False)
        assert await client.payloads(1) == [b"plain"]
        await client.sees_nothing()

    async def again(server: Server, client: V4) -> None:
        await client.subscribe(A, "new")
        assert await client.payloads(1) == [b"plain"]
        await client.sees_nothing()

    play(tmp_path, scene, again)


def test_consume_transform_produce(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        await client.subscribe(A, subType=1)
        await client.subscribe(B)
        await client.publish(A, b"#1")
        for commit in (False, True):
            payload, where = await client.receive()
            txn = await client.begin()
            await client.publish(B, b"#of " + payload, txn)
            await client.ack(A, where, txn)
            await client.end(txn, commit=commit)
        assert await client.payloads(1) == [b"of 1"]
        await client.sees_nothing()

    async def again(server: Server, client: V4) -> None:
        await client.subscribe(A, subType=1)
        await client.subscribe(B, "new")
        assert await client.payloads(1) == [b"of 1"]
        await client.sees_nothing()

    play(tmp_path, scene, again)


@pytest.mark.parametrize("commit", [True, False])
def test_end_again_crossed_and_by_another_connection(tmp_path: Path, commit: bool) -> None:
    async def scene(server: Server, client: V4) -> None:
        txn = await client.begin()
        await client.publish(A, b"#1", txn)
        other = await V4.connect(server)
        for each in (client, other, client):
            await each.end(txn, commit=commit)
            crossed = each.end(txn, commit=not commit)
            assert await refused(crossed) == WireCode.INVALID_TXN_STATUS
        assert await refused(client.add(txn, A)) == WireCode.INVALID_TXN_STATUS
        late = client.add_subscription(txn, A, "s")
        assert await refused(late) == WireCode.INVALID_TXN_STATUS
        await other.close()

    async def again(server: Server, client: V4) -> None:
        txn = TxnId(0, 1)
        await client.end(txn, commit=commit)
        assert await refused(client.end(txn, commit=not commit)) == WireCode.INVALID_TXN_STATUS
        assert await refused(client.publish(A, b"#2", txn)) == WireCode.INVALID_TXN_STATUS

    play(tmp_path, scene, again)


def test_a_topic_that_never_was_has_nothing_to_end(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        for commit in (True, False):
            txn = await client.begin()
            await client.add(txn, A)
            await client.add_subscription(txn, B, "s")
            await client.end(txn, commit=commit)
        listed = await client.driver.request("GET_TOPICS_OF_NAMESPACE", namespace="public/default")
        assert list(listed.topics) == []

    play(tmp_path, scene)


# --- deadlines and restarts


def test_transaction_timeout(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        await client.subscribe(A)
        txn = await client.begin(ttl=2000)
        decided = Decided(server, txn)
        await client.publish(A, b"#lost", txn)
        await client.publish(A, b"#plain")
        assert await client.payloads(1) == [b"plain"]
        assert await decided.wait() == "ABORTED"
        assert await refused(client.end(txn)) == WireCode.INVALID_TXN_STATUS
        await client.end(txn, commit=False)
        assert await state(server, txn) == "ABORTED"

    play(tmp_path, scene)


def test_open_ones_go_on_after_a_restart_and_time_out_there(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        for ttl in (60_000, 1000):
            await client.publish(A, b"#%d" % ttl, await client.begin(ttl=ttl))

    async def again(server: Server, client: V4) -> None:
        await client.subscribe(A)
        kept, lost = TxnId(0, 1), TxnId(0, 2)
        decided = Decided(server, lost)
        await client.publish(A, b"#more", kept)
        assert await decided.wait() == "ABORTED"
        await client.end(lost, commit=False)
        await client.sees_nothing()
        await client.end(kept)
        assert await client.payloads(2) == [b"60000", b"more"]
        assert (await client.begin()).least > lost.least

    play(tmp_path, scene, again)


@pytest.mark.parametrize("commit", [True, False])
def test_a_restart_between_the_decision_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: bool
) -> None:
    async def scene(server: Server, client: V4) -> None:
        await client.subscribe(A, subType=1)
        await client.publish(A, b"#acked")
        _, where = await client.receive()
        txn = await client.begin()
        await client.publish(B, b"#1", txn)
        await client.ack(A, where, txn)

        async def not_now(*given: Any, **named: Any) -> None:
            raise ServiceNotReady("another broker has it")

        for name in ("end_on_topic", "end_on_subscription"):
            monkeypatch.setattr(server.coordinators.legacy.participants, name, not_now)
        decided = Decided(server, txn)
        asked = asyncio.create_task(client.end(txn, commit=commit))
        assert await decided.wait() == ("COMMITTED" if commit else "ABORTED")
        assert await state(server, txn) == ("COMMITTING" if commit else "ABORTING")
        crossed = client.end(txn, commit=not commit)
        assert await refused(crossed) == WireCode.INVALID_TXN_STATUS
        asked.cancel()

    async def again(server: Server, client: V4) -> None:
        await client.subscribe(A, subType=1)
        await client.subscribe(B)
        assert await client.payloads(1) == [b"1" if commit else b"acked"]
        await client.sees_nothing()

    play(tmp_path, scene, again)


def test_who_waits_too_long_is_told_and_may_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(server: Server, client: V4) -> None:
        await client.subscribe(A)
        txn = await client.begin()
        await client.publish(A, b"#1", txn)

        async def not_now(*given: Any, **named: Any) -> None:
            raise ServiceNotReady("another broker has it")

        with monkeypatch.context() as patch:
            patch.setattr(server.coordinators.legacy.participants, "end_on_topic", not_now)
            assert await refused(client.end(txn)) == WireCode.UNKNOWN
            await client.sees_nothing()
        await client.end(txn)
        assert await client.payloads(1) == [b"1"]

    limits = Limits(journal_file_bytes=1024 * 1024, close_seconds=60, txn_end_wait_seconds=0.5)
    play(tmp_path, scene, limits=limits)


# --- refusals


def test_wrong_mixes_of_kinds(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        legacy, metadata = await client.begin(), await client.begin(scalable=True)
        assert (is_metadata(legacy), is_metadata(metadata)) == (False, True)
        for request in (
            client.end(legacy, scalable=True),
            client.add(legacy, A, scalable=True),
            client.add_subscription(legacy, A, "s", scalable=True),
            client.end(TxnId(0, METADATA_BIT | legacy.least | 512)),
            client.end(TxnId(metadata.most, metadata.least ^ METADATA_BIT | 512)),
        ):
            assert await refused(request) == WireCode.TRANSACTION_NOT_FOUND
        assert await refused(client.add(legacy, SEGMENT)) == WireCode.NOT_ALLOWED
        gone = client.add(legacy, "non-persistent://public/default/n")
        assert await refused(gone) == WireCode.NOT_ALLOWED
        await client.end(legacy)
        await client.end(metadata)  # v4 clients have such ones, too, where the setting says so

    play(tmp_path, scene)


class _Roles(Authority):
    """A principal is what the client says that it is."""

    def identify(self, connect: pb.CommandConnect) -> Principal:
        return Principal(connect.auth_data.decode() or None)

    def is_superuser(self, principal: Principal) -> bool:
        return principal.role == "admin"


def test_another_principal_is_told_that_there_is_none(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        server.context.authority = _Roles()
        alice = await V4.connect(server, auth_data=b"alice")
        bob = await V4.connect(server, auth_data=b"bob")
        txn = await alice.begin()
        for other in (bob, client):
            for request in (other.end(txn), other.add(txn, A), other.add_subscription(txn, A, "s")):
                assert await refused(request) == WireCode.TRANSACTION_NOT_FOUND
        await alice.end(txn)
        await alice.close()
        await bob.close()

    play(tmp_path, scene)


def test_only_superusers_end_one_topic_or_subscription(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        server.context.authority = _Roles()
        admin = await V4.connect(server, auth_data=b"admin")
        await client.subscribe(A, subType=1)
        await client.publish(A, b"#acked")
        _, where = await client.receive()
        await client.subscribe(B)
        txn = await client.begin()
        await client.publish(B, b"#1", txn)
        await client.ack(A, where, txn)
        on_topic: dict[str, Any] = {"topic": B, "txn_action": pb.COMMIT, **ids(txn)}
        place = {"topic": A, "subscription": "sub"}
        on_subscription: dict[str, Any] = {
            "subscription": place,
            "txn_action": pb.ABORT,
            **ids(txn),
        }
        for name, fields in (
            ("END_TXN_ON_PARTITION", on_topic),
            ("END_TXN_ON_SUBSCRIPTION", on_subscription),
        ):
            request = client.driver.request(name, **fields)
            assert await refused(request) == WireCode.NOT_ALLOWED
            request = admin.driver.request(name, **(fields | ids(TxnId(0, METADATA_BIT | 1))))
            assert await refused(request) == WireCode.TRANSACTION_NOT_FOUND
        await client.sees_nothing()
        answer = await admin.driver.request("END_TXN_ON_PARTITION", **on_topic)
        assert TxnId(answer.txnid_most_bits, answer.txnid_least_bits) == txn
        assert await client.payloads(1) == [b"1"]
        await admin.driver.request("END_TXN_ON_SUBSCRIPTION", **on_subscription)
        assert await client.payloads(1) == [b"acked"]
        await admin.close()

    play(tmp_path, scene)


def test_everybody_is_a_superuser_until_there_are_rules(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        await client.subscribe(A)
        txn = await client.begin()
        await client.publish(A, b"#1", txn)
        await client.driver.request(
            "END_TXN_ON_PARTITION", topic=A, txn_action=pb.COMMIT, **ids(txn)
        )
        assert await client.payloads(1) == [b"1"]

    play(tmp_path, scene)


def test_limits_are_told_at_once(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        txns = [await client.begin() for _ in range(2)]
        assert await refused(client.begin()) == WireCode.TOO_MANY_REQUESTS
        await client.begin(1)
        await client.end(txns[0])
        await client.begin()
        assert await refused(client.begin(ttl=0)) == WireCode.NOT_ALLOWED

    play(tmp_path, scene, limits=Limits(journal_file_bytes=1 << 20, txn_open_per_coordinator_max=2))


def test_a_coordinator_that_reads_its_log_asks_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    opened = LegacyCoordinators._open

    async def slow(self: LegacyCoordinators, partition: int) -> Any:
        await gate.wait()
        return await opened(self, partition)

    async def scene(server: Server, client: V4) -> None:
        await client.begin()
        monkeypatch.setattr(LegacyCoordinators, "_open", slow)
        monkeypatch.setattr(coordinators, "_OPEN_WAIT_SECONDS", 0.05)

    async def again(server: Server, client: V4) -> None:
        for request in (client.end(TxnId(0, 1)), client.begin()):
            assert await refused(request) == WireCode.TRANSACTION_COORDINATOR_NOT_FOUND
        monkeypatch.setattr(coordinators, "_OPEN_WAIT_SECONDS", 5)
        gate.set()
        await client.end(TxnId(0, 1))

    play(tmp_path, scene, again)


# --- the setting


def test_the_setting_switched_back_and_forth(tmp_path: Path) -> None:
    """Open transactions of both kinds on one topic end in their own way."""
    made: dict[str, TxnId] = {}

    async def with_markers(server: Server, client: V4) -> None:
        for name in ("m-commit", "m-abort"):
            made[name] = await client.begin()
            await client.publish(A, f"#{name}".encode(), made[name])
        assert not any(is_metadata(txn) for txn in made.values())

    async def with_metadata(server: Server, client: V4) -> None:
        await client.subscribe(A)
        for name in ("r-commit", "r-abort"):
            made[name] = await client.begin()
            assert is_metadata(made[name])
            await client.publish(A, f"#{name}".encode(), made[name])
        await client.publish(A, b"#m-more", made["m-commit"])
        await client.end(made["m-abort"], commit=False)
        await client.sees_nothing()

    async def with_markers_again(server: Server, client: V4) -> None:
        await client.subscribe(A)
        await client.end(made["r-commit"])
        await client.end(made["r-abort"], commit=False)
        await client.sees_nothing()
        await client.end(made["m-commit"])
        assert await client.payloads(3) == [b"m-commit", b"r-commit", b"m-more"]
        await client.sees_nothing()

    async def after(server: Server, client: V4) -> None:
        await client.subscribe(A, "new")
        assert await client.payloads(3) == [b"m-commit", b"r-commit", b"m-more"]
        await client.sees_nothing()

    play(
        tmp_path,
        with_markers,
        with_metadata,
        with_markers_again,
        after,
        kinds=("markers", "metadata", "auto", "metadata"),
    )


def test_ends_after_the_topic_became_scalable(tmp_path: Path) -> None:
    """The coordinator goes on with the names that it has, also after a restart."""
    made: list[TxnId] = []

    async def scene(server: Server, client: V4) -> None:
        for number, ttl in enumerate((60_000, 60_000, 300)):
            made.append(await client.begin(ttl=ttl))
            await client.publish(A, b"#%d" % number, made[-1])
        await client.publish(A, b"#plain")
        await server.context.scalable.migrate(TopicName.parse(A), force=True)

    async def again(server: Server, client: V4) -> None:
        committed, aborted, late = made
        decided = Decided(server, late)
        await client.end(committed)
        await client.end(aborted, commit=False)
        assert await decided.wait() == "ABORTED"
        await client.end(late, commit=False)

    async def read_again(server: Server, client: V4) -> None:
        for name in ("first", "second"):
            async with (
                Links(server.service_url, wait_s=PATIENCE_S) as links,
                QueueConsumer(links, A.replace("persistent", "topic"), name, "c") as consumer,
            ):
                assert {each.sequence for each in await read(consumer, 2)} == {1, 4}
                await nothing_comes(consumer, 0.1)

    play(tmp_path, scene, again, read_again)


def test_what_its_coordinator_does_not_know_holds_nothing(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        await client.subscribe(A)
        txn = await client.begin(5)
        invented = TxnId(txn.most, txn.least + 1000)
        assert await refused(client.send(A, b"#x", invented)) == WireCode.NOT_ALLOWED
        await client.publish(A, b"#plain")
        assert await client.payloads(1) == [b"plain"]
        await client.publish(A, b"#y", txn)
        await client.end(txn)
        assert await client.payloads(1) == [b"y"]

    play(tmp_path, scene)


NOBODYS = (TxnId(3, 1), TxnId(16, 0), TxnId(1 << 40, 7))
"""Of a coordinator that never began one, and of numbers that no coordinator has."""


@pytest.mark.parametrize("kind", ["auto", "metadata"])
def test_an_id_that_no_coordinator_gave_out_is_refused(tmp_path: Path, kind: str) -> None:
    async def scene(server: Server, client: V4) -> None:
        await client.subscribe(A)
        await client.publish(A, b"#first")
        _, where = await client.receive()
        for invented in NOBODYS:
            assert await refused(client.send(A, b"#x", invented)) == WireCode.NOT_ALLOWED
            code = await refused(client.ack_only(A, where, invented))
            assert code == WireCode.TRANSACTION_CONFLICT
        await client.publish(A, b"#plain")
        assert await client.payloads(1) == [b"plain"]
        await client.ack_only(A, where)  # no transaction holds it

    async def again(server: Server, client: V4) -> None:
        await client.subscribe(A, "new")
        assert await client.payloads(2) == [b"first", b"plain"]

    play(tmp_path, scene, again, kinds=(kind, kind))


@pytest.mark.parametrize("commit", [True, False])
def test_a_send_that_was_not_added_ends_with_its_own_transaction(
    tmp_path: Path, commit: bool
) -> None:
    made: list[TxnId] = []

    async def scene(server: Server, client: V4) -> None:
        for topic in (A, B):
            await client.subscribe(topic)
        await client.publish(B, b"#taken")
        _, where = await client.receive()
        txn = await client.begin(5)
        made.append(txn)
        await client.send(A, b"#in", txn)
        await client.ack_only(B, where, txn)
        await client.publish(A, b"#behind")
        await client.sees_nothing()

    # The coordinator has noted it durably: a restart before the end changes nothing.
    async def again(server: Server, client: V4) -> None:
        await client.end(made[0], commit=commit)
        for topic in (A, B):
            await client.subscribe(topic)
        expected = {b"in", b"behind"} if commit else {b"behind", b"taken"}
        assert set(await client.payloads(2)) == expected
        await client.sees_nothing()

    play(tmp_path, scene, again)
