"""What an exchange answers by itself, when there is no upstream's answer to pass on.

Law: each way to fail has one method here, which names the outcome, counts it and writes one answer in the error
shape. An answer that has begun is never followed by another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar import clock, relay
from sidecar.answers import STATUS_LINES
from sidecar.drive import Driven
from telemetry.record import not_kept_code, unkept_of
from telemetry.traces import parse

if TYPE_CHECKING:
    from sidecar.failures import AnsweredHere, GaveUp, Malformed, Refused, UploadBroken
    from sidecar.inbound import Downstream
    from sidecar.proxy import Proxy
    from sidecar.request import Request
    from sidecar.upstream.endpoints import UpstreamState
    from telemetry.record import Session


class OwnAnswers(Driven):
    """The part of an exchange that speaks for the sidecar itself."""

    __slots__ = (
        "_answered",
        "_client",
        "_proxy",
        "_request",
        "_upstream",
        "keep_alive",
        "record",
    )

    _answered: bool
    _client: Downstream
    _proxy: Proxy
    _request: Request
    _upstream: UpstreamState | None
    keep_alive: bool
    record: Session

    def _broke(self, error: BaseException) -> None:
        self.keep_alive = False
        self._proxy.signals.internal_error("exchange", "an exchange did not end as it should", error)

    def _must_close(self) -> bool:
        """Decided when answering, not on arrival."""
        if self.keep_alive:
            body = self._request.body
            if self._proxy.draining or (body is not None and not body.finished):
                self.keep_alive = False
        return not self.keep_alive

    def _answer_malformed(self, malformed: Malformed) -> None:
        self.keep_alive = False
        self._request.error = None  # raised, it holds the frames that hold the request
        self._proxy.metrics.malformed(malformed.reason)
        self._write_error(malformed.code, malformed.message, {"reason": malformed.reason})

    def _answer_refused(self, refused: Refused) -> None:
        record = self.record
        record.outcome, record.code, record.message = "denied", refused.code, refused.message
        self._trace_anyway()
        if record.attempts and record.attempts[-1].code is None and not record.attempts[-1].status:
            record.attempts.pop()  # refused before it was dialled: never an attempt
        self._proxy.metrics.denied(refused.reason)
        self._write_error(
            refused.code,
            refused.message,
            {"reason": refused.reason, **(refused.details or {})},
            status=refused.status,
            retry_after=refused.retry_after,
        )

    def _answer_here(self, here: AnsweredHere) -> None:
        record = self.record
        record.outcome, record.status = here.outcome, here.status
        self._trace_anyway()
        if here.outcome == "denied":
            self._proxy.metrics.denied(here.reason)
        transport = self._client.transport
        if transport is None:
            return
        close = b"Connection: close\r\n" if self._must_close() else b""
        self._answered = True
        own_lines = relay.sidecar_lines(record, b"" if self._upstream is None else self._upstream.answer_lines)
        bodyless = here.status in (204, 304)
        body = b"" if bodyless or self._request.method == "HEAD" else here.body
        record.response_bytes = len(body)
        transport.write(
            b"%b%b%b%b%b%b\r\n%b"
            % (
                STATUS_LINES.get(here.status) or b"HTTP/1.1 %d \r\n" % here.status,
                here.lines,
                own_lines,
                self._proxy.date_line,
                b"" if bodyless else b"Content-Length: %d\r\n" % len(here.body),
                close,
                body,
            )
        )

    def _answer_failed(self, gave_up: GaveUp) -> None:
        record = self.record
        record.code, record.message = gave_up.code, gave_up.message
        details: dict[str, object] = {}
        if gave_up.reason is not None:
            details["reason"] = gave_up.reason
        if gave_up.hint:
            details["hint"] = gave_up.hint
        self._write_error(gave_up.code, gave_up.message, details, retry_after=gave_up.retry_after)

    def _complete_record(self) -> None:
        """What only a session that is kept needs to know."""
        record, request, upstream = self.record, self._request, self._upstream
        agent = request.value(b"user-agent")
        record.user_agent = None if agent is None else agent.decode("latin-1")[:200]
        if record.trace is None and (trace_id := self._trace_id()) is not None:
            record.caller_trace = trace_id
        caller = None if upstream is None else upstream.settings.idempotency.caller
        record.api_key_id = self._proxy.credential_id(request, caller) or None
        if self._client.transport is not None:
            peer = self._client.transport.get_extra_info("peername")
            record.client = peer[0] if peer else None
        scheme, absolute, rest = record.target.partition("://")
        if absolute and not scheme.startswith("/"):  # the app named its target, wherever the attempts went
            host = rest.partition("/")[0].partition("?")[0]
            port = {"http": ":80", "https": ":443", "ws": ":80", "wss": ":443"}.get(scheme.lower(), "")
            record.host = host if host.rpartition(":")[2].isdigit() else host + port
        elif record.attempts:
            record.host = record.attempts[-1].endpoint
        elif upstream is not None and upstream.endpoints:
            record.host = next(iter(upstream.endpoints.values())).label  # refused before any was picked
        elif request.host is not None:
            record.host = request.host.decode("latin-1")
        if upstream is not None:
            record.subsystem = upstream.settings.subsystem or upstream.label

    def _answer_broken_upload(self, broken: UploadBroken) -> None:
        self.record.outcome = "denied"
        self.record.code = "MALFORMED_REQUEST"
        self.keep_alive = False
        self._cut_short()
        self._proxy.metrics.denied("request_body")
        status = 408 if broken.stalled else None
        self._write_error("MALFORMED_REQUEST", str(broken), {"reason": "request_body"}, status=status)

    def _answer_internal(self, error: Exception) -> None:
        self.record.outcome = "internal"
        self.record.code = "SIDECAR_INTERNAL"
        self.keep_alive = False
        self._trace_anyway()
        self._cut_short()
        told = "an exchange failed inside the sidecar"
        self._proxy.signals.internal_error("exchange", told, error, session_id=self._session_id())
        if self._answered and self._client.transport is not None:
            relay.cut_off(self._client.transport, reset=self._request.http10)
        else:
            self._write_error("SIDECAR_INTERNAL", "the sidecar failed on this request; its log says why", {})

    def _write_error(
        self,
        code: str,
        message: str,
        details: dict[str, object],
        *,
        status: int | None = None,
        retry_after: int | None = None,
    ) -> None:
        client, record = self._client, self.record
        if client.transport is None:
            return
        if self._answered:  # of a CONNECT that was granted before it was known where its bytes go
            relay.cut_off(client.transport, reset=False)
            return
        close = self._must_close()
        self._answered = True
        shown = {"upstream": record.upstream, "attempts": len(record.attempts), "outcome": record.outcome or None}
        unkept = unkept_of(record)
        if unkept is not None:
            details = {**details, "dlq_error": {"error_code": not_kept_code(record), "message": unkept}}
        lines, upstream = b"", self._upstream
        if record.outcome:
            lines = relay.sidecar_lines(record, upstream.answer_lines if upstream is not None else b"")
        record.status, answer = self._proxy.answers.error(
            code,
            message,
            request_id=self._session_id(),
            wall=self._proxy.wall(clock.monotonic()),
            details={**shown, "dlq_id": None if unkept is not None else record.dlq_id, **details},
            trace_id=self._trace_id(),
            status=status,
            retry_after=retry_after,
            lines=lines,
            close=close,
            without_body=self._request.method == "HEAD",
            registry=None if upstream is None else upstream.rules.registry,
        )
        client.transport.write(answer)

    def _cut_short(self) -> None:
        """The attempt under way ends with the session, for the same reason: it was no success."""
        attempts = self.record.attempts
        if attempts and attempts[-1].code is None:
            attempts[-1].code, attempts[-1].ended = self.record.code, clock.monotonic()

    def _trace_anyway(self) -> None:
        """It ended before it was known where it goes; it is a session like any other, and has its span."""
        if self._upstream is None:
            request = self._request
            state = request.value(b"tracestate")
            self.record.trace = self._proxy.signals.begin(request.traceparent, state, "participate")

    def _session_id(self) -> str:
        return self.record.session_id.decode()

    def _trace_id(self) -> str | None:
        """Of the session's own trace; without one, the caller's, as far as it is well formed."""
        trace, header = self.record.trace, self._request.traceparent
        if trace is not None:
            return f"{trace.trace_id:032x}"
        parent = None if header is None else parse(header)
        return None if parent is None else f"{parent[0]:032x}"
