"""Ten thousand made-up streams, and bytes of any kind (the soak target takes a million)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.fuzz.wire import main, run_input
from magnetar.errors import ProtocolError
from tests.examples import examples
from tests.unit.wire.support import open_client, open_server

INPUTS = 10_000


def test_streams_with_and_without_damage() -> None:
    commands = sum(run_input(seed) for seed in range(INPUTS))
    assert commands > INPUTS / 2, "the fuzz no longer reaches what it is meant to test"


@settings(max_examples=examples(500))
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes(data: bytes, server: bool) -> None:
    connection = open_server() if server else open_client()
    try:
        connection.receive(data)
    except ProtocolError:
        assert connection.error is not None
    assert connection.buffered_bytes <= len(data)


def test_the_entry_for_soaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--inputs", "20", "--seed", "5"]) == 0
    assert "20 inputs from seed 5" in capsys.readouterr().out
