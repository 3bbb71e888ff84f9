"""The part of an exchange that keeps a request that failed, before the app hears of the failure.

Law: an app that is told an id finds the entry on disk whatever happens next; the write goes on when the app has gone.
A store in trouble costs the entry, which is said and counted, never the answer. What is kept is what the app asked
for: the upstream it named with its own credentials, also when a fallback tried last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import orjson

from config.errors import ErrorCode
from sidecar import clock
from sidecar.durable.eligible import answers_accepted, worth_keeping
from sidecar.durable.tee import Tee
from sidecar.durable.trouble import NotKept, Trouble
from sidecar.failures import AnsweredHere, UploadBroken
from sidecar.headers import field_of
from sidecar.policy.caller import identity
from sidecar.policy.resend import APP_KEY, INJECTED_KEY, NO_KEY, honoured
from sidecar.retrying import Retrying
from sidecar.routing import scheme_of
from telemetry.names import Attribute, Event, Field
from telemetry.record import BODY_NOT_KEPT, Attempt, Trace, frames_of, unkept_of

if TYPE_CHECKING:
    from sidecar.body import RequestBody
    from sidecar.durable.bodies import BodyFile
    from sidecar.durable.entry import Answer, Failure
    from sidecar.upstream.destination import Destination
    from sidecar.upstream.endpoints import UpstreamState

T = TypeVar("T")
Fields = list[tuple[bytes, bytes]]

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# What a request asks of the sidecar that still holds when it goes out again.
_LASTING = frozenset({b"x-sidecar-operation", b"x-sidecar-policy"})
# An app that is still sending sends on; one that pauses longer than this gets its answer instead.
_PAUSE = 1.0
# When the sidecar itself ends, all the rest has to come within this.
_LAST_PIECES = 1.0
_NOT_KEPT = frozenset({b"expect"})


class Asked(NamedTuple):
    """What the app asked for, before a fallback changed it."""

    destination: Destination
    lines: list[bytes]
    target: bytes


class Keeping(Retrying):
    """See the module's law."""

    __slots__ = ("_asked", "_tee", "continued")

    _asked: Asked | None
    """Set when a fallback took over."""
    _tee: Tee | None
    continued: bool

    # ---- before the answer ---------------------------------------------------------------------------------------

    async def _keep(self, code: str, message: str) -> AnsweredHere | None:
        """Keep this failed request if its upstream says so. Returns the answer instead of the failure, where the
        settings want one."""
        known = self._worth_keeping(code)
        if known is None:
            return None
        await self.become_task()
        upstream, connection = self._whose(), self._connection
        if connection is None or connection.complete:
            self._leave_place()  # the upstream is done; neither a slow app nor a slow disk may keep others out
        try:
            async with asyncio.timeout(_LAST_PIECES if self._proxy.cutting_off else None):
                body, size = await self._kept_body(upstream)
        except (UploadBroken, TimeoutError):
            return None  # it was never a whole request
        await self._unhurried(self._write_down(upstream, known, code, message, body, size))
        dlq_id = self.record.dlq_id
        if (
            dlq_id is None
            or unkept_of(self.record) is not None
            or not answers_accepted(upstream.settings.dead_letter, known.category)
        ):
            return None
        told = {"status": "accepted", "dlq_id": dlq_id, "error_code": code, "request_id": self._session_id()}
        return AnsweredHere(
            b"Content-Type: application/json\r\n",
            orjson.dumps(told),
            "accepted",
            status=202,
            outcome=self.record.outcome,
        )

    async def _keep_answered(self, code: str) -> None:
        """The same where the upstream's own answer is about to be passed on."""
        message = self.record.attempts[-1].message or f"the upstream answered {self.record.attempts[-1].status}"
        accepted = await self._keep(code, message)
        if accepted is not None:
            if self._connection is not None:
                self._let_go(self._connection)
            raise accepted

    async def _keep_internal(self) -> None:
        """Our own fault, before anything was answered."""
        if not self._answered and self._upstream is not None:
            self.record.outcome = "internal"
            self._end_attempt()
            await self._keep("SIDECAR_INTERNAL", "the sidecar failed on this request; its log says why")

    async def _keep_cancelled(self) -> None:
        """The app has gone. What it asked for has failed before, so nobody but us knows of it."""
        body, attempts = self._request.body, self.record.attempts
        code = next((attempt.code for attempt in reversed(attempts) if attempt.code != self.record.code), None)
        if code is None or self.record.dlq_id is not None:
            return  # it went away while its failure was being kept
        if body is not None and not (body.finished and body.replayable):
            return
        known = self._worth_keeping(code)
        if known is not None:
            self._end_attempt()
            await self.become_task()
            upstream = self._whose()
            content = b"" if body is None else body.content
            message = "the app went away before this was sent again"
            await self._unhurried(self._write_down(upstream, known, code, message, content, len(content)))

    def _end_attempt(self) -> None:
        """What is under way leads nowhere: its connection, permit and place are not held while something is kept."""
        now = clock.monotonic()
        self._report(None, now, waited=self._waited_for_head(now))
        self._drop_connection()
        self._stop_upload()
        self._leave_place()

    def _worth_keeping(self, code: str) -> ErrorCode | None:
        """What is known of the code, when this failure is to be kept."""
        record, request = self.record, self._request
        if self._upstream is None or request.method == "CONNECT" or request.upgrade is not None:
            return None
        if not self._target.startswith(b"/"):
            return None  # `OPTIONS *`: about the server as a whole
        known = self._proxy.registry[code]
        kept = worth_keeping(
            self._whose().settings.dead_letter,
            outcome=record.outcome,
            method=record.method,
            code=code,
            category=known.category,
            failed_attempts=sum(attempt.code is not None for attempt in record.attempts),
            asked=self._overrides.dead_letter,
        )
        return known if kept else None

    async def _write_down(
        self,
        upstream: UpstreamState,
        known: ErrorCode,
        code: str,
        message: str,
        body: bytes | BodyFile | None,
        size: int,
    ) -> None:
        kept, record = self._proxy.kept, self.record
        try:
            letters = (await kept.open()).letters
            failure = self._failure(upstream, known, code, message, body, size)
            written = await letters.keep(failure)
        except Trouble as trouble:
            kept.not_kept(upstream.label, trouble)
            record.unkept = trouble.message
            return
        except Exception as error:  # our own fault must not take the app's answer as well
            self._proxy.signals.internal_error("dead_letter", "a failed request could not be kept", error)
            record.unkept = f"{type(error).__name__} inside the sidecar; its log says more"
            return
        record.dlq_id = written.dlq_id
        if body is None:
            self._without_body(upstream, written.dlq_id, size)
        self._proxy.signals.dead_lettered(upstream.label, written.dlq_id, code, record)

    def _without_body(self, upstream: UpstreamState, dlq_id: str, size: int) -> None:
        """The entry tells what happened, and can never be sent: the app must not take its id for a promise."""
        trouble = None if self._tee is None else self._tee.trouble
        reason = trouble.reason if isinstance(trouble, NotKept) else "too_large"
        self._proxy.metrics.stored.dead_letter_rejected(reason)
        why = f"{size} bytes of it are more than dead_letter.max_body_bytes"
        if trouble is not None and reason != "too_large":
            why = trouble.message
        told = f"the body was not kept ({why}), so {dlq_id} is there to be looked at and cannot be replayed"
        self.record.unkept = told
        fields = {Field.BODY: told, Attribute.UPSTREAM: upstream.label, "reason": BODY_NOT_KEPT}
        now = clock.monotonic()
        self._proxy.log.event("error", Event.DLQ_REJECTED, upstream.label, now, lambda: fields)

    async def _unhurried(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work` to its end, also when the app goes away meanwhile: then there is nobody to answer, that is
        all."""
        task = self._proxy.kept.background(work, "keep a request")
        while True:
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    raise

    # ---- the body ------------------------------------------------------------------------------------------------

    def _may_spool(self, body: RequestBody) -> None:
        """The body is about to be sent as it comes: should it become too large for memory it is written to disk."""
        rules, limit = self._whose().settings.dead_letter, self._proxy.limits.replay_body_bytes
        wanted = self._overrides.dead_letter
        if wanted is None:
            wanted = rules.enabled and self.record.method in rules.methods
        length = self._request.content_length
        fits = rules.max_body_bytes > limit and (length is None or limit < length <= rules.max_body_bytes)
        if wanted and fits and self._tee is None:
            self._tee = body.tee = Tee(self._proxy.kept, self._whose().label, self._url())

    async def _kept_body(self, upstream: UpstreamState) -> tuple[bytes | BodyFile | None, int]:
        """The body as it is kept, None if it is not, and its size. Raises UploadBroken."""
        body, request = self._request.body, self._request
        if body is None:
            return b"", 0
        limit, patience = upstream.settings.dead_letter.max_body_bytes, min(_PAUSE, upstream.timeouts.body_idle)
        length = request.content_length
        if length is not None and length > limit:
            return None, length
        self._stop_upload()
        self._ask_for_body()
        if body.replayable and await body.whole(patience):
            content = body.content
            return (content if len(content) <= limit else None), len(content)
        tee = self._tee
        if tee is None:
            if limit <= self._proxy.limits.replay_body_bytes or self.record.attempts:
                return None, max(body.total, length or 0)
            tee = self._tee = Tee(self._proxy.kept, upstream.label, self._url())  # nothing of it was sent so far
        await body.pour(tee, patience)
        return await tee.finish(), body.total

    def _ask_for_body(self) -> None:
        """An app that waits for a 100 sends nothing before it gets one."""
        transport = self._client.transport
        if self._request.expects_continue and not self.continued and transport is not None:
            self.continued = True
            transport.write(_CONTINUE)

    # ---- what is known of the request ----------------------------------------------------------------------------

    def _about_to_fall_back(self) -> None:
        if self._asked is None:
            self._asked = Asked(self._destination, self._request.lines, self._target)

    def _whose(self) -> UpstreamState:
        upstream = self._upstream
        assert upstream is not None
        return upstream if self._asked is None else self._asked.destination.upstream

    def _url(self) -> str:
        """Absolute, such that it leads to the same upstream again."""
        destination, target = self._destination, self._target
        if self._asked is not None:
            destination, _, target = self._asked
        choice, settings = destination.choices[0], destination.upstream.settings
        scheme, absolute, _ = self._request.target.partition(b"://")
        if absolute and not scheme.startswith(b"/"):
            named = scheme_of(scheme)
        elif choice.host == self._request.host and (settings.endpoints or settings.tls == "originate"):
            named = "http"  # as it was asked for; what it is sent with is for the settings to say
        else:
            named = choice.endpoint.origin.scheme
        return f"{named}://{choice.host.decode('latin-1')}{target.decode('latin-1')}"

    def _headers(self) -> Fields:
        """As the upstream sees them, but for our own; an added key included, which must stay the same."""
        lines = self._request.lines if self._asked is None else self._asked.lines
        fields = [field_of(line) for line in lines]
        fields = [(name, value) for name, value in fields if name.lower() not in _NOT_KEPT]
        if self._injected is not None:
            fields.append((self._injected.encode(), self.record.session_id))
        fields += [(name, value) for name, value in self._request.overrides or () if name.lower() in _LASTING]
        return fields

    def _failure(
        self,
        upstream: UpstreamState,
        known: ErrorCode,
        code: str,
        message: str,
        body: bytes | BodyFile | None,
        size: int,
    ) -> Failure:
        from sidecar.durable.entry import Failure, Tried

        record, settings, wall = self.record, upstream.settings.idempotency, clock.steady.at
        failed = [attempt for attempt in record.attempts if attempt.code is not None]
        headers = self._headers()
        now = clock.monotonic()
        key, whose = self._key_of(headers, settings.header)
        return Failure(
            upstream=upstream.label,
            method=record.method,
            url=self._url(),
            headers=headers,
            attempts=[Tried(attempt.phase, attempt.code or code, attempt.status or None) for attempt in failed],
            error_class=code,
            category=known.category,
            error_message=message,
            last_stack="\n".join(map(_as_a_line, failed)),
            first_failure_at=wall(failed[0].ended if failed else now),
            last_failure_at=wall(failed[-1].ended if failed else now),
            body=body,
            body_size=size,
            operation=record.operation,
            stage=record.stage,
            workflow=record.workflow,
            context=self._context(),
            response=self._last_answer(upstream.settings.dead_letter.max_response_bytes),
            api_key_id=self._caller_id(headers),
            idempotency_key=None if key is None else key.decode("latin-1"),
            key_injected=whose == INJECTED_KEY,
            key_honoured=honoured(whose, settings),
            dlq_id=None if self._tee is None else self._tee.dlq_id,
        )

    def _caller_id(self, headers: Fields) -> str:
        """A keyed hash of who asks, the same in every run. Only once the store is open."""
        query, caller = self._url().partition("?")[2], self._whose().settings.idempotency.caller
        who = identity(headers, query, sender=self._request.sender, caller=caller)
        return self._proxy.kept.caller_id(who)

    def _key_of(self, headers: Fields, header: str) -> tuple[bytes | None, str]:
        wanted = header.lower().encode()
        key = next((value for name, value in headers if name.lower() == wanted), None)
        if key is None:
            return None, NO_KEY
        return key, INJECTED_KEY if self._injected == header.lower() else APP_KEY

    def _context(self) -> dict[str, object]:
        record, trace = self.record, self.record.trace
        attempt = record.attempts[-1] if record.attempts else None
        return {
            "request_id": self._session_id(),
            "trace_id": self._trace_id(),
            "span_id": f"{trace.span_id:016x}" if isinstance(trace, Trace) else None,
            "correlation_id": self._proxy.signals.redactor.text(record.correlation_id or "") or None,
            "outcome": record.outcome,
            "policy_id": record.policy_id,
            "endpoint": None if attempt is None else attempt.endpoint,
            "workflow": record.workflow,
            "server_id": self._proxy.pseudonym.decode(),
        }

    def _last_answer(self, limit: int) -> Answer | None:
        """The one that is about to be passed on."""
        from sidecar.durable.entry import Answer

        connection = self._connection
        if connection is None or connection.head is None:
            return None
        body = connection.body or b"".join(connection.waiting)
        return Answer(connection.status, [field_of(line) for line in connection.head.lines], body[:limit])


def _as_a_line(attempt: Attempt) -> str:
    """One link of the chain of errors: what an attempt met."""
    told = attempt.message or f"answered {attempt.status}"
    line = f"{attempt.kind} attempt at {attempt.endpoint}: {attempt.code}: {told}"
    frames = frames_of(attempt)
    return line if frames is None else f"{line}\n{frames.rstrip()}"
