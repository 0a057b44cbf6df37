"""A fake network on one event loop: connections in memory, slow, cut and silent as chance wants it.

Owns: `Network` (who listens, who is connected), `Link` (one connection) and `End`, the transport of
one side. Servers get their end through `Network.listen`, clients through `Network.connect`, which
is called like `loop.create_connection`.

Invariants:
1. What one side writes arrives at the other once, whole and in order, until the link ends; where it
   is divided into pieces, and when they arrive, is drawn from the chance that was given.
2. A piece that goes to a client never spans two moments of writing: `End.sent_at` is when the bytes
   that are arriving now were written.
3. A side that reads nothing, or a silent link, stops the other side's bytes: they stay in its write
   buffer, which tells its protocol to pause above the high-water mark.
4. Each protocol hears `connection_lost` once, and nothing after it. Of a cut both sides learn, each
   at its own time; of what happens on a silent link neither side learns anything.

Relies on: everything on one loop; a loop on virtual time makes it repeatable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Final, TypeVar

from magnetar.server.machine import Listener, NewProtocol

ProtocolT = TypeVar("ProtocolT", bound=asyncio.Protocol)

# The most that a piece is on its way, by kind: as within a rack, over a busy line, and
# stuck. Below the timeouts of connections, so that only silence and cuts break them.
_FAST_S: Final = 0.0004
_SLOW_S: Final = 0.03
_STUCK_S: Final = 0.8
_WRITE_HIGH_BYTES: Final = 64 * 1024
# Clients get ports as a kernel gives them: each connection another one.
_PORT_FIRST: Final = 50_000


class End(asyncio.Transport):
    """One side of a connection."""

    def __init__(self, link: Link, *, is_client: bool, address: tuple[str, int]) -> None:
        super().__init__()
        self.sent_at = 0.0
        """When the bytes that are being given to the protocol were written."""
        self.ended_at: float | None = None
        """When this side closed or aborted, or heard of the end."""
        self.pauses: list[tuple[float, float | None]] = []
        """From when to when its protocol was told to write no more."""
        self.is_silent = False
        """What this side writes does not arrive for now."""
        self.lost_words = False
        """It was silent once: what it wrote may never have arrived."""
        # Whose end this is, and who listens at it.
        self._link = link
        self._is_client = is_client
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._protocol: asyncio.BaseProtocol = asyncio.Protocol()
        # The write buffer: what was written and when, with the marks at which the
        # protocol is told to pause and to go on (a quarter, as asyncio does it).
        self._unsent: deque[tuple[float, bytes]] = deque()
        self._unsent_bytes = 0
        self._high = _WRITE_HIGH_BYTES
        self._low = _WRITE_HIGH_BYTES // 4
        # The stages of an end: it reads, it is closing (what was written still goes), it is lost.
        # `_moving` is a piece on its way: one at a time keeps them in order (invariant 1).
        self._is_read = True
        self._closing = False
        self._lost = False
        self._moving = False
        self._has_ended = False
        """It writes no more."""

    @property
    def peer(self) -> End:
        return self._link.server if self._is_client else self._link.client

    # --- as a transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._address if name == "peername" else default

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._is_read and not self._closing

    def pause_reading(self) -> None:
        self._is_read = False

    def resume_reading(self) -> None:
        self._is_read = True
        self.peer.move()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _WRITE_HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The peer hears of the end behind what was written, and closes."""
        self._has_ended = True
        self.move()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._has_ended or not data:
            return
        self._unsent.append((self._link.now(), bytes(data)))
        self._unsent_bytes += len(data)
        # Once per crossing: a protocol that was told to pause is not told again (invariant 3).
        if self._unsent_bytes > self._high and not self._is_paused:
            self.pauses.append((self._link.now(), None))
            self._protocol.pause_writing()
        self.move()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        """Send what was written, then end."""
        if not self._closing:
            self._closing = True
            self.ended_at = self._link.now()
            if not self._unsent:
                self._leave()

    def abort(self) -> None:
        """End at once; what was not sent is lost."""
        if not self._closing:
            self.ended_at = self._link.now()
        if not self._lost:
            self._closing = True
            self._leave()

    # --- the way to the other side

    def move(self) -> None:
        """Bring the next piece over, after a while, if it can go now."""
        waiting = self._unsent or self._has_ended
        # A silent side keeps its bytes; `recover` lets them go on.
        if waiting and not self._moving and not self.is_silent and not self._lost:
            self._moving = True
            self._loop.call_later(self._link.delay(), self._arrive)

    def _arrive(self) -> None:
        self._moving = False
        peer = self.peer
        # Looked at again: the link may have been cut or fallen
        # silent while the piece was on its way.
        if self._lost or self.is_silent:
            return
        # Nothing but the end was on its way: `write_eof` behind the last byte.
        if not self._unsent:
            if self._has_ended:
                peer.close()
            return
        # Nobody takes it any more: bytes for an end that has closed are lost, as on a real socket.
        if peer._closing:
            self._unsent.clear()
            self._unsent_bytes = 0
        # Back-pressure: `resume_reading` of the peer moves on (invariant 3).
        elif not peer._is_read:
            return
        else:
            # Invariant 2: set before the bytes are handed over, whose latency is measured by it.
            peer.sent_at = self._unsent[0][0]
            piece = self._next_piece(self._link.piece_bytes())
            protocol = peer._protocol
            assert isinstance(protocol, asyncio.Protocol)
            protocol.data_received(piece)
        # `data_received` may have ended the connection: a lost
        # side is told nothing more (invariant 4).
        if self._is_paused and self._unsent_bytes <= self._low and not self._lost:
            self.pauses[-1] = (self.pauses[-1][0], self._link.now())
            self._protocol.resume_writing()
        if self._closing and not self._unsent:
            self._leave()
        self.move()

    def _next_piece(self, size: int) -> bytes:
        taken: list[bytes] = []
        while self._unsent and size > 0:
            moment, data = self._unsent.popleft()
            if len(data) > size:
                self._unsent.appendleft((moment, data[size:]))
                data = data[:size]
            taken.append(data)
            size -= len(data)
            # Invariant 2: bytes for a client end where those of one write do.
            if not self._is_client:
                break
        piece = b"".join(taken)
        self._unsent_bytes -= len(piece)
        return piece

    @property
    def _is_paused(self) -> bool:
        return bool(self.pauses) and self.pauses[-1][1] is None

    def was_paused(self, moment: float) -> bool:
        """Whether its protocol could not write at that moment."""
        return any(start <= moment and (end is None or moment <= end) for start, end in self.pauses)

    # --- the end

    def _leave(self) -> None:
        """End this side; the other one learns of it later, unless the link is silent."""
        if self._lost:
            return
        self.lose(None)
        self.tell_of_end()

    def tell_of_end(self) -> None:
        """Let the other side know, if this one is gone."""
        if self._lost and not self.is_silent:
            self._loop.call_later(self._link.delay(), self.peer.lose, None)

    def lose(self, error: Exception | None) -> None:
        """The connection is no more for this side."""
        if self._lost:
            return
        self._lost = self._closing = True
        if self.ended_at is None:
            self.ended_at = self._link.now()
        self._unsent.clear()
        self._unsent_bytes = 0
        self._loop.call_soon(self._protocol.connection_lost, error)


class Link:
    """One connection."""

    def __init__(self, network: Network, number: int) -> None:
        self._network = network
        self.client = End(self, is_client=True, address=(network.host, network.port))
        self.server = End(self, is_client=False, address=("client", _PORT_FIRST + number))

    def now(self) -> float:
        return self._network.now()

    def delay(self) -> float:
        return self._network.delay()

    def piece_bytes(self) -> int:
        return self._network.piece_bytes()

    @property
    def is_over(self) -> bool:
        return self.client.is_closing() or self.server.is_closing()

    def cut(self) -> None:
        """The connection breaks: what is on its way is lost, and each side learns of it."""
        # First, so that nothing that is on its way arrives between the cut and the news of it.
        self.fall_silent()
        loop = asyncio.get_running_loop()
        for end in (self.client, self.server):
            loop.call_later(self.delay(), end.lose, ConnectionResetError("cut"))

    def fall_silent(self, *, client: bool = True, server: bool = True) -> None:
        """What these sides write does not arrive any more."""
        for end, silent in ((self.client, client), (self.server, server)):
            if silent:
                end.is_silent = end.lost_words = True

    def recover(self) -> None:
        """What was held back goes on its way."""
        for end in (self.client, self.server):
            end.is_silent = False
            end.move()
        # An end that nobody could hear of while the link was silent.
        if self.is_over:
            for end in (self.client, self.server):
                end.tell_of_end()


class Network:
    """All connections to one address. `now` gives the moments that are noted."""

    def __init__(self, chance: Random, now: Callable[[], float]) -> None:
        self.host = "simulated"
        self.port = 6650
        self.now = now
        self.links: list[Link] = []
        self._chance = chance
        self._new_protocol: NewProtocol | None = None
        self._accepting = False
        self._connections = 0

    async def listen(self, new_protocol: NewProtocol, host: str, port: int) -> Listener:
        """Listen; called like `server.machine.listen`."""
        self.host, self.port = host, port
        self._new_protocol = new_protocol
        return _Listener(self)

    async def connect(
        self, factory: Callable[[], ProtocolT], host: str, port: int, /
    ) -> tuple[End, ProtocolT]:
        """Connect, called like `loop.create_connection`; refused while nobody listens."""
        await asyncio.sleep(self.delay())
        if not self._accepting or self._new_protocol is None or port != self.port:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        self._connections += 1
        link = Link(self, self._connections)
        self.links = [each for each in self.links if not each.is_over]
        self.links.append(link)
        server, client = self._new_protocol(), factory()
        link.server.set_protocol(server)
        link.client.set_protocol(client)
        server.connection_made(link.server)
        client.connection_made(link.client)
        return link.client, client

    def accept(self, accepting: bool) -> None:
        self._accepting = accepting

    def delay(self) -> float:
        """How long the next piece, or the news of an end, takes."""
        kind = self._chance.random()
        most = _FAST_S if kind < 0.9 else _SLOW_S if kind < 0.997 else _STUCK_S
        return most * self._chance.random()

    def piece_bytes(self) -> int:
        """How much of what was written arrives next."""
        kind = self._chance.random()
        if kind < 0.8:
            return 1 << 20
        return self._chance.randrange(1, 2000 if kind < 0.97 else 12)


class _Listener:
    def __init__(self, network: Network) -> None:
        self._network = network

    @property
    def port(self) -> int:
        return self._network.port

    async def start(self) -> None:
        self._network.accept(True)

    def close(self) -> None:
        self._network.accept(False)

    async def wait_closed(self) -> None:
        """Nothing is left to wait for: `close` has ended the listening."""
