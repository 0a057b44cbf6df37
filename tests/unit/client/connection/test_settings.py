"""What an application tells a client is checked before anything is connected."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.connection.settings import (
    BrokerAddress,
    ClientSettings,
    NoAuth,
    ServiceUrl,
    TlsSettings,
    TokenAuth,
)
from magnetar.errors import InvalidServiceUrl, InvalidSetting


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("pulsar://a", [("a", 6650, False)]),
        ("pulsar://a:1,b:2/", [("a", 1, False), ("b", 2, False)]),
        ("PULSAR+SSL://a, b:7", [("a", 6651, True), ("b", 7, True)]),
        ("pulsar://[::1]:9", [("::1", 9, False)]),
    ],
)
def test_service_urls(text: str, addresses: list[tuple[str, int, bool]]) -> None:
    url = ServiceUrl.parse(text)
    assert url.addresses == tuple(BrokerAddress(*each) for each in addresses)
    assert ServiceUrl.parse(str(url.addresses[0])).addresses == url.addresses[:1]


@pytest.mark.parametrize(
    "text",
    ["", "localhost:6650", "http://a:8080", "pulsar://", "pulsar://a:x", "pulsar://a:99999",
     "pulsar://a,,b", "pulsar://a/path", "pulsar://user@a", "pulsar://" + ",".join("a" * 101)],
)  # fmt: skip
def test_wrong_service_urls_are_refused_with_a_hint(text: str) -> None:
    with pytest.raises(InvalidServiceUrl, match="pulsar://host:port"):
        ServiceUrl.parse(text)


@pytest.mark.parametrize("name", ["operation_timeout", "keepalive", "memory_limit"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_limits_are_above_zero_and_finite(name: str, value: float) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(InvalidSetting, match=name):
        ClientSettings(service_url=ServiceUrl.parse("pulsar://a"), **given)


def test_a_token_may_be_a_function_and_is_never_shown() -> None:
    async def fetched() -> str:
        return "later"

    async def story() -> None:
        assert await TokenAuth("secret").data() == b"secret"
        assert await TokenAuth(lambda: "now").data() == b"now"
        assert await TokenAuth(fetched).data() == b"later"
        assert await NoAuth().data() == b""

    asyncio.run(story())
    settings = ClientSettings(service_url=ServiceUrl.parse("pulsar://a"), auth=TokenAuth("secret"))
    assert "secret" not in repr(settings)


def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="cannot be read"):
        TlsSettings(trust_certs=tmp_path / "none.pem").context()
    with pytest.raises(InvalidSetting, match="without its certificate"):
        TlsSettings(key=tmp_path / "key.pem").context()
    assert not TlsSettings(allow_untrusted=True).context().check_hostname
