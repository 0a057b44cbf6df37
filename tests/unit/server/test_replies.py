"""The texts of refusals: what clients look for is in them when it is meant, and never by chance."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.errors import (
    CLIENT_WORDS,
    BacklogFull,
    BacklogHeld,
    MagnetarError,
    ProducerFenced,
    ServerDiskFull,
    ServiceNotReady,
    TopicNotFound,
    TopicTerminated,
    error_classes,
    without_client_words,
)
from magnetar.server import replies
from magnetar.wire.commands import TYPES
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.meta.tree import ROOT

SOURCE = ROOT / "src" / "magnetar"


def go_text(error: MagnetarError) -> str:
    """What a client for Go makes of an error and searches."""
    return f"{pb.ServerError.Name(int(error.wire_code))}: {replies.text_of(error)}"


def go_words(error: MagnetarError) -> set[str]:
    return {word for word in CLIENT_WORDS if word in go_text(error)}


# --- meant


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (ProducerFenced("the topic has other producers"), "ProducerFenced"),
        (TopicTerminated("t was terminated"), "TopicTerminated"),
        (BacklogFull("t: the backlog"), "ProducerBlockedQuotaExceededException"),
        (ServerDiskFull("the disk of the server is full"), "ProducerBlockedQuotaExceededException"),
        (TopicNotFound("t does not exist"), "TopicNotFound"),
        # These try again: nothing of it may end that.
        (BacklogHeld("t: the backlog"), None),
        (ServiceNotReady("t is being unloaded"), None),
    ],
)
def test_a_client_for_go_takes_an_error_for_what_it_is(
    error: MagnetarError, word: str | None
) -> None:
    assert go_words(error) == ({word} if word else set())
    # The whole word that it compares with, which has the code's ending.
    if word == "TopicTerminated":
        assert "TopicTerminatedError" in go_text(error)


# --- by chance


@pytest.mark.parametrize("word", CLIENT_WORDS)
def test_names_that_are_such_words_make_no_client_give_up(word: str) -> None:
    name = f"persistent://public/default/{word}-events{word}"
    error = ServiceNotReady(f"{name} is being unloaded", hint=f"as {word}")
    assert word in str(error)
    assert go_words(error) == set()
    sent: list[Any] = [
        replies.unasked_error(error),
        replies.send_refusal(1, 2, error),
        replies.ack_refusal(1, 2, error),
    ]
    for kind, body in (
        ("PRODUCER", pb.CommandProducer(topic=name, producer_id=1, request_id=2)),
        ("SUBSCRIBE", pb.CommandSubscribe(topic=name, request_id=2)),
        ("LOOKUP", pb.CommandLookupTopic(topic=name, request_id=2)),
        ("SCALABLE_TOPIC_LOOKUP", pb.CommandScalableTopicLookup(topic=name, session_id=2)),
    ):
        sent.append(replies.refusal(TYPES[kind], body, error))
    for frame in sent:
        assert frame is not None
        assert b"is being unloaded" in frame
        assert word.encode() not in frame


def test_a_text_without_such_a_word_stays_as_it_is() -> None:
    text = "persistent://public/default/orders: no such message (look at consumerbusy)"
    assert without_client_words(text) == text


def test_no_text_that_is_written_here_has_such_a_word() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {text!r}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in error_texts(path)
        if without_client_words(text) != text
    ]
    assert not found, "\n".join(found)
    hints = {name: each.hint for name, each in error_classes().items()}
    assert {name: hint for name, hint in hints.items() if without_client_words(hint) != hint} == {}


def test_the_walk_finds_texts() -> None:
    texts = [text for path in SOURCE.rglob("*.py") for _, text in error_texts(path)]
    assert len(texts) > 500
    assert any("the topic has other producers" in each for each in texts)


def error_texts(path: Path) -> Iterator[tuple[int, str]]:
    """The parts of texts in calls of error classes, f-strings and concatenations included."""
    names = {each.__name__ for each in error_classes().values()}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        if name in names:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value
