"""The part of an exchange that prepares its attempts: policy, key, trace, and waiting for a turn.

Law: what a healthy request does not need is not worked out for it: overrides, operations and keys are looked at only
where there are some. Nothing is waited for past the deadline.
"""

from __future__ import annotations

import math

from config.operations import Operation
from sidecar import clock
from sidecar.failures import GaveUp, Refused
from sidecar.headers import without_named
from sidecar.passed_on import PassedOn
from sidecar.policy import overrides as overrides_policy
from sidecar.policy.choice import Chosen
from sidecar.policy.overrides import Overrides
from sidecar.policy.resend import APP_KEY, INJECTED_KEY, NO_KEY, READS
from sidecar.upstream.destination import Destination
from sidecar.upstream.endpoints import UpstreamState
from sidecar.upstream.waiting import OutOfTime
from telemetry.record import Attempt, Trace
from telemetry.sentences import seconds

_REPLACED = b"traceparent,tracestate"
_STRIPPED = b"traceparent,tracestate,baggage"
_OTLP_TARGETS = frozenset((b"/v1/traces", b"/v1/metrics", b"/v1/logs"))
_NEVER_KEYED = READS | {"CONNECT"}
_JUST_PASS = Overrides()
_JUST_PASS.retry_off = True
_JUST_PASS.dead_letter = False


class Prepared(PassedOn):
    """See the module's law."""

    __slots__ = (
        "_attempt_timeout",
        "_destination",
        "_ends_at",
        "_injected",
        "_involved",
        "_operation",
        "_overrides",
        "_own_lines",
        "_target",
    )

    _attempt_timeout: float
    _destination: Destination
    _ends_at: float
    """When the whole request must have an answer."""
    _injected: str | None
    """The lower-case header of the idempotency key that was added here."""
    _involved: bool
    """The store has something to do with it: its key is checked, or the outbox is asked to take it over."""
    _operation: Operation | None
    _overrides: Overrides
    _own_lines: bytes
    """Field lines that are added to the request on its way."""
    _target: bytes

    # ---- before the first attempt ----------------------------------------------------------------------------

    def _aim(self, destination: Destination, target: bytes) -> None:
        """Where the request goes, under which policy, in which trace."""
        self._destination = destination
        self._target = target
        self._upstream = upstream = destination.upstream
        upstream.in_flight += 1
        upstream.last_used = started = self._started
        record = self.record
        record.upstream = upstream.label
        chosen = upstream.rules.plain
        if chosen is None or self._request.asks or not upstream.ordinary or target in _OTLP_TARGETS:
            self._aim_closely(upstream)
        else:
            policy = chosen.policy
            record.policy_id = chosen.id
            self._attempt_timeout = policy.attempt_timeout
            self._ends_at = started + policy.total_timeout
            record.trace = self._proxy.signals.begin(None, None, "participate")

    def _aim_closely(self, upstream: UpstreamState) -> None:
        """The same where the request or the upstream's settings have something to say about it."""
        request, record = self._request, self.record
        otlp = self._is_own_otlp()
        if not otlp:
            parent, state = request.traceparent, None
            if parent is not None:
                state = b",".join([line[11:] for line in request.lines if line[:11].lower() == b"tracestate:"])
            record.trace = self._proxy.signals.begin(parent, state, upstream.settings.propagation)
        self._hide_trace_fields(upstream)
        chosen = upstream.rules.plain
        if chosen is None or request.overrides is not None:
            chosen = self._choose_policy(upstream)
        if otlp and request.overrides is None:
            self._overrides = _JUST_PASS
        record.policy_id = chosen.id
        overrides = self._overrides
        self._attempt_timeout = overrides.attempt_timeout or chosen.policy.attempt_timeout
        self._ends_at = self._started + (overrides.timeout or chosen.policy.total_timeout)
        self._look_at_key(upstream)
        if overrides.respond_async or upstream.settings.replay.credentials == "live":
            self._involved = True
        if request.caller_resend:
            record.caller_resend = True

    def _hide_trace_fields(self, upstream: UpstreamState) -> None:
        """Before the first attempt, and again before a fallback, which may be allowed to see less."""
        request, propagation = self._request, upstream.settings.propagation
        if propagation == "strip":
            request.lines = without_named(request.lines, _STRIPPED)
        elif propagation == "participate" and self.record.trace is not None:
            request.lines = without_named(request.lines, _REPLACED)

    def _is_own_otlp(self) -> bool:
        """The app's own telemetry on its way to a collector: it just passes, unless the settings say otherwise."""
        own = self._target in _OTLP_TARGETS and self._request.method == "POST"
        return own and not self._proxy.settings.telemetry.own_otlp

    def _choose_policy(self, upstream: UpstreamState) -> Chosen:
        request, choice = self._request, upstream.rules.choice
        if request.overrides is not None:
            policies, operations = self._proxy.settings.policies, choice.operations.names()
            self._overrides = overrides_policy.parse(request.overrides, policies, operations)
        asked = self._overrides
        if asked.operation is not None:
            self._operation = choice.operations.named(asked.operation)
        else:
            self._operation = choice.operations.match(request.method, self._target)
        operation, record = self._operation, self.record
        if operation is not None:
            record.operation = operation.name
        record.stage = asked.stage or (operation.stage if operation is not None else None)
        record.workflow = asked.workflow
        record.correlation_id = asked.correlation_id
        return choice.before(record.operation, asked.policy)

    def _look_at_key(self, upstream: UpstreamState) -> None:
        """The app's own idempotency key, or one that is added here: the same on every attempt."""
        request, settings = self._request, upstream.settings.idempotency
        key = request.idempotency_key
        if settings.header.lower() != "idempotency-key":
            key = request.value(settings.header.lower().encode())
        if key is not None:
            if settings.enabled and request.method not in _NEVER_KEYED and self._overrides is not _JUST_PASS:
                self._involved = True
            scope = f"{upstream.name}\n{self._credential_id(upstream)}".encode()
            if self._proxy.seen_keys.came_before(scope, key, self._started):
                self.record.caller_resend = True
        elif settings.inject:
            self._injected = settings.header.lower()
            self._own_lines += b"%b: %b\r\n" % (settings.header.encode(), self.record.session_id)

    def _credential_id(self, upstream: UpstreamState) -> str:
        return self._proxy.credential_id(self._request, upstream.settings.idempotency.caller)

    def _key(self) -> str:
        """Whose key the request really carries for the current upstream, in the words of `policy/resend.py`."""
        assert self._upstream is not None
        header = self._upstream.settings.idempotency.header.lower()
        if self._request.value(header.encode()) is not None:
            return APP_KEY
        return INJECTED_KEY if self._injected == header else NO_KEY

    def _trace_lines(self, trace: Trace, attempt: Attempt) -> bytes:
        assert self._upstream is not None
        header = self._proxy.signals.traces.header(trace, attempt)
        if self._upstream.settings.propagation != "participate":
            return b""
        state = b"tracestate: %b\r\n" % trace.tracestate if trace.tracestate else b""
        return b"traceparent: %b\r\n%b" % (header, state)

    # ---- waiting for a turn ----------------------------------------------------------------------------------

    async def _take_place(self) -> None:
        """Under `max_in_flight`, or in the queue for it."""
        upstream = self._upstream
        assert upstream is not None and upstream.turns.bulkhead is not None
        place = upstream.turns.bulkhead.enter()
        if place is None:
            settings = upstream.settings
            raise Refused(
                "OVERLOADED",
                f"{upstream.label} already has {settings.max_in_flight} requests in flight (max_in_flight)"
                + (f" and {settings.max_queue} waiting (max_queue)" if settings.max_queue else ""),
                reason="max_in_flight",
                retry_after=1,
            )
        self._place = place  # from here on: whoever leaves the queue early gives it up as well
        if not place.granted:
            began = clock.monotonic()
            await self.become_task()
            try:
                await upstream.turns.for_place(place, self._ends_at)
            except OutOfTime:
                raise self._out_of_time(
                    "DEADLINE_EXCEEDED", "no place under max_in_flight became free in time"
                ) from None
            finally:
                self.record.waited += clock.monotonic() - began

    def _leave_place(self) -> None:
        """For whoever comes next: nothing more is asked of the upstream."""
        if self._place is not None and self._upstream is not None:
            self._upstream.turns.leave(self._place)
            self._place = None

    async def _wait_at_gate(self) -> None:
        """Some credential of this upstream was asked to wait; perhaps it is ours."""
        upstream = self._upstream
        assert upstream is not None
        gate = upstream.turns.gate
        key = self._credential_id(upstream).encode()
        if gate.closed_until(key, clock.monotonic()) is None:
            return
        await self.become_task()
        now = clock.monotonic()
        until = gate.closed_until(key, now)
        if until is None:
            return
        whom = "calls with this credential" if key else "calls without a credential"
        told = f"the upstream asked {whom} to wait"
        if until > self._ends_at:
            wait = f"another {seconds(until - now)}, longer than this request may take"
            raise self._out_of_time("RATE_LIMIT_EXCEEDED", f"{told} {wait}", until - now)
        ticket = gate.enter(key)
        if ticket is None:
            raise Refused(
                "OVERLOADED", f"{told}, and the queue is full", reason="gate", retry_after=math.ceil(until - now)
            )
        try:
            await upstream.turns.at_gate(ticket, self._ends_at)
        except OutOfTime:
            raise self._out_of_time("RATE_LIMIT_EXCEEDED", f"{told}, and the time was up first", until - now) from None
        finally:
            self.record.waited += clock.monotonic() - now

    def _out_of_time(self, code: str, message: str, wait: float | None = None) -> GaveUp:
        record = self.record
        record.outcome, record.suppressed = "deadline", "deadline"
        return GaveUp(code, message, reason="deadline", retry_after=None if wait is None else math.ceil(wait))
