"""TLS with the app: a plain connection becomes one over TLS, or ends within its time.

Law: whoever begins a handshake is counted among its listener's connections, and may take `limits.head_timeout`. A
failure closes the connection, is counted in `sidecar_tls_client_errors_total` under one of a few words, and is told at
a limited rate. Bytes that came before the handshake began (a ClientHello right behind a CONNECT) are its first ones.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from sidecar import clock
from telemetry.names import Field

if TYPE_CHECKING:
    from sidecar.proxy import Proxy

# The app's close_notify is waited for this long; an idle pool of an app answers it only when it is used again.
_SHUTDOWN = 1.0

NOT_TLS = "not_tls"
SNI_MISMATCH = "sni_mismatch"
CERTIFICATE_REFUSED = "certificate_refused"
UNUSED = "unused"
TIMEOUT = "timeout"
CLOSED = "closed"
PROTOCOL = "protocol"
_NO_TLS_AT_ALL = frozenset({"HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL"})
_NOT_A_RECORD = frozenset({"RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE", "BAD_RECORD_TYPE", "PACKET_LENGTH_TOO_LONG"})
# What a client says that does not want our certificate. `internal error` is how some stacks put a failed pin.
_REFUSALS = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "CERTIFICATE_REVOKED", "CERTIFICATE_EXPIRED",
             "UNSUPPORTED_CERTIFICATE", "ACCESS_DENIED")  # fmt: skip


class Handshakes:
    """Those under way."""

    def __init__(self, proxy: Proxy, room: Callable[[int, asyncio.BaseTransport | None], None]) -> None:
        """`room` is told how many there are, and who comes; it raises Refused when that is one too many."""
        self._proxy = proxy
        self._room = room
        self._opening: dict[asyncio.Transport, asyncio.Task[None] | None] = {}

    def __len__(self) -> int:
        return len(self._opening)

    def check_room(self, transport: asyncio.BaseTransport | None = None) -> None:
        """Connections in their handshake are not among the listener's; together they are bounded like those."""
        self._room(len(self._opening), transport)

    def end_oldest(self) -> bool:
        """False: there is none."""
        oldest = next((transport for transport in self._opening if not transport.is_closing()), None)
        if oldest is not None:
            self._opening.pop(oldest)
            oldest.abort()
        return oldest is not None

    def awaited(self, transport: asyncio.Transport) -> None:
        """Its first byte is: until then it counts, and can be closed."""
        self._opening[transport] = None

    def gave_up(self, transport: asyncio.Transport, word: str) -> None:
        """It never came to a handshake."""
        if self._opening.pop(transport, self) is None:
            self._proxy.metrics.tls_client_errors[word] += 1

    def begin(
        self,
        transport: asyncio.Transport,
        tail: bytes,
        context: ssl.SSLContext,
        secured: asyncio.Protocol,
        failed: Callable[[str, str], None],
    ) -> None:
        """`tail` came already. `failed` hears the word and the reason, after the count."""
        loop, tls = self._proxy.loop, Tls()
        shaking = self._shake_hands(transport, context, secured, failed, tls)
        self._opening[transport] = clock.spawn(shaking, "TLS handshake")
        # The task's first step gives the transport to TLS and schedules its beginning; right behind that comes this.
        loop.call_soon(loop.call_soon, _begun, transport, tail, context, tls)

    async def _shake_hands(
        self,
        transport: asyncio.Transport,
        context: ssl.SSLContext,
        secured: asyncio.Protocol,
        failed: Callable[[str, str], None],
        tls: Tls,
    ) -> None:
        proxy = self._proxy
        try:
            if transport.is_closing():  # while it was told to begin: of that end the loop would not tell TLS any more
                raise ConnectionResetError
            over_tls = await proxy.loop.start_tls(
                transport,
                secured,
                context,
                server_side=True,
                ssl_handshake_timeout=proxy.limits.head_timeout,
                ssl_shutdown_timeout=_SHUTDOWN,
            )
        except OSError as error:  # ssl.SSLError is one
            word, why = _told(error, certificate_seen=tls.hello_read)
            proxy.metrics.tls_client_errors[word] += 1
            failed(word, why)
            return
        finally:
            self._opening.pop(transport, None)
        if over_tls is None or over_tls.is_closing():
            return  # ended from here
        secured.connection_made(over_tls)  # before the first bytes, which are read in the next turn

    def tell(self, word: str, body: str) -> None:
        """Limited in rate, like all that whoever can connect may cause."""
        fields = {Field.BODY: body, "reason": word}
        self._proxy.log.event("warn", "sidecar.tls.client_error", word, clock.monotonic(), lambda: fields)

    def close(self) -> None:
        for transport in tuple(self._opening):
            transport.abort()


class Tls:
    """OpenSSL's side of one handshake."""

    __slots__ = ("underneath",)

    def __init__(self) -> None:
        self.underneath: ssl.SSLObject | None = None

    @property
    def hello_read(self) -> bool:
        """The ClientHello was understood, so the app has been sent our certificate."""
        return self.underneath is not None and self.underneath.shared_ciphers() is not None


class TellingContext(ssl.SSLContext):
    """A context that tells about the handshake it began last: event loops keep that to themselves."""

    newest: ssl.SSLObject | None = None

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        self.newest = super().wrap_bio(*args, **kwargs)
        return self.newest


def _begun(transport: asyncio.Transport, tail: bytes, context: ssl.SSLContext, tls: Tls) -> None:
    if transport.is_closing():
        return
    if isinstance(context, TellingContext):
        tls.underneath, context.newest = context.newest, None
    if tail:
        _feed(transport, tail)


def _feed(transport: asyncio.Transport, tail: bytes) -> None:
    protocol = cast(Any, transport.get_protocol())  # TLS, which takes its bytes as a BufferedProtocol
    left = memoryview(tail)
    while left:
        room = protocol.get_buffer(len(left))
        size = min(len(left), len(room))
        room[:size] = left[:size]
        protocol.buffer_updated(size)
        left = left[size:]


def _told(error: OSError, *, certificate_seen: bool) -> tuple[str, str]:
    """A word for the metric, and OpenSSL's own for the log."""
    reason = str(error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if isinstance(error, (ConnectionAbortedError, TimeoutError)):  # by the event loop
        return TIMEOUT, "the handshake took too long (limits.head_timeout)"
    if not reason or "EOF" in reason:
        if certificate_seen:  # asyncio says no this way
            return CERTIFICATE_REFUSED, "the app closed the connection when it saw the certificate"
        return CLOSED, "the app closed the connection in the middle of the handshake"
    if reason == "CALLBACK_FAILED":
        return SNI_MISMATCH, "the app asked for another host inside TLS than in its CONNECT"
    if reason in _NO_TLS_AT_ALL or reason in _NOT_A_RECORD:
        return NOT_TLS, f"what the app sent is not TLS ({reason.lower().replace('_', ' ')})"
    if any(refusal in reason for refusal in _REFUSALS):
        return CERTIFICATE_REFUSED, f"the app refused the certificate ({reason.lower().replace('_', ' ')})"
    return PROTOCOL, f"the app and the sidecar have no TLS in common ({reason.lower().replace('_', ' ')})"
