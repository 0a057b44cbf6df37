"""Encryption end to end, without a broker: what goes in comes out, and nothing else does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.encryption import cipher, decryptor, encryptor
from magnetar.client.encryption.cipher import DATA_KEY_BYTES, Ciphers
from magnetar.client.encryption.decryptor import Decryptor
from magnetar.client.encryption.encryptor import EncryptionFailure, Encryptor
from magnetar.client.encryption.keys import EncryptionKey, PemKeyReader
from magnetar.client.message.batch import (
    Outgoing,
    Stamp,
    batch_entry,
    messages_in,
    read_entry,
    single_entry,
    unfolded,
)
from magnetar.client.message.chunks import ChunkAssembler, chunk_entries
from magnetar.client.message.encryption_context import context_of
from magnetar.errors import EncryptionFailed, InvalidSetting, UnreadableMessage
from magnetar.model.ids import MessageId
from magnetar.wire.compression import Compression
from magnetar.wire.pb import pulsar_pb2 as pb

FAIL = EncryptionFailure.FAIL


def pem_pair(private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> tuple[bytes, bytes]:
    """A public and a private key."""
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return public, private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


@cache
def pair(name: str) -> tuple[bytes, bytes]:
    """The keys of a name: another name has others."""
    return pem_pair(rsa.generate_private_key(public_exponent=65537, key_size=2048))


class Keys:
    """A reader that knows some names, and counts."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.asked: list[str] = []
        self.said: list[dict[str, str]] = []

    def public_key(self, name: str) -> EncryptionKey:
        self.asked.append(name)
        if name not in self.names:
            raise KeyError(name)
        return EncryptionKey(pair(name)[0], {"version": "7"})

    def private_key(self, name: str, metadata: Mapping[str, str]) -> EncryptionKey:
        self.asked.append(name)
        self.said.append(dict(metadata))
        if name not in self.names:
            raise KeyError(name)
        return EncryptionKey(pair(name)[1])


class Hands:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(*names: str, now: Hands | None = None, reader: Keys | None = None) -> Encryptor:
    found = Encryptor(names, reader or Keys(*names), FAIL, now or Hands())
    found.prepare()
    return found


def metadata() -> pb.MessageMetadata:
    return pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0)


@given(st.binary(max_size=300), st.sampled_from(list(Compression)))
def test_a_message_comes_back_as_it_was(payload: bytes, compression: Compression) -> None:
    stamp = Stamp("p", 0, compression, _SENDER)
    entry = single_entry(Outgoing(payload=payload, sequence_id=1, key="k"), stamp)
    said, sealed = read_entry(entry.headers_and_payload)
    assert said.partition_key == "k"
    assert len(sealed) >= cipher.TAG_BYTES
    assert unfolded(said, _RECEIVER.decrypt(said, sealed)).payload == payload


@given(st.lists(st.binary(max_size=40), min_size=2, max_size=9))
def test_a_batch_is_encrypted_as_a_whole(payloads: list[bytes]) -> None:
    stamp = Stamp("p", 0, Compression.LZ4, _SENDER)
    messages = [Outgoing(payload=each, sequence_id=n) for n, each in enumerate(payloads)]
    said, sealed = read_entry(batch_entry(messages, stamp).headers_and_payload)
    found = messages_in(unfolded(said, _RECEIVER.decrypt(said, sealed)))
    assert [each.payload for each in found] == payloads


@given(st.binary(min_size=20, max_size=200), st.integers(3, 15))
def test_each_chunk_is_encrypted_on_its_own(payload: bytes, size: int) -> None:
    stamp = Stamp("p", 0, Compression.NONE, _SENDER)
    message = Outgoing(payload=payload, sequence_id=1)
    assembler = ChunkAssembler()
    whole = None
    nonces = set()
    entries = list(chunk_entries(message, stamp, uuid="u", chunk_bytes=size))
    for number, entry in enumerate(entries):
        said, sealed = read_entry(entry.headers_and_payload)
        assert len(said.encryption_keys) == 1
        assert said.total_chunk_msg_size == len(payload)
        nonces.add(said.encryption_param)
        opened = unfolded(said, _RECEIVER.decrypt(said, sealed))
        whole = assembler.add(said, opened.payload, MessageId(1, number), 0.0).payload
    assert whole == payload
    assert len(nonces) == len(entries)


@given(st.data())
def test_what_was_changed_on_its_way_is_refused(data: st.DataObject) -> None:
    said = metadata()
    sealed = bytearray(_SENDER.encrypt(said, b"secret"))
    where = data.draw(st.integers(0, len(sealed) - 1))
    sealed[where] ^= data.draw(st.integers(1, 255))
    with pytest.raises(UnreadableMessage, match="cannot be decrypted"):
        _RECEIVER.decrypt(said, bytes(sealed))


@given(
    st.lists(st.tuples(st.sampled_from(["a", "x"]), st.binary(max_size=300)), min_size=1),
    st.binary(max_size=20),
    st.binary(max_size=40),
)
def test_garbage_is_refused(keys: list[tuple[str, bytes]], nonce: bytes, sealed: bytes) -> None:
    said = metadata()
    for name, value in keys:
        said.encryption_keys.add(key=name, value=value)
    said.encryption_param = nonce
    reader = Keys("a")
    with pytest.raises(UnreadableMessage) as raised:
        Decryptor(reader).decrypt(said, sealed)
    assert len(reader.asked) <= 64
    assert len(str(raised.value)) < 2000


def test_a_message_cannot_ask_for_many_computations(monkeypatch: pytest.MonkeyPatch) -> None:
    unwraps = []
    real = Ciphers.unwrap

    def counted(self: Ciphers, wrapped: bytes, pem: bytes) -> bytes:
        unwraps.append(wrapped)
        return real(self, wrapped, pem)

    monkeypatch.setattr(Ciphers, "unwrap", counted)
    said = metadata()
    for number in range(10_000):
        said.encryption_keys.add(key="a", value=number.to_bytes(256, "big"))
    reader = Keys("a")
    with pytest.raises(UnreadableMessage):
        Decryptor(reader).decrypt(said, bytes(100))
    assert len(unwraps) == decryptor.UNWRAPS_MAX
    assert len(reader.asked) <= decryptor.UNWRAPS_MAX + 1


def test_each_of_several_owners_can_read_it_and_nobody_else() -> None:
    said = metadata()
    sealed = made("a", "b").encrypt(said, b"secret")
    assert [each.key for each in said.encryption_keys] == ["a", "b"]
    for name in ("a", "b"):
        reader = Keys(name)
        assert Decryptor(reader).decrypt(said, sealed) == b"secret"
        assert {"version": "7"} in reader.said
    with pytest.raises(UnreadableMessage, match="KeyError"):
        Decryptor(Keys("c")).decrypt(said, sealed)
    with pytest.raises(UnreadableMessage, match="encrypted"):
        Decryptor(None).decrypt(said, sealed)

    class Mistaken(Keys):
        def private_key(self, name: str, metadata: Mapping[str, str]) -> EncryptionKey:
            return EncryptionKey(pair("other")[1])

    with pytest.raises(UnreadableMessage, match="does not fit"):
        Decryptor(Mistaken()).decrypt(said, sealed)


def test_a_data_key_is_asked_for_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decryptor, "DATA_KEYS_MAX", 2)
    senders = [made("a") for _ in range(3)]
    reader = Keys("a")
    receiver = Decryptor(reader)

    def read(sender: Encryptor) -> None:
        said = metadata()
        sealed = sender.encrypt(said, b"x")
        assert receiver.decrypt(said, sealed) == b"x"

    for sender in (senders[0], senders[1], senders[0], senders[0]):
        read(sender)
    assert len(reader.asked) == 2
    read(senders[2])  # puts out the one that was not used lately
    read(senders[0])
    assert len(reader.asked) == 3
    read(senders[1])
    assert len(reader.asked) == 4


def test_a_data_key_is_renewed_by_time_and_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Hands()
    sender = made("a", now=now)

    def wrapped() -> bytes:
        sender.prepare()
        said = metadata()
        sender.encrypt(said, b"x")
        return said.encryption_keys[0].value

    first = wrapped()
    now.now = encryptor.RENEW_S - 1
    assert wrapped() == first
    now.now = encryptor.RENEW_S
    second = wrapped()
    assert second != first
    assert wrapped() == second
    monkeypatch.setattr(encryptor, "SEALED_MAX", 2)
    assert wrapped() != second


def test_a_key_that_cannot_be_read_fails_all() -> None:
    now, reader = Hands(), Keys("a")
    sender = Encryptor(["a", "b"], reader, FAIL, now)
    with pytest.raises(EncryptionFailed, match="'b' cannot be read: KeyError"):
        sender.prepare()
    with pytest.raises(EncryptionFailed):
        sender.encrypt(metadata(), b"x")
    reader.names.add("b")
    sender.prepare()
    # Known once, it may be gone when it is to be renewed.
    reader.names.clear()
    now.now = encryptor.RENEW_S
    with pytest.raises(EncryptionFailed):
        sender.prepare()


def test_in_plain_only_if_that_was_asked_for_and_only_as_long_as_need_be() -> None:
    now, reader = Hands(), Keys()
    sender = Encryptor(["a"], reader, EncryptionFailure.SEND, now)
    sender.prepare()
    said = metadata()
    assert sender.encrypt(said, b"x") == b"x"
    assert not said.encryption_keys
    sender.prepare()
    assert len(reader.asked) == 1, "not with every message"
    reader.names.add("a")
    now.now += encryptor.RETRY_S
    sender.prepare()
    assert sender.encrypt(said, b"x") != b"x"


def test_keys_of_other_kinds_are_named() -> None:
    ciphers, data_key = Ciphers(), bytes(DATA_KEY_BYTES)
    curve_public, curve_private = pem_pair(ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(EncryptionFailed, match="another kind than RSA"):
        ciphers.wrap(data_key, curve_public)
    with pytest.raises(EncryptionFailed, match="cannot be read"):
        ciphers.wrap(data_key, b"no key")
    with pytest.raises(UnreadableMessage, match="another kind than RSA"):
        ciphers.unwrap(bytes(256), curve_private)
    with pytest.raises(UnreadableMessage):
        ciphers.unwrap(bytes(256), b"no key")
    with pytest.raises(UnreadableMessage, match="3 bytes"):
        ciphers.unwrap(ciphers.wrap(b"abc", pair("a")[0]), pair("a")[1])


def test_the_overhead_is_no_less_than_what_an_entry_grows_by() -> None:
    for names in (["a"], ["a", "b" * 60]):
        sender = made(*names)
        message = Outgoing(payload=bytes(1000), sequence_id=1)
        plain = len(single_entry(message, Stamp("p", 0)).headers_and_payload)
        sealed = single_entry(message, Stamp("p", 0, cipher=sender)).headers_and_payload
        assert 0 < len(sealed) - plain <= sender.overhead


def test_what_a_message_says_of_its_encryption() -> None:
    said = metadata()
    _SENDER.encrypt(said, b"x")
    context = context_of(said, is_encrypted=True)
    assert [(each.name, dict(each.metadata)) for each in context.keys] == [("a", {"version": "7"})]
    assert context.param == said.encryption_param
    assert context.batch_size is None


def test_files_are_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    reader = PemKeyReader(public={"a": path}, private={"a": str(path)})
    path.write_bytes(b"one")
    assert reader.public_key("a").pem == b"one"
    path.write_bytes(b"two")
    assert reader.private_key("a", {}).pem == b"two"
    with pytest.raises(KeyError):
        reader.public_key("b")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(cipher, "import_module", missing)
    with pytest.raises(InvalidSetting) as raised:
        Ciphers()
    assert raised.value.hint == "install magnetar[encryption]"
    Decryptor(None)  # who reads nothing encrypted needs nothing


_SENDER = made("a")
_RECEIVER = Decryptor(Keys("a"))
