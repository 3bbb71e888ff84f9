"""What the sidecar's two parsers make of bytes: their own connections, on a transport that only takes notes.

Nothing between the bytes and the notes is a stand-in: the app's side is `Downstream` with `find_destination` behind it,
the upstream's side is `UpstreamConnection`. What an exchange would do next (stream a body, ask again on a kept
connection) is done here, in the same callbacks.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from config.loader import Loaded
from config.model import Settings
from sidecar.assembly import Sidecar
from sidecar.failures import AnsweredHere, Malformed, Refused
from sidecar.headers import ResponseFields
from sidecar.inbound import Downstream
from sidecar.request import Request
from sidecar.turn import Turn
from sidecar.upstream.connection import UpstreamConnection
from telemetry.logs import Log

Field = tuple[bytes, bytes]


class Deaf(asyncio.Transport):
    """Takes what is written and says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False

    def write(self, data: Any) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


# ---- requests ----------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """One request as an exchange would begin with it."""

    request: Request
    refused: str = ""

    @property
    def body(self) -> bytes:
        return self.request.body.content if self.request.body is not None else b""

    @property
    def trailers(self) -> tuple[Field, ...]:
        return tuple(self.request.body.trailers) if self.request.body is not None else ()

    @property
    def broken(self) -> str:
        """Why it cannot become whole."""
        return (self.request.body._failure or "") if self.request.body is not None else ""

    @property
    def whole(self) -> bool:
        return self.request.body is None or self.request.body.finished


class _Noting(Downstream):
    """Notes each request where the real one would start its exchange, and goes on as if it had been answered."""

    __slots__ = ("noted", "over", "refused")

    def __init__(self, manager: Any, **options: Any) -> None:
        super().__init__(manager, **options)
        self.transport = Deaf()
        self.noted: list[Asked] = []
        self.refused = ""
        self.over = False

    def _run_waiting(self) -> None:
        while self._waiting and not self.refused and not self.over:
            request = self._waiting.popleft()
            asked = Asked(request)
            try:
                if request.error is not None:
                    raise request.error
                find = self.find_tunnel if request.method == "CONNECT" else self.find_destination
                find(request, self.proxy)
            except AnsweredHere:
                pass
            except (Malformed, Refused) as refusal:
                self.refused = asked.refused = refusal.message
            if not request.method:
                break  # never a request: its bytes were refused
            self.noted.append(asked)
            if not request.keep_alive or request.http10:  # as an exchange has it
                self.over = True


class RequestSide:
    """Makes a connection of an app for each lot of bytes. `close` in the end."""

    def __init__(self, state_dir: str) -> None:
        self._loop = asyncio.new_event_loop()
        keys = {
            "state_dir": state_dir,
            "upstreams": {"u": {"route": "/", "endpoints": ["http://127.0.0.1:1"]}},
            "limits": {"head_bytes": 65_536},
            "egress": {"connect_ports": [80]},
        }
        settings = Settings.model_validate(keys)

        async def make() -> Sidecar:
            return Sidecar(Loaded(settings, None, {}, b""), Log(io.StringIO()))

        self._sidecar = self._loop.run_until_complete(make())
        self._listener = self._sidecar.proxy.listener

    def read(self, segments: Iterable[bytes]) -> _Noting:
        assert self._listener is not None
        connection = _Noting(self._listener, **self._listener.options)
        for segment in segments:
            if segment:
                connection.data_received(segment)
        return connection

    def close(self) -> None:
        self._loop.close()


# ---- answers -----------------------------------------------------------------------------------------------------


@dataclass
class Answered:
    """One answer as an exchange gets it."""

    status: int = 0
    interims: list[int] = field(default_factory=list)
    body: bytes = b""
    trailers: tuple[Field, ...] = ()
    whole: bool = False
    failed: str = ""
    reusable: bool = False
    surplus: bool = False


class _Exchange:
    """The part of an exchange that a connection talks to."""

    def __init__(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        self.parts: list[bytes] = []
        self.interims: list[int] = []
        self.streams = False

    def wake(self) -> None:
        connection = self.connection
        if not self.streams and connection.ready and not connection.complete and connection.failure is None:
            self.streams = True
            connection.stream_to(self)

    def interim(self, status: int, reason: bytes, fields: ResponseFields) -> None:
        self.interims.append(status)

    def location(self, value: bytes) -> bytes:
        return value

    def body(self, data: bytes) -> bool:
        self.parts.append(data)
        return False

    def pending(self) -> int:
        return 0


class AnswerSide:
    """One upstream after the other; a connection is kept for as long as ours would keep it."""

    def __init__(self, buffer_limit: int) -> None:
        self._buffer_limit = buffer_limit
        self._connection: UpstreamConnection | None = None
        self.surplus = 0

    def _note_surplus(self) -> None:
        self.surplus += 1

    def ask(self, method: bytes, segments: Sequence[bytes], *, ended: bool) -> Answered:
        connection = self._connection or self._dial()
        self._connection, self.surplus = None, 0
        exchange, turn = _Exchange(connection), connection._turn
        connection.begin(exchange, bodyless=method == b"HEAD", deadline=1e9)
        connection.write_all(method + b" / HTTP/1.1\r\n\r\n")
        turn.send()
        turn.under_way = False
        for segment in segments:
            if segment and not connection.closed:
                connection.data_received(segment)
        if ended and not connection.closed:
            connection.eof_received()
            connection.connection_lost(None)
        return self._told(connection, exchange)

    def _told(self, connection: UpstreamConnection, exchange: _Exchange) -> Answered:
        failure = connection.failure
        told = Answered(connection.status if connection.head is not None else 0, exchange.interims)
        told.whole = connection.complete and failure is None
        if exchange.streams:
            told.body = b"".join(exchange.parts)
        elif told.whole and not connection.buffered:
            told.body = b"".join(connection.waiting)
        elif told.whole:
            told.body = connection.body
        if told.whole:
            told.trailers = tuple(connection.trailers)
        if connection.switched:
            told.whole, told.failed = False, "switched without being asked"
        elif failure is not None:
            told.failed = str(failure) or "failed"
        told.surplus = self.surplus > 0
        told.reusable = connection.finish()
        if told.reusable:
            self._connection = connection
        return told

    def _dial(self) -> UpstreamConnection:
        turn = Turn(SimpleNamespace(call_soon=lambda *_: None))  # type: ignore[arg-type]
        ticker = SimpleNamespace(watched=set())
        connection = UpstreamConnection(None, ticker, turn, 65_536, self._buffer_limit, 60.0, self._note_surplus)  # type: ignore[arg-type]
        connection.connection_made(Deaf())
        return connection
