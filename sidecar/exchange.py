"""START READING HERE. One request of the app, from its parsed head to its last byte.

route → admit → attempt → relay → settle, in this order, in `run`. The exchange owns the loop over attempts: it
asks pure policies what to do and does it. It fills one record; when the app has its answer the record alone
feeds every signal.

Law: whatever happens, the request ends in exactly one outcome, the upstream connection is either given back
whole or closed, and an answer once begun is finished or visibly broken off.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from sidecar import clock, relay
from sidecar.body import RequestBody
from sidecar.failures import AttemptFailed, Malformed, Refused, UploadBroken
from sidecar.headers import CRLF, UPGRADE_LINES, RequestFields, request_head
from sidecar.incoming import check_connect, find_destination
from sidecar.own_answers import OwnAnswers
from sidecar.policy.classify import code_of, is_verdict
from sidecar.policy.resend import may_resend
from sidecar.tunnel import Side, Tunnel, check_room, connect_target
from sidecar.upstream.connection import UpstreamConnection
from sidecar.upstream.endpoints import Destination, UpstreamState
from sidecar.upstream.pool import Pool
from telemetry.record import CONNECTED, SENT, Attempt, Session

if TYPE_CHECKING:
    from sidecar.inbound import Downstream
    from sidecar.proxy import Proxy


class Exchange(OwnAnswers):
    """See the module's law. After `run`, `keep_alive` and `taken_over` tell the connection how to go on."""

    __slots__ = (
        "_connection",
        "_destination",
        "_pool",
        "_started",
        "_upload",
        "continued",
        "taken_over",
    )

    def __init__(
        self, proxy: Proxy, client: Downstream, message: RawRequestMessage, payload: StreamReader, started: float
    ) -> None:
        self._proxy = proxy
        self._client = client
        self._message = message
        self._payload = payload
        self._started = started
        self._fields: RequestFields = RequestFields(message.raw_headers)
        self._destination: Destination | None = None
        self._upstream: UpstreamState | None = None
        self._pool: Pool | None = None
        self._connection: UpstreamConnection | None = None
        self._body: RequestBody | None = None
        self._upload: asyncio.Task[None] | None = None
        self._answered = False
        self.continued = False
        self.http10 = message.version is not HttpVersion11
        # llhttp loses what follows an Upgrade it does not know, and an upgrade that was declined: both end here.
        self.keep_alive = not (message.should_close or self.http10 or message.upgrade)
        self.taken_over = False
        self.record = Session(proxy.next_session_id(), message.method, message.path, started)

    @property
    def expects_continue_unanswered(self) -> bool:
        """The app waits for a 100 before it sends its body, and never got one."""
        return self._fields.expects_continue and not self.continued

    async def run(self) -> None:
        record = self.record
        try:
            if self._message.method == "CONNECT":
                await self._tunnel()
            else:
                self._destination, target = find_destination(self._message, self._fields, self._proxy, self.http10)
                self._admit(self._destination.upstream)
                await self._attempt(target)
                sink = self._begin_answer()
                if sink is not None:
                    await self._stream(sink)
        except Malformed as malformed:
            self._answer_malformed(malformed)
            return  # not a session: counted apart
        except Refused as refused:
            self._answer_refused(refused)
        except AttemptFailed as failed:
            self._answer_failed(failed)
        except UploadBroken as broken:
            self._drop_connection()
            self._answer_broken_upload(broken)
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            record.code = "CLIENT_DISCONNECTED"
            raise
        except Exception as error:
            self._answer_internal(error)
        finally:
            self._settle()

    # ---- admit -----------------------------------------------------------------------------------------------

    def _admit(self, upstream: UpstreamState) -> None:
        limit = upstream.max_in_flight
        if limit is not None and upstream.in_flight >= limit:
            self.record.upstream = upstream.label
            raise Refused(
                "OVERLOADED",
                f"{upstream.label} already has {limit} requests in flight (max_in_flight)",
                reason="max_in_flight",
                retry_after=1,
            )
        upstream.in_flight += 1
        upstream.last_used = self._started
        self._upstream = upstream
        self.record.upstream = upstream.label

    # ---- attempt ---------------------------------------------------------------------------------------------

    async def _attempt(self, target: bytes) -> None:
        """One attempt, plus at most one more on a fresh connection when a kept-alive one turns out to be dead."""
        assert self._destination is not None and self._upstream is not None
        pool, host = self._destination.pick()
        self._pool = pool
        head = self._request_head(target, host)
        connection = pool.take()
        record = self.record
        kind = "first"
        while True:
            attempt = Attempt(kind, pool.label, clock.monotonic() if record.attempts else self._started)
            record.attempts.append(attempt)
            try:
                sent_at = attempt.started
                if connection is None:
                    connection = await pool.dial()
                    sent_at = clock.monotonic()
                self._connection = connection
                attempt.reused = connection.reused
                await self._send(connection, head, sent_at)  # a whole small answer, or the head of a large one
            except AttemptFailed as failed:
                self._attempt_failed(attempt, failed)
                if kind == "first" and failed.stale and self._may_resend(failed):
                    kind, connection = "stale", None
                    continue
                raise
            attempt.ended = clock.monotonic()
            attempt.phase = SENT
            attempt.status = connection.status
            return

    def _request_head(self, target: bytes, host: bytes) -> bytes:
        fields = self._fields
        message = self._message
        framing = b""
        if message.chunked:
            framing = b"Transfer-Encoding: chunked\r\n"
        elif fields.content_length is not None:
            framing = b"Content-Length: %d\r\n" % fields.content_length
        elif fields.upgrade is not None:
            check_room(self._proxy)
            framing = UPGRADE_LINES
        if self._payload is not EMPTY_PAYLOAD:
            self._body = RequestBody(self._payload, chunked=message.chunked, limit=self._proxy.limits.replay_body_bytes)
        return request_head(message.method.encode(), target, host, fields, self._proxy.via_line, framing)

    def _send(self, connection: UpstreamConnection, head: bytes, started: float) -> asyncio.Future[None]:
        """Begin to send the request; the future resolves when there is an answer to relay."""
        upstream = self._upstream
        assert upstream is not None
        deadline = started + upstream.attempt_timeout
        waiter = connection.begin(bodyless=self._message.method == "HEAD", deadline=deadline)
        connection.on_interim = self._interim
        body = self._body
        if body is None:
            connection.write(head, last=True)
        elif (whole := body.arrived_whole()) is not None:
            connection.write(head + whole, last=True)
        else:
            connection.write(head, last=False)
            connection.expect_progress(upstream.timeouts.body_idle, started)
            self._upload = clock.spawn(self._send_body(body, connection), "upload")
        return waiter

    async def _send_body(self, body: RequestBody, connection: UpstreamConnection) -> None:
        assert self._upstream is not None
        try:
            await body.stream(connection)
        except asyncio.CancelledError:
            raise
        except Exception as broken:  # whatever it is, the exchange waiting on this connection must hear of it
            connection.fail(broken)
            return
        if connection.head is None:
            # The answer's clock starts when the question has been asked.
            connection.expect_head_by(clock.monotonic() + self._upstream.attempt_timeout)

    def _interim(self, status: int, reason: bytes, fields: list[tuple[bytes, bytes]]) -> None:
        if self.http10 or self._client.transport is None:
            return
        if status == 100:
            self.continued = True
        self._client.transport.write(relay.interim(status, reason, fields, self._proxy.via_line))

    def _attempt_failed(self, attempt: Attempt, failed: AttemptFailed) -> None:
        attempt.ended = clock.monotonic()
        attempt.phase = failed.phase
        attempt.code = failed.code
        attempt.message = failed.message
        self._drop_connection()
        self._stop_upload()

    def _may_resend(self, failed: AttemptFailed) -> bool:
        if self._body is not None and not self._body.replayable:
            return False
        return may_resend(failed.phase, self._message.method, keyed=self._fields.keyed)

    # ---- relay -----------------------------------------------------------------------------------------------

    def _begin_answer(self) -> relay.AppSink | None:
        """Pass the upstream's answer on: all of it, or its head, and then the sink for the rest."""
        connection, upstream, client = self._connection, self._upstream, self._client
        assert connection is not None and upstream is not None and connection.head is not None
        record = self.record
        record.status = status = connection.status
        if status >= 400:
            self._judge_status(status)
        else:
            record.outcome = "first_try" if len(record.attempts) == 1 else "recovered"
        if connection.switched:
            self._switch_protocols(connection)
            return None
        framing, chunked = relay.framing_of(connection, head_request=self._message.method == "HEAD", http10=self.http10)
        if self._must_close():
            framing += b"Connection: close\r\n"
        if record.outcome == "first_try":
            own_lines = b"%bx-sidecar-session: %b\r\n%b" % (
                self._proxy.via_line,
                record.session_id,
                upstream.first_try_lines,
            )
        else:
            own_lines = self._proxy.via_line + relay.sidecar_lines(
                record.session_id, len(record.attempts), record.outcome, upstream.answer_lines
            )
        if not connection.head.dated:
            own_lines += self._proxy.date_line
        transport = client.transport
        if transport is None:
            raise asyncio.CancelledError
        self._answered = True
        head = relay.response_head(connection, own_lines, framing)
        if connection.complete and not chunked and not connection.waiting:
            transport.write(head + connection.body)
            record.response_bytes = len(connection.body)
            self._give_back(connection)
            return None
        transport.write(head)
        return relay.AppSink(transport, chunked=chunked)

    async def _stream(self, sink: relay.AppSink) -> None:
        connection = self._connection
        assert connection is not None and self._upstream is not None
        client, record = self._client, self.record
        connection.expect_progress(self._upstream.timeouts.body_idle, clock.monotonic())
        client.stream_through(sink, connection.resume)
        try:
            await connection.stream_to(sink)
        except (AttemptFailed, UploadBroken) as broken:
            failed = broken if isinstance(broken, AttemptFailed) else AttemptFailed("CONNECTION_RESET", str(broken))
            self._attempt_failed(record.attempts[-1], failed)
            record.outcome, record.code, record.message = "failed_streaming", failed.code, failed.message
            self.keep_alive = False
            if client.transport is not None:
                relay.cut_off(client.transport, reset=self.http10)
        else:
            sink.end(connection.trailers)
            self._give_back(connection)
        finally:
            record.response_bytes = sink.count
            record.attempts[-1].ended = clock.monotonic()
            client.stream_ended()

    def _judge_status(self, status: int) -> None:
        record = self.record
        record.code = record.attempts[-1].code = code_of(status)
        if is_verdict(status):
            record.outcome = "rejected"
        elif may_resend(SENT, self._message.method, keyed=self._fields.keyed):
            record.outcome = "exhausted"
        else:
            record.outcome = "not_retryable"

    # ---- tunnels ---------------------------------------------------------------------------------------------

    async def _tunnel(self) -> None:
        """CONNECT: dial, say 200, and step aside."""
        proxy, record = self._proxy, self.record
        check_connect(self._message, self._fields, proxy, self.http10)
        origin = connect_target(proxy, self._message.path)
        upstream = proxy.directory.tunnel(origin.host, origin.port)
        self._admit(upstream)
        attempt = Attempt("first", origin.label, self._started)
        record.attempts.append(attempt)
        try:
            side, _ = await proxy.dialler.connect(Side, origin, upstream.timeouts.connect)
        except AttemptFailed as failed:
            self._attempt_failed(attempt, failed)
            raise
        attempt.ended = clock.monotonic()
        attempt.phase = CONNECTED
        record.status = attempt.status = 200
        if side.transport is None:
            raise AttemptFailed("CONNECTION_RESET", "the upstream closed the tunnel at once", CONNECTED)
        self._step_aside(b"HTTP/1.1 200 Connection established\r\n", b"", side.transport, b"", side)

    def _switch_protocols(self, connection: UpstreamConnection) -> None:
        """101: from here on both connections belong to a tunnel."""
        assert self._pool is not None and connection.head is not None
        if self._fields.upgrade is None:
            raise AttemptFailed("PROTOCOL_ERROR", "the upstream switched protocols without being asked", SENT)
        self._pool.discard(connection)
        self._connection = None
        connection.finish()
        if connection.transport is None:
            raise AttemptFailed("CONNECTION_RESET", "the upstream closed right after switching protocols", SENT)
        head = relay.response_head(connection, b"", b"").removesuffix(CRLF)
        self._step_aside(head, UPGRADE_LINES, connection.transport, connection.tail)

    def _step_aside(
        self, head: bytes, lines: bytes, upstream_transport: asyncio.Transport, tail: bytes, dialled: Side | None = None
    ) -> None:
        """Hand both connections to a tunnel, which settles the record when it ends."""
        assert self._upstream is not None
        record = self.record
        own = relay.sidecar_lines(record.session_id, len(record.attempts), "tunnelled", self._upstream.answer_lines)
        tunnel = Tunnel(self._proxy, self._upstream, record, dialled)
        try:
            check_room(self._proxy)
            client_transport, client_tail = self._client.hand_over()
        except (Refused, asyncio.CancelledError):
            upstream_transport.abort()
            raise
        self._answered = self.taken_over = True
        record.outcome = ""
        tunnel.begin(
            client_transport,
            client_tail,
            upstream_transport,
            tail,
            head + self._proxy.via_line + own + lines + CRLF,
        )

    # ---- settle ----------------------------------------------------------------------------------------------

    def _give_back(self, connection: UpstreamConnection) -> None:
        self._connection = None
        if self._pool is not None:
            self._pool.give_back(connection, self.record.attempts[-1].ended)

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._pool is not None:
                self._pool.discard(connection)
            connection.abort()

    def _stop_upload(self) -> None:
        if self._upload is not None:
            self._upload.cancel()
            self._upload = None

    def _settle(self) -> None:
        """Nothing of this exchange stays behind, and the record goes to telemetry."""
        if self._upload is not None:
            if not self._upload.done():
                self.keep_alive = False
            self._stop_upload()
        if self._connection is not None:
            self._drop_connection()
        upstream = self._upstream
        if upstream is not None:
            upstream.in_flight -= 1
        record = self.record
        record.ended = clock.monotonic()
        if record.outcome:
            if self._body is not None:
                record.request_bytes = self._body.total
            self._proxy.metrics.observe(record)
