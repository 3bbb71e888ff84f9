"""The part of an exchange that passes an upstream's answer on: whole, as a stream, or as a tunnel.

Law: an answer once begun is finished or visibly broken off (R13). The upstream's connection is given back only
after its answer has been read to the end; a connection that became a tunnel belongs to the tunnel. An app that leaves
when it has all that it asked for has been served: what is left of the answer is read for a moment, for the sake of the
connection.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

from sidecar import clock, relay
from sidecar.answers import status_line
from sidecar.failures import AttemptFailed, GaveUp, Intercepted, Refused, UploadBroken
from sidecar.handshakes import CLOSED
from sidecar.headers import CRLF
from sidecar.own_answers import OwnAnswers
from sidecar.policy.concurrency import Place
from sidecar.tunnel import Side, Tunnel, check_room
from sidecar.upstream.connection import UpstreamConnection
from sidecar.upstream.destination import Choice, Destination
from sidecar.upstream.endpoints import UpstreamState
from telemetry.record import CONNECTED, SENT, Attempt, Left, left_of

# For what is left of an answer whose app has left.
_REST_SECONDS = 0.5
_REST_BYTES = 65_536
# For a ClientHello. Without one a client is judged by the rest that is known of it.
_HELLO_SECONDS = 1.0


class PassedOn(OwnAnswers):
    """See the module's law."""

    __slots__ = (
        "_asked_at",
        "_choice",
        "_connection",
        "_permit",
        "_place",
        "_side",
        "_started",
        "_upload",
        "taken_over",
    )

    _asked_at: float
    """When a body that came in pieces had been sent; 0 before, and for all others."""
    _choice: Choice
    """Where the current attempt goes."""
    _connection: UpstreamConnection | None
    _permit: Any
    """The leave of the breaker for the current attempt; None once it has been handed back."""
    _place: Place | None
    """Under `max_in_flight`."""
    _side: Side | None
    """The upstream's end of a tunnel that is about to begin."""
    _started: float
    _upload: asyncio.Task[None] | None
    taken_over: bool

    def _report(self, ok: bool | None, now: float, *, waited: float | None = None) -> None:
        raise NotImplementedError

    # ---- answers ---------------------------------------------------------------------------------------------

    def _begin_answer(self) -> relay.AppSink | None:
        """Pass the upstream's answer on: all of it, or its head, and then the sink for the rest."""
        connection, upstream = self._connection, self._upstream
        assert upstream is not None
        if connection is None:
            self._begin_tunnel()
            return None
        assert connection.head is not None
        record = self.record
        record.status = status = connection.status
        if connection.switched:
            self._switch_protocols(connection)
            return None
        transport = self._client.transport
        if transport is None:
            raise asyncio.CancelledError
        head = connection.head
        closing = not self.keep_alive or self._must_close()
        if connection.buffered and connection.complete and record.outcome == "first_try" and head.dated and not closing:
            # Most answers, in one piece: small, complete, at the first try.
            self._answered = True
            transport.write(
                b"%b%b\r\nx-sidecar-session: %b\r\n%bContent-Length: %d\r\n\r\n%b"
                % (
                    status_line(status, connection.reason),
                    CRLF.join(head.lines),
                    record.session_id,
                    upstream.first_try_lines,
                    len(connection.body),
                    connection.body,
                )
            )
            record.response_bytes = len(connection.body)
            self._give_back(connection)
            return None
        framing = relay.framing_of(connection, head_request=self._request.method == "HEAD", http10=self._request.http10)
        own_lines = relay.sidecar_lines(record, upstream.answer_lines)
        if not head.dated:
            own_lines += self._proxy.date_line
        close_line = b"Connection: close\r\n" if closing else b""
        begun = relay.response_head(connection, own_lines, framing.line + close_line)
        if connection.complete and not framing.chunked and not connection.waiting:
            framing.check(len(connection.body))
            self._answered = True
            transport.write(begun + connection.body)
            record.response_bytes = len(connection.body)
            self._give_back(connection)
            return None
        self._answered = True
        transport.write(begun)
        return relay.AppSink(transport, framing, events=head.event_stream)

    async def _stream(self, sink: relay.AppSink) -> None:
        connection = self._connection
        assert connection is not None and self._upstream is not None
        client, record = self._client, self.record
        record.first_byte = record.attempts[-1].ended
        connection.expect_progress(self._upstream.timeouts.body_idle, clock.monotonic())
        client.stream_through(sink, connection.resume)
        try:
            connection.stream_to(sink)
            if not connection.ready:
                await self.parked()
            if connection.failure is not None:
                raise connection.taken_failure()
        except asyncio.CancelledError:
            record.left = Left(clock.monotonic(), sink.count, sink.said_done)
            served = await self._seen_out(connection, sink)
            self._drop_connection()  # at once: nobody takes its bytes while the rest is settled
            if not served:
                raise
        except (AttemptFailed, UploadBroken) as broken:
            self._break_off(broken)
        else:
            sink.end(connection.trailers)
            self._give_back(connection)
        finally:
            left = left_of(record)
            record.response_bytes = sink.count if left is None else left.bytes
            record.attempts[-1].ended = self._streamed_until()
            client.stream_ended()

    def _streamed_until(self) -> float:
        """For the app."""
        left = left_of(self.record)
        return clock.monotonic() if left is None else left.at

    async def _seen_out(self, connection: UpstreamConnection, sink: relay.AppSink) -> bool:
        """The app has left. Had it all that it asked for? Yes if the stream had said that it is over, or if its end
        comes within a moment; not if it was told how long the answer is, or was slower than the answer."""
        done = sink.said_done
        if not done and (sink.full or sink.framing.length is not None or self._proxy.draining):
            return False
        rest = relay.Rest(sink, _REST_BYTES)
        await self.become_task()
        try:
            async with asyncio.timeout(_REST_SECONDS):
                connection.stream_to(rest)
                if not connection.ready:
                    await self.parked()
        except (TimeoutError, asyncio.CancelledError):
            pass
        if connection.complete and connection.failure is None and not rest.too_much:
            sink.end(connection.trailers)
            self._give_back(connection)
            return True
        if done:
            self._report(True, self.record.attempts[-1].ended)
        return done

    def _break_off(self, broken: AttemptFailed | UploadBroken) -> None:
        """The answer has begun and cannot be finished. The breaker hears of it if it was the upstream's fault."""
        client, record = self._client, self.record
        record.suppressed = "response_started"
        if isinstance(broken, AttemptFailed):
            failed, record.outcome, ok = broken, "failed_streaming", False
        else:
            failed = AttemptFailed("CLIENT_DISCONNECTED", str(broken), SENT)
            record.outcome, ok = ("cancelled" if broken.stalled else "failed_streaming"), None
            record.suppressed = None
        self._attempt_failed(record.attempts[-1], failed)
        self._report(ok, record.attempts[-1].ended)
        record.code, record.message = failed.code, failed.message
        self.keep_alive = False
        if client.transport is not None:
            relay.cut_off(client.transport, reset=self._request.http10)

    # ---- tunnels ---------------------------------------------------------------------------------------------

    async def _find_tunnel(self) -> Destination:
        """Raises Intercepted where TLS ends here."""
        proxy, client = self._proxy, self._client
        origin = client.find_tunnel(self._request, proxy)
        upstream = proxy.interception.upstream_of(origin)
        if upstream is not None:
            await self.become_task()
            caller = await proxy.interception.client_of(self._request, origin, client.transport)
            if caller.program is None:
                caller = caller._replace(hello=await self._hear_hello(upstream))
            proxy.interception.look_at(caller, origin, upstream)
        check_room(proxy)
        return proxy.directory.tunnel(origin)

    async def _hear_hello(self, upstream: UpstreamState) -> str:
        """Grant the CONNECT, and hear how the app begins TLS; nothing, if it does not say in time."""
        from sidecar.hello import Incomplete, digest_of_hello, is_decided

        client, transport = self._client, self._client.transport
        if transport is None:
            raise asyncio.CancelledError
        transport.write(b"HTTP/1.1 200 Connection established\r\n%b\r\n" % upstream.answer_lines)
        self._answered = True
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                return digest_of_hello(await client.early(is_decided)) or ""
        except (Incomplete, TimeoutError):
            return ""  # TLS itself will say what is wrong with it
        except asyncio.CancelledError:
            if not transport.is_closing():
                raise
            self._proxy.metrics.tls_client_errors[CLOSED] += 1
            return ""  # it left in its handshake: that ends when it is to be handed over, and is no session

    async def _dial_tunnel(self, attempt: Attempt, at_most: float) -> None:
        """CONNECT: one attempt to reach the other side, within `at_most` seconds."""
        upstream, choice = self._upstream, self._choice
        assert upstream is not None
        await self.become_task()
        side, attempt.address = await upstream.dialler.connect(
            Side, choice.endpoint.origin, min(upstream.timeouts.connect, at_most), proxy=choice.proxy, tunnel=True
        )
        attempt.ended = clock.monotonic()
        attempt.phase = CONNECTED
        attempt.status = 200
        if side.transport is None:
            raise AttemptFailed("CONNECTION_RESET", "the upstream closed the tunnel at once", CONNECTED)
        self._side = side
        self._report(True, attempt.ended)

    def _let_in(self, taken: Intercepted) -> None:
        """CONNECT whose TLS ends here. The requests inside are the sessions, so this one is none."""
        transport, tail = self._client.hand_over()
        granted, self._answered, self.taken_over = self._answered, True, True
        self._proxy.interception.take(transport, tail, taken, granted=granted)

    def _begin_tunnel(self) -> None:
        """CONNECT: say 200, and step aside."""
        side = self._side
        assert side is not None and side.transport is not None
        self.record.status = 200
        self._step_aside(b"HTTP/1.1 200 Connection established\r\n", b"", side.transport, b"", side)

    def _switch_protocols(self, connection: UpstreamConnection) -> None:
        """101: from here on both connections belong to a tunnel."""
        self._choice.pool.discard(connection)
        self._connection = None
        connection.finish()
        self._report(True, self.record.attempts[-1].ended)
        if connection.transport is None:
            self.record.outcome = "not_retryable"
            raise GaveUp("CONNECTION_RESET", "the upstream closed right after switching protocols")
        assert connection.head is not None
        protocol = connection.head.upgrade  # as the upstream says: what follows is in it, asked for or not
        lines = b"Connection: Upgrade\r\n" + (b"" if protocol is None else b"Upgrade: %b\r\n" % protocol)
        head = relay.response_head(connection, b"", b"").removesuffix(CRLF)
        transport, tail = connection.hand_over()
        self._step_aside(head, lines, transport, tail)

    def _step_aside(
        self, head: bytes, lines: bytes, upstream_transport: asyncio.Transport, tail: bytes, dialled: Side | None = None
    ) -> None:
        """Hand both connections to a tunnel, which settles the record when it ends."""
        assert self._upstream is not None
        record = self.record
        record.outcome = "tunnelled"
        own = relay.sidecar_lines(record, self._upstream.answer_lines)
        tunnel = Tunnel(self._proxy, self._upstream, record, dialled)
        self._complete_record()  # the tunnel ends when nothing of the exchange is left to ask
        try:
            check_room(self._proxy)
            client_transport, client_tail = self._client.hand_over()
        except (Refused, asyncio.CancelledError):
            upstream_transport.abort()
            raise
        answer = b"" if self._answered else head + own + lines + CRLF
        self._answered = self.taken_over = True
        record.outcome = ""
        tunnel.begin(
            client_transport,
            client_tail,
            upstream_transport,
            tail,
            answer,
        )

    # ---- connections -----------------------------------------------------------------------------------------

    def _give_back(self, connection: UpstreamConnection) -> None:
        """The answer has been read to its end, which is also when the breaker hears of it."""
        self._connection = None
        ended = self.record.attempts[-1].ended
        choice, permit = self._choice, self._permit
        if permit is not None:
            if len(self.record.attempts) > 1:
                self._report(True, ended)
            else:
                self._permit = None
                choice.record(permit, True, ended)
        choice.pool.give_back(connection, ended)

    def _let_go(self, connection: UpstreamConnection) -> None:
        """An answer that is not passed on: keep the connection if it has been read, else there is no telling."""
        if connection.complete:
            self._connection = None
            self._choice.pool.give_back(connection, self.record.attempts[-1].ended)
        else:
            self._drop_connection()
        self._stop_upload()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._choice.pool.discard(connection)
            connection.abort()

    def _stop_upload(self) -> None:
        if self._upload is not None:
            self._upload.cancel()
            self._upload = None

    def _attempt_failed(self, attempt: Attempt, failed: AttemptFailed) -> None:
        attempt.ended = clock.monotonic()
        attempt.phase = failed.phase
        attempt.code = failed.code
        attempt.message = failed.message
        if self._proxy.log.debugging:
            attempt.frames = "".join(traceback.format_exception(failed))
        self._drop_connection()
        self._stop_upload()

    def _waited_for_head(self, now: float) -> float | None:
        """Seconds that a cancelled attempt waited for the head of its answer after the question had been asked; None
        when it has one, or when the app itself had not finished asking."""
        connection = self._connection
        if self.record.outcome != "cancelled" or connection is None or connection.head is not None:
            return None
        if connection.phase != SENT:
            return None
        return now - (self._asked_at or self.record.attempts[-1].started)
