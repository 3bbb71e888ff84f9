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

from sidecar import clock, relay
from sidecar.failures import AnsweredHere, AttemptFailed, Malformed, Refused, UploadBroken
from sidecar.headers import UPGRADE_LINES, ResponseFields, request_head
from sidecar.incoming import find_destination
from sidecar.passed_on import PassedOn
from sidecar.policy.classify import code_of, is_verdict
from sidecar.policy.resend import may_resend
from sidecar.tunnel import check_room
from sidecar.upstream.connection import UpstreamConnection
from sidecar.upstream.endpoints import Destination, UpstreamState
from sidecar.upstream.pool import Pool
from telemetry.record import SENT, Attempt, Session

if TYPE_CHECKING:
    from sidecar.body import RequestBody
    from sidecar.inbound import Downstream
    from sidecar.proxy import Proxy
    from sidecar.request import Request


class Exchange(PassedOn):
    """See the module's law. After `run`, `keep_alive` and `taken_over` tell the connection how to go on."""

    __slots__ = ("_destination", "continued")

    def __init__(self, proxy: Proxy, client: Downstream, request: Request, started: float) -> None:
        self._loop = proxy.loop
        self._proxy = proxy
        self._client = client
        self._request = request
        self._started = started
        self._destination: Destination | None = None
        self._upstream: UpstreamState | None = None
        self._pool: Pool | None = None
        self._connection: UpstreamConnection | None = None
        self._upload: asyncio.Task[None] | None = None
        self._answered = False
        self.continued = False
        # What follows an Upgrade that is declined is not HTTP for sure.
        self.keep_alive = request.keep_alive and not (request.http10 or request.switches)
        self.taken_over = False
        self.record = Session(proxy.next_session_id(), request.method, request.path, started)

    @property
    def expects_continue_unanswered(self) -> bool:
        """The app waits for a 100 before it sends its body, and never got one."""
        return self._request.expects_continue and not self.continued

    @property
    def has_unread_body(self) -> bool:
        body = self._request.body
        return body is not None and not body.finished

    async def run(self) -> None:
        record = self.record
        try:
            if self._request.method == "CONNECT":
                await self._tunnel()
            else:
                self._destination, target = find_destination(self._request, self._proxy)
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
        except AnsweredHere as here:
            self._answer_here(here)
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
                    await self.become_task()
                    connection = await pool.dial()
                    sent_at = clock.monotonic()
                self._connection = connection
                attempt.reused = connection.reused
                self._send(connection, head, sent_at)
                if not connection.ready:
                    await self.parked()  # for a whole small answer, or the head of a large one
                if connection.failure is not None:
                    raise connection.failure
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
        request = self._request
        framing = b""
        if request.chunked:
            framing = b"Transfer-Encoding: chunked\r\n"
        elif request.content_length is not None:
            framing = b"Content-Length: %d\r\n" % request.content_length
        elif request.upgrade is not None:
            check_room(self._proxy)
            framing = UPGRADE_LINES
        return request_head(request.method.encode(), target, host, request.lines, self._proxy.via_line, framing)

    def _send(self, connection: UpstreamConnection, head: bytes, started: float) -> None:
        """Begin to send the request."""
        upstream = self._upstream
        assert upstream is not None
        request = self._request
        connection.begin(self, bodyless=request.method == "HEAD", deadline=started + upstream.attempt_timeout)
        body = request.body
        if body is None:
            connection.write(head, last=True)
        elif (whole := body.arrived_whole()) is not None:
            connection.write(head + whole, last=True)
        else:
            connection.write(head, last=False)
            connection.expect_progress(upstream.timeouts.body_idle, started)
            self._upload = clock.spawn(self._send_body(body, connection), "upload")

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

    def interim(self, status: int, reason: bytes, fields: ResponseFields) -> None:
        if self._request.http10 or self._client.transport is None:
            return
        if status == 100:
            self.continued = True
        self._client.transport.write(relay.interim(status, reason, fields, self._proxy.via_line))

    def _may_resend(self, failed: AttemptFailed) -> bool:
        request = self._request
        if request.body is not None and not request.body.replayable:
            return False
        return may_resend(failed.phase, request.method, keyed=request.idempotency_key is not None)

    def _judge_status(self, status: int) -> None:
        record = self.record
        record.code = record.attempts[-1].code = code_of(status)
        if is_verdict(status):
            record.outcome = "rejected"
        elif may_resend(SENT, self._request.method, keyed=self._request.idempotency_key is not None):
            record.outcome = "exhausted"
        else:
            record.outcome = "not_retryable"

    # ---- settle ----------------------------------------------------------------------------------------------

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
            if self._request.body is not None:
                record.request_bytes = self._request.body.total
            self._proxy.metrics.observe(record)
