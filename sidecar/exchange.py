"""START READING HERE. One request of the app, from its parsed head to its last byte.

route → admit → attempt* → relay → settle, in this order, in `run`. The exchange owns the loop over attempts: it
asks pure policies what to do and does it. It fills one record; when the app has its answer the record alone feeds
every signal. What happens after a failed attempt is in `retrying.py`, how an answer is passed on in `passed_on.py`,
what the sidecar answers by itself in `own_answers.py`.

Law: whatever happens, the request ends in exactly one outcome, the upstream connection is either given back whole
or closed, the breaker's permit is handed back, and an answer once begun is finished or visibly broken off.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from sidecar import clock, relay
from sidecar.failures import (
    SHUTTING_DOWN,
    AnsweredHere,
    AttemptFailed,
    GaveUp,
    Intercepted,
    Malformed,
    Refused,
    UploadBroken,
)
from sidecar.headers import UPGRADE_LINES, ResponseFields, request_head
from sidecar.policy.overrides import NO_OVERRIDES
from sidecar.posting import Posting
from sidecar.tunnel import check_room
from sidecar.upstream.connection import UpstreamConnection
from telemetry.record import CONNECTED, NEVER_BEGUN, SENT, Attempt, Session

if TYPE_CHECKING:
    from sidecar.body import RequestBody
    from sidecar.inbound import Downstream
    from sidecar.proxy import Proxy
    from sidecar.request import Request
    from sidecar.upstream.endpoints import UpstreamState

_CUT_OFF = "the sidecar was told to stop, and its grace ended before this did (shutdown_grace)"
_BACK_IN = 2  # seconds: what a restart takes


class Standing(NamedTuple):
    """What a request under way waits for. Times are monotonic."""

    waits_for: str
    since: float
    until: float | None = None
    """When it goes on, where that is known."""


class Exchange(Posting):
    """See the module's law. After `run`, `keep_alive` and `taken_over` tell the connection how to go on."""

    __slots__ = ()

    def __init__(self, proxy: Proxy, client: Downstream, request: Request, started: float) -> None:
        self._loop = proxy.loop
        self._proxy = proxy
        self._client = client
        self._request = request
        self._started = started
        self._upstream = None
        self._connection = None
        self._permit = None
        self._place = None
        self._upload = None
        self._situation = None
        self._tried = ()
        self._next_delay = 0.0
        self._overrides = NO_OVERRIDES
        self._operation = None
        self._injected = None
        self._asked = None
        self._tee = None
        self._ticket = None
        self._involved = False
        self._asked_at = 0.0
        self._own_lines = proxy.via_line
        self._answered = False
        self.continued = False
        # What follows an Upgrade that is declined is not HTTP for sure.
        self.keep_alive = request.keep_alive and not (request.http10 or request.switches)
        self.taken_over = False
        self.record = Session(proxy.next_session_id(), request.method, request.target.decode("latin-1"), started)

    @property
    def expects_continue_unanswered(self) -> bool:
        """The app waits for a 100 before it sends its body, and never got one."""
        return self._request.expects_continue and not self.continued

    @property
    def has_unread_body(self) -> bool:
        body = self._request.body
        return body is not None and not body.finished

    async def run(self) -> None:
        record, sink = self.record, None
        try:
            if self._request.method != "CONNECT":
                destination, target = self._client.find_destination(self._request, self._proxy)
            else:
                destination, target = await self._find_tunnel(), b""
            self._aim(destination, target)
            if self._involved:
                await self._take_part()
            if destination.upstream.turns.bulkhead is not None:
                await self._take_place()
            await self._attempts()
            if record.code is not None or self._ticket is not None:
                await self._before_answer()
            sink = self._begin_answer()
            if sink is not None:
                await (self._stream(sink) if self._ticket is None else self._stream_and_remember(sink))
        except Malformed as malformed:
            self._answer_malformed(malformed)
            return  # not a session: counted apart
        except Refused as refused:
            self._answer_refused(refused)
        except Intercepted as taken:
            self._let_in(taken)
        except AnsweredHere as here:
            self._answer_here(here)
        except GaveUp as gave_up:
            accepted = await self._keep(gave_up.code, gave_up.message)
            if accepted is None:
                self._answer_failed(gave_up)
            else:
                self._answer_here(accepted)
        except UploadBroken as broken:
            self._drop_connection()
            self._answer_broken_upload(broken)
        except asyncio.CancelledError:
            if self._proxy.cutting_off:
                await self._end_cut_off()
                return
            record.outcome = "cancelled"
            record.code = "CLIENT_DISCONNECTED"
            attempt = record.attempts[-1] if record.attempts else None
            if attempt is not None and attempt.code is None and not attempt.status:  # under way: no success
                attempt.code, attempt.ended = record.code, clock.monotonic()
                if self._connection is not None:
                    attempt.phase = self._connection.phase
            if len(record.attempts) > 1 or (attempt is not None and attempt.code != record.code):
                await self._keep_cancelled()
            raise
        except Exception as error:
            await self._keep_internal()
            self._answer_internal(error)
        finally:
            self._settle(clock.monotonic() if sink is None else self._streamed_until())

    def never_begun(self, code: str | None = None) -> None:
        """Its connection has ended before its turn came: a request that was made, and no more. `code` where that was
        the app's doing."""
        record = self.record
        record.outcome, record.code, record.message = "cancelled", code, NEVER_BEGUN
        try:
            if record.method != "CONNECT":
                destination, _ = self._client.find_destination(self._request, self._proxy)
                record.upstream = destination.upstream.label
        except Malformed as malformed:
            self._proxy.metrics.malformed(malformed.reason)
            record.outcome = ""  # not a session: counted apart
        except (Refused, AnsweredHere):
            pass
        self._trace_anyway()
        self._settle(clock.monotonic())

    # ---- attempts --------------------------------------------------------------------------------------------

    async def _attempts(self) -> None:
        """Attempt after attempt, until there is an answer to pass on. Raises GaveUp when there is none."""
        record, upstream = self.record, self._destination.upstream
        kind, now = "first", self._started if not record.waited else clock.monotonic()
        upstream.budget.request(now)
        while True:
            if kind != "stale":
                if upstream.turns.gate.paused:
                    await self._wait_at_gate()
                    now = clock.monotonic()
                picked = self._destination.pick(now, self._tried)
                if picked is None:
                    await self._fall_back(now)
                    upstream, now = self._destination.upstream, clock.monotonic()
                    continue
                self._choice, self._permit = picked
            attempt = self._begin_attempt(kind, now)
            try:
                if record.method == "CONNECT":
                    await self._dial_tunnel(attempt, min(self._ends_at - now, self._attempt_timeout))
                    break
                connection = None if kind == "stale" else self._choice.pool.take()
                if connection is None:
                    connection = await self._dial(attempt)
                self._connection = connection
                self._send(connection, attempt)
                if not connection.ready:
                    await self.parked()  # for a whole small answer, or the head of a large one
                attempt.ended = clock.monotonic()
                if connection.failure is not None:
                    raise connection.taken_failure()
                if connection.switched and self._request.upgrade is None:
                    raise AttemptFailed("PROTOCOL_ERROR", "the upstream switched protocols without being asked", SENT)
            except AttemptFailed as failed:
                kind, now = await self._after_failure(attempt, failed)
                continue
            attempt.phase = SENT
            attempt.status = connection.status
            if connection.status < 400 and not upstream.classifier.needs_fields_for_success:
                break
            if connection.status == 407 and self._choice.proxy is not None:
                kind, now = await self._after_failure(attempt, _refused_by_proxy(self._choice.proxy.label))
                continue
            code = self._classified(connection)
            if code is None:
                break
            again = await self._after_answer(attempt, code)
            if again is None:
                return  # the answer is passed on as it is
            kind, now = again
        record.outcome = "first_try" if len(record.attempts) == 1 else "recovered"
        if record.stage is not None and record.workflow is not None:
            upstream.terms.stages.succeeded(record.workflow, record.stage)

    def _begin_attempt(self, kind: str, now: float) -> Attempt:
        record = self.record
        attempt = Attempt(kind, self._choice.label, now)
        if self._choice.proxy is not None:
            attempt.egress_proxy = self._choice.proxy.label
        if self._permit.probe:
            attempt.breaker = "half_open"
            if kind != "stale":  # which does not count against max_attempts, probe or not
                attempt.kind = "probe"
        if record.attempts:
            attempt.delay, attempt.policy_id = self._next_delay, self._next_policy
        else:
            attempt.policy_id = record.policy_id
        record.attempts.append(attempt)
        if len(record.attempts) > 1:
            self._proxy.signals.attempt_begun(record)
        if record.stage is not None and record.workflow is not None and kind != "stale":
            self._destination.upstream.terms.stages.attempt(record.workflow, record.stage, now)
        return attempt

    async def _dial(self, attempt: Attempt) -> UpstreamConnection:
        await self.become_task()
        began = clock.monotonic()
        connection = await self._choice.pool.dial(min(self._ends_at - began, self._attempt_timeout))
        self._proxy.metrics.connection_wait(self.record.upstream, clock.monotonic() - began)
        if connection.closed:  # while it was being dialled; nobody would tell us again
            self._choice.pool.discard(connection)
            if connection.failure is not None:
                raise connection.taken_failure()
            raise AttemptFailed("CONNECTION_RESET", "the upstream closed the connection at once", CONNECTED)
        return connection

    def _request_head(self, attempt: Attempt) -> bytes:
        choice, request, own_lines = self._choice, self._request, self._own_lines
        framing = b""
        if request.chunked:
            framing = b"Transfer-Encoding: chunked\r\n"
        elif request.content_length is not None:
            framing = b"Content-Length: %d\r\n" % request.content_length
        if request.upgrade is not None:  # then there is no body, but some say so with a length of 0
            check_room(self._proxy)
            framing += UPGRADE_LINES
        trace = self.record.trace
        if trace is not None:
            own_lines += self._trace_lines(trace, attempt)
        target = self._target
        if choice.prefix:
            target = choice.prefix if target == b"*" else choice.prefix + target  # RFC 9112, 3.2.4
            own_lines += choice.proxy_lines
        return request_head(request.verb, target, choice.host, request.lines, own_lines, framing)

    def _send(self, connection: UpstreamConnection, attempt: Attempt) -> None:
        """Begin to send the request."""
        attempt.reused = connection.reused
        attempt.address = connection.address
        head = self._request_head(attempt)
        request, now = self._request, attempt.started
        deadline = now + self._attempt_timeout
        if deadline > self._ends_at:
            deadline = self._ends_at
        connection.begin(self, bodyless=request.method == "HEAD", deadline=deadline)
        body = request.body
        if body is None:
            connection.write_all(head)
        elif (whole := body.arrived_whole()) is not None:
            connection.write_all(head + whole)
        else:
            self._may_spool(body)
            connection.write(head, last=False)
            connection.expect_progress(self._destination.upstream.timeouts.body_idle, now)
            self._upload = clock.spawn(self._send_body(body, connection), "upload")

    async def _send_body(self, body: RequestBody, connection: UpstreamConnection) -> None:
        try:
            await body.stream(connection)
        except asyncio.CancelledError:
            raise
        except Exception as broken:  # whatever it is, the exchange waiting on this connection must hear of it
            connection.fail(broken)
            return
        self._asked_at = now = clock.monotonic()
        if connection.head is None:
            # The answer's clock starts when the question has been asked. Only an upload that outlasted the deadline
            # has put it off: its bytes were moving.
            deadline = now + self._attempt_timeout
            connection.expect_head_by(min(deadline, self._ends_at) if now < self._ends_at else deadline)

    def interim(self, status: int, reason: bytes, fields: ResponseFields) -> None:
        if self._request.http10 or self._client.transport is None:
            return
        if status == 100:
            if self.continued:
                return  # an earlier attempt has asked for the body already
            self.continued = True
        self._client.transport.write(relay.interim(status, reason, fields, self._proxy.via_line))

    def location(self, value: bytes) -> bytes:
        return self._proxy.directory.location(self._request, self._upstream, value)

    @property
    def needs_store(self) -> bool:
        """Its end may have to be written down."""
        if not self._answered or self._ticket is not None or len(self.record.attempts) > 1:
            return True
        durable, keyed = self._proxy.kept.durable, self._request.idempotency_key is not None
        return durable is not None and durable.successes.worth_telling(
            self.record.upstream, self.record.method, keyed=keyed
        )

    # ---- cut off by us ---------------------------------------------------------------------------------------

    def cut_off(self) -> None:
        """The grace of a shutdown is over. Whoever has its outcome, but no answer yet, is about to end by itself."""
        if self._answered or not self.record.outcome:
            self.cancel()

    async def _end_cut_off(self) -> None:
        """Nobody's doing but ours: the app is told so, and what it asked for is kept. How far it got is in the attempt,
        so what may have been executed is not taken for safe."""
        if self._task is not None:
            self._task.uncancel()  # it lives on
        record, attempt = self.record, self.record.attempts[-1] if self.record.attempts else None
        record.code, record.message, record.suppressed = SHUTTING_DOWN, _CUT_OFF, "draining"
        if attempt is not None and attempt.code is None:
            attempt.code, attempt.message, attempt.ended = record.code, record.message, clock.monotonic()
            if self._connection is not None:
                attempt.phase = self._connection.phase
        if self._answered:
            record.outcome = "failed_streaming"
            self.keep_alive = False
            if self._client.transport is not None:
                relay.cut_off(self._client.transport, reset=self._request.http10)
            return
        record.outcome = "deadline"
        self._end_attempt()
        accepted = await self._keep(SHUTTING_DOWN, _CUT_OFF)
        if accepted is not None:
            self._answer_here(accepted)
        else:
            self._answer_failed(GaveUp(SHUTTING_DOWN, _CUT_OFF, reason="draining", retry_after=_BACK_IN))

    # ---- while it runs ---------------------------------------------------------------------------------------

    def standing(self) -> Standing:
        """What it waits for now, and since when. Read off what is there anyway: nobody notes it down on the way."""
        record, upstream = self.record, self._upstream
        if upstream is None:
            return Standing("routing", self._started)
        if not record.attempts:
            if self._place is not None and not self._place.granted:
                return Standing("max_in_flight", self._started)
            return self._at_gate(upstream, self._started) or Standing("store", self._started)
        attempt, connection = record.attempts[-1], self._connection
        if self._answered:
            return Standing("streaming", record.first_byte or attempt.ended)
        if attempt.decision is not None and attempt.decision.delay is not None:
            until = attempt.ended + attempt.decision.delay
            waits = self._at_gate(upstream, until) if clock.monotonic() > until else None
            return waits or Standing("backoff", attempt.ended, until)
        if attempt.code is not None:
            return Standing("store", attempt.ended)
        if connection is None:
            return Standing("connection", attempt.started)
        if connection.head is None and self._upload is not None and not self._upload.done():
            return Standing("upload", attempt.started)
        return Standing("answer", self._asked_at or attempt.started)

    def _at_gate(self, upstream: UpstreamState, since: float) -> Standing | None:
        gate = upstream.turns.gate
        if not gate.paused:
            return None
        until = gate.closed_until(self._credential_id(upstream).encode(), clock.monotonic())
        return None if until is None else Standing("rate_limit_gate", since, until)

    # ---- settle ----------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Nothing of this exchange stays behind, and the record goes to telemetry."""
        record = self.record
        record.ended = now
        if self._upload is not None:
            if not self._upload.done():
                self.keep_alive = False
            self._stop_upload()
        if self._permit is not None:
            self._report(None, now, waited=self._waited_for_head(now))
        if self._connection is not None:
            self._drop_connection()
        upstream = self._upstream
        if upstream is not None:
            upstream.in_flight -= 1
            if self._place is not None:
                upstream.turns.leave(self._place)
        if self._involved or record.method != "GET":
            self._aftermath(record)
        body = self._request.body
        if body is not None:
            record.request_bytes = body.total
            body.let_go()
        if record.outcome:
            self._proxy.signals.observe(record, self._complete_record)


def _refused_by_proxy(label: str) -> AttemptFailed:
    """A 407 that was meant for us: the app must not take it for ours, and the upstream has seen nothing."""
    failed = AttemptFailed(
        "CONNECTION_REFUSED",
        f"the egress proxy {label} wants other credentials; give `egress_proxy` a user and password it accepts",
        CONNECTED,
    )
    failed.at_proxy = True
    return failed
