"""What a client remembers of the rates that a broker named."""

from __future__ import annotations

from magnetar.client.connection.throttling import Throttling


def test_a_rate_holds_until_the_broker_reads_again() -> None:
    throttling = Throttling()
    assert (throttling.rate, throttling.rate_since(0)) == (None, None)
    throttling.note("ten", 5)
    assert (throttling.rate, throttling.rate_since(100)) == ("ten", "ten")
    throttling.note("five", 6)
    throttling.note(None, 7)
    assert throttling.rate is None


def test_afterwards_it_is_known_by_when_it_ended() -> None:
    throttling = Throttling()
    throttling.note("ten", 5)
    throttling.note(None, 7)
    assert [throttling.rate_since(at) for at in (0, 6, 7, 7.1)] == ["ten", "ten", "ten", None]
