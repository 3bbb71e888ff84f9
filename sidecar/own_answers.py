"""What an exchange answers by itself, when there is no upstream's answer to pass on.

Law: each way to fail has one method here, which names the outcome, counts it and writes one answer in the error
shape. An answer that has begun is never followed by another one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from sidecar import clock, relay
from sidecar.policy.resend import may_resend

if TYPE_CHECKING:
    from aiohttp.http_parser import RawRequestMessage
    from aiohttp.streams import StreamReader

    from sidecar.body import RequestBody
    from sidecar.failures import AttemptFailed, Malformed, Refused, UploadBroken
    from sidecar.headers import RequestFields
    from sidecar.inbound import Downstream
    from sidecar.proxy import Proxy
    from sidecar.upstream.endpoints import UpstreamState
    from telemetry.record import Session


class OwnAnswers:
    """The part of an exchange that speaks for the sidecar itself."""

    __slots__ = (
        "_answered",
        "_body",
        "_client",
        "_fields",
        "_message",
        "_payload",
        "_proxy",
        "_upstream",
        "http10",
        "keep_alive",
        "record",
    )

    _answered: bool
    _body: RequestBody | None
    _client: Downstream
    _fields: RequestFields
    _message: RawRequestMessage
    _payload: StreamReader
    _proxy: Proxy
    _upstream: UpstreamState | None
    http10: bool
    keep_alive: bool
    record: Session

    def _must_close(self) -> bool:
        """Decided when answering, not on arrival."""
        if self.keep_alive and (
            self._proxy.draining
            or (self._body is not None and not self._body.finished)
            or (self._message.chunked and self._client.may_have_trailers())
        ):
            self.keep_alive = False
        return not self.keep_alive

    def _answer_malformed(self, malformed: Malformed) -> None:
        self.keep_alive = False
        self._proxy.metrics.malformed(malformed.reason)
        self._write_error(malformed.code, malformed.message, {"reason": malformed.reason})

    def _answer_refused(self, refused: Refused) -> None:
        record = self.record
        record.outcome, record.code = "denied", refused.code
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

    def _answer_failed(self, failed: AttemptFailed) -> None:
        record = self.record
        record.code, record.message = failed.code, failed.message
        resendable = may_resend(failed.phase, self._message.method, keyed=self._fields.keyed)
        record.outcome = "exhausted" if resendable else "not_retryable"
        self._write_error(failed.code, failed.message, {})

    def _answer_broken_upload(self, broken: UploadBroken) -> None:
        self.record.outcome = "denied"
        self.record.code = "MALFORMED_REQUEST"
        self.keep_alive = False
        self._proxy.metrics.denied("request_body")
        self._write_error("MALFORMED_REQUEST", str(broken), {"reason": "request_body"})

    def _answer_internal(self, error: Exception) -> None:
        self.record.outcome = "internal"
        self.record.code = "SIDECAR_INTERNAL"
        self.keep_alive = False
        self._proxy.metrics.internal_error("exchange")
        self._proxy.log.exception("an exchange failed inside the sidecar", error, session_id=self._session_id())
        if self._answered and self._client.transport is not None:
            relay.cut_off(self._client.transport, reset=self.http10)
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
        if not self._payload.is_eof():
            self.keep_alive = False  # the rest of a body nobody reads must not be taken for the next request
        close = self._must_close()
        self._answered = True
        shown = {"upstream": record.upstream, "attempts": len(record.attempts), "outcome": record.outcome or None}
        lines = b""
        if record.outcome:
            lines = relay.sidecar_lines(
                record.session_id,
                len(record.attempts),
                record.outcome,
                self._upstream.answer_lines if self._upstream is not None else b"",
            )
        record.status, answer = self._proxy.answers.error(
            code,
            message,
            request_id=self._session_id(),
            wall=self._proxy.wall(clock.monotonic()),
            details={**shown, "dlq_id": None, **details},
            trace_id=_trace_id(self._fields.traceparent),
            status=status,
            retry_after=retry_after,
            lines=lines,
            close=close,
            without_body=self._message.method == "HEAD",
        )
        client.transport.write(answer)

    def _session_id(self) -> str:
        return self.record.session_id.decode()


def _trace_id(traceparent: bytes | None) -> str | None:
    """The trace id of a well-formed W3C traceparent."""
    if traceparent is None or len(traceparent) < 55:
        return None
    with contextlib.suppress(ValueError):
        text = traceparent[3:35].decode("ascii")
        if int(text, 16):
            return text
    return None
