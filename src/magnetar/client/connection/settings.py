"""The settings of a client: where the brokers are, who the application is, and its limits.

Owns: `ServiceUrl`, `TlsSettings`, the ways to say who one is (`NoAuth`, `TokenAuth`), and
`ClientSettings`, which holds them and every limit of a client.

Invariants:
1. Values are checked when they are given: a wrong one raises `InvalidServiceUrl` or
   `InvalidSetting` before anything is connected.
2. A secret is never shown: no `repr` here has a token.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from inspect import isawaitable
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from magnetar.client.connection.backoff import FIRST_S, MOST_S
from magnetar.client.message.interceptors import Interceptor
from magnetar.errors import InvalidServiceUrl, InvalidSetting

PLAIN_PORT: Final = 6650
TLS_PORT: Final = 6651

_SCHEMES: Final = {"pulsar": PLAIN_PORT, "pulsar+ssl": TLS_PORT}
# They are tried one after the other; services have a handful, and a mistake no end.
_HOSTS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """The address that one broker listens at."""

    host: str
    port: int
    is_tls: bool

    def __str__(self) -> str:
        scheme = "pulsar+ssl" if self.is_tls else "pulsar"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServiceUrl:
    """`pulsar://a:6650,b:6650`: one service, behind any of these addresses."""

    addresses: tuple[BrokerAddress, ...]

    @classmethod
    def parse(cls, text: str) -> ServiceUrl:
        # One scheme for all hosts: `urlsplit` knows no lists, so they are cut here.
        scheme, separator, rest = text.strip().partition("://")
        port = _SCHEMES.get(scheme.lower())
        if not separator or port is None:
            raise InvalidServiceUrl(f"{text!r} does not begin with pulsar:// or pulsar+ssl://")
        parts = rest.rstrip("/").split(",")
        if len(parts) > _HOSTS_MAX:
            raise InvalidServiceUrl(f"{len(parts)} hosts; there may be {_HOSTS_MAX}")
        is_tls = port == TLS_PORT
        return cls(tuple(_address(each.strip(), port, is_tls, text) for each in parts))

    @property
    def is_tls(self) -> bool:
        return self.addresses[0].is_tls

    def __str__(self) -> str:
        return ",".join(map(str, self.addresses))


def _address(text: str, default_port: int, is_tls: bool, url: str) -> BrokerAddress:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidServiceUrl(f"{url!r}: {text!r} has no usable port ({error})") from error
    # A user in the URL is refused, not ignored: it would end up in logs.
    if not host or parts.path or parts.query or parts.username is not None:
        raise InvalidServiceUrl(f"{url!r}: {text!r} is not host:port")
    return BrokerAddress(host, default_port if port is None else port, is_tls)


# --- who one is


class Auth(Protocol):
    """Says to a broker who the client is."""

    @property
    def method(self) -> str:
        """The method as brokers call it: `none`, `token`, `basic`."""
        ...

    async def data(self) -> bytes:
        """What to show, asked for at every connection and whenever the broker asks again."""
        ...


@dataclass(frozen=True, slots=True)
class NoAuth:
    """No credentials: the client is nobody in particular."""

    method: str = "none"

    async def data(self) -> bytes:
        return b""


@dataclass(frozen=True, slots=True)
class TokenAuth:
    """A token, or a function (which may be a coroutine function) that gives the present one.

    TokenAuth("eyJhbGciOi...")
    TokenAuth(lambda: Path("/run/secrets/token").read_text().strip())
    """

    token: str | Callable[[], str | Awaitable[str]] = field(repr=False)
    method: str = "token"
    """The name of the authentication method, as brokers know it."""

    async def data(self) -> bytes:
        """The present token; asked for whenever a broker wants to know who this is."""
        # Asked for at every connection, so that a token that was renewed is found.
        token = self.token if isinstance(self.token, str) else self.token()
        text = await token if isawaitable(token) else token
        if not isinstance(text, str):
            raise InvalidSetting(f"a token must be a str, and the function gave {type(text)}")
        return text.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """The settings of TLS: how to check the server's certificate, and which one to show.

    TlsSettings(trust_certs="ca.pem")
    TlsSettings(certificate="client.pem", key="client.key")
    """

    trust_certs: str | Path | None = None
    """The authorities to trust; without them, those of the system."""
    certificate: str | Path | None = None
    """The client's own certificate, for servers that ask for one."""
    key: str | Path | None = None
    """The private key of the certificate, if that is a file of its own."""
    validate_hostname: bool = True
    """Whether the certificate must be for the host that was asked for."""
    allow_untrusted: bool = False
    """Take any certificate: for tests alone."""

    def context(self) -> ssl.SSLContext:
        """Read the files now."""
        if self.key is not None and self.certificate is None:
            raise InvalidSetting("a TLS key without its certificate")
        try:
            made = ssl.create_default_context(cafile=self.trust_certs)
            if self.certificate is not None:
                made.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise InvalidSetting(f"TLS certificates cannot be read: {error}") from error
        # In this order: `ssl` refuses to switch verification off while names are checked.
        made.check_hostname = self.validate_hostname and not self.allow_untrusted
        if self.allow_untrusted:
            made.verify_mode = ssl.CERT_NONE
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """The settings of a client, all of them; times are in seconds."""

    service_url: ServiceUrl
    auth: Auth = NoAuth()
    tls: TlsSettings = TlsSettings()
    listener_name: str | None = None
    """Which of a broker's advertised addresses to use."""
    operation_timeout: float = 30.0
    """What one operation may take: opening, subscribing, closing, looking up."""
    connect_timeout: float = 10.0
    """What one connection may take to be made, its handshake included."""
    refused_timeout: float = 3.0
    """How long a client that was never connected goes on where nobody listens."""
    keepalive: float = 30.0
    """Between two pings; a broker that says nothing for two of them is given up."""
    connections_per_broker: int = 1
    memory_limit: int = 64 * 1024 * 1024
    """Bytes of messages that wait for their receipt, over all producers."""
    requests_max: int = 50_000
    """Requests of one connection that wait for their answer."""
    message_bytes_max: int = 128 * 1024 * 1024
    """The largest message that is taken from a broker, whatever the broker announces."""
    redirects_max: int = 20
    interceptors: Sequence[Interceptor] = ()
    """Called with every message, in this order."""
    backoff_first: float = FIRST_S
    backoff_most: float = MOST_S

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            # Invariant 1, for all limits at once; infinity would switch a limit off.
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not 0 < value < float("inf"):
                raise InvalidSetting(f"{each.name} must be above 0 and finite, not {value!r}")
