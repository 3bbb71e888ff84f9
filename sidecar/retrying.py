"""The part of an exchange that decides what follows a failed attempt.

Law: every decision is made by a pure policy and written into the record with its reason; this file only gathers
what the policies ask for, and does what they say. A permit of a breaker is handed back exactly once, with what the
attempt says about the endpoint. Nothing is waited for past the deadline, nor when the app has gone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from typing import NoReturn

from config.credentials import is_harmless_field
from sidecar import clock
from sidecar.failures import AttemptFailed, GaveUp
from sidecar.policy.breaker import counts
from sidecar.policy.choice import Chosen
from sidecar.policy.classify import is_verdict
from sidecar.policy.resend import APP_KEY, NO_KEY, honoured
from sidecar.policy.retry import Failure, Situation, decide, resendable
from sidecar.policy.verdict import fields_of, retry_after, server_verdict
from sidecar.prepared import Prepared
from sidecar.upstream.connection import UpstreamConnection
from sidecar.upstream.destination import Choice, Destination
from telemetry.record import FATAL, NOT_CONNECTED, Attempt, Decision

_LONGEST_TARGET = 2_048
_UNREACHABLE = frozenset({"CONNECTION_REFUSED", "CONNECT_TIMEOUT", "DNS_FAILURE"})
_PAUSING = frozenset({"RATE_LIMIT_EXCEEDED", "QUOTA_EXCEEDED"})
_OUTCOMES = {
    "attempts": "exhausted",
    "stage_budget": "exhausted",
    "disabled": "exhausted",
    "draining": "exhausted",
    "budget": "budget",
    "deadline": "deadline",
    "breaker_open": "breaker_open",
    "not_resendable": "not_retryable",
    "body_too_large": "not_retryable",
    "memory": "not_retryable",
    "response_started": "not_retryable",
    "server_verdict": "not_retryable",
}


class Retrying(Prepared):
    """See the module's law."""

    __slots__ = ("_next_delay", "_next_policy", "_situation", "_tried")

    _next_delay: float
    _next_policy: str
    """The wait before the next attempt, and the policy that gave it."""
    _situation: Situation | None
    _tried: tuple[Choice, ...]
    """Where attempts failed."""

    # ---- after a failed attempt ------------------------------------------------------------------------------

    def _classified(self, connection: UpstreamConnection) -> str | None:
        """The error code of an answer, None for success."""
        assert self._upstream is not None and connection.head is not None
        body = connection.body if connection.buffered and connection.complete else None
        return self._upstream.classifier.classify(connection.status, fields_of(connection.head.lines), body)

    async def _after_failure(self, attempt: Attempt, failed: AttemptFailed) -> tuple[str, float]:
        """No answer. Returns the kind and the time of the next attempt; raises GaveUp when there is none."""
        upstream = self._upstream
        assert upstream is not None
        self._attempt_failed(attempt, failed)
        now = attempt.ended
        if failed.stale and self._may_replace(failed):
            self._next_delay, self._next_policy = 0.0, attempt.policy_id
            return "stale", now  # the connection was dead, not the endpoint: at once, and the permit stays
        attempt.code = code = upstream.classifier.of_failure(failed.code)
        if failed.at_proxy:
            self._report_proxy(now, connected=failed.phase != NOT_CONNECTED)
        else:
            ok = counts(code, 0, upstream.rules.failures)
            self._report(ok, now, connected=failed.code not in _UNREACHABLE)
        failure = Failure(code, phase=failed.phase, momentary=failed.momentary)
        again = await self._decide(attempt, failure, now)
        if again is None:
            decision = attempt.decision
            assert decision is not None
            raise GaveUp(code, failed.message, reason=decision.reason, hint=decision.remedy)
        return again

    async def _after_answer(self, attempt: Attempt, code: str) -> tuple[str, float] | None:
        """An answer that is a failure. None: it is passed on as it is."""
        upstream, connection = self._upstream, self._connection
        assert upstream is not None and connection is not None and connection.head is not None
        now = attempt.ended
        attempt.code = code
        attempt.phase = connection.phase
        self._report(counts(code, connection.status, upstream.rules.failures), now)
        fields = fields_of(connection.head.lines)
        wait = retry_after(fields, self._proxy.wall(now))
        failure = Failure(
            code, status=connection.status, phase=attempt.phase, verdict=server_verdict(fields), retry_after=wait
        )
        if wait and (connection.status == 429 or code in _PAUSING):
            policy = self._chosen(code).policy
            if policy.respect_retry_after:
                key = self._credential_id(upstream).encode()
                upstream.turns.gate.pause(key, now + min(wait, policy.retry_after_ceiling), now)
        return await self._decide(attempt, failure, now)

    def _chosen(self, code: str) -> Chosen:
        """The policy that follows on a failure with this code."""
        assert self._upstream is not None
        operation = self._operation.name if self._operation is not None else None
        return self._upstream.rules.choice.after(operation, code, self._overrides.policy)

    def _may_replace(self, failed: AttemptFailed) -> bool:
        """Once per session, and only if the request may be sent again."""
        record, body = self.record, self._request.body
        if any(attempt.kind == "stale" for attempt in record.attempts) or (body is not None and not body.replayable):
            return False
        situation = self._situation_now()
        return resendable(Failure(failed.code, phase=failed.phase), situation, situation.first).allowed

    async def _decide(self, attempt: Attempt, failure: Failure, now: float) -> tuple[str, float] | None:
        """Ask the policies, write down what they say, and wait if they say so. None: the session ends here."""
        upstream = self._upstream
        assert upstream is not None
        situation = self._situation_now()
        situation.previous_delay = attempt.delay
        situation.refused_for = None
        if self._fallback() is None:
            situation.refused_for = self._destination.retry_in(now) or None
        chosen = self._chosen(failure.code)
        attempt.decision = decision = decide(failure, situation, chosen, upstream.terms, now)
        self._tried = (*self._tried, self._choice)
        if decision.delay is None:
            self._give_up(decision, failure)
            return None
        if self._connection is not None:
            self._let_go(self._connection)
        # For the fallback there is nothing to wait for.
        delay = 0.0 if self._fallback() is not None and self._destination.retry_in(now) > 0 else decision.delay
        self._next_delay, self._next_policy = delay, chosen.id
        if delay:
            await self._back_off(delay)
        if self._proxy.draining:
            attempt.decision = ended = Decision(None, "draining", "the sidecar stopped while this waited for its retry")
            self._give_up(ended, failure)
            raise GaveUp(failure.code, attempt.message or "the sidecar is stopping", reason="draining")
        return "retry", clock.monotonic()

    def _situation_now(self) -> Situation:
        upstream, request, record = self._upstream, self._request, self.record
        assert upstream is not None
        situation = self._situation
        if situation is None:
            first = upstream.rules.choice.before(record.operation, self._overrides.policy)
            # A handshake that was sent may have been agreed to, whatever its method says.
            method = request.method if request.upgrade is None else "Upgrade"
            situation = self._situation = Situation(method, first, self._ends_at, self._overrides)
            situation.stage, situation.workflow = record.stage, record.workflow
        situation.operation = self._operation
        idempotency = upstream.settings.idempotency
        situation.key = self._key()
        situation.key_header, situation.key_helps = idempotency.header, honoured(APP_KEY, idempotency)
        situation.keyed = honoured(situation.key, idempotency)
        situation.attempts = sum(attempt.kind != "stale" for attempt in record.attempts)
        if (body := request.body) is not None:
            situation.body_kept, situation.body_given_up = body.replayable, body.given_up
            body.wanted_again = True
        situation.retries_enabled, situation.draining = self._proxy.retries_enabled, self._proxy.draining
        return situation

    def _give_up(self, decision: Decision, failure: Failure) -> None:
        record = self.record
        record.code = failure.code
        if decision.reason != FATAL:
            record.suppressed = decision.reason
        verdict = is_verdict(failure.status) or 0 < failure.status < 400
        if verdict and decision.reason in (FATAL, "not_resendable", "server_verdict", "disabled"):
            record.outcome = "rejected"
        else:
            record.outcome = _OUTCOMES.get(decision.reason, "not_retryable")

    async def _back_off(self, seconds: float) -> None:
        """Ends early when the sidecar is told to stop, and with the app."""
        await self.become_task()
        over = self._loop.create_future()
        timer = self._loop.call_later(seconds, _set, over)
        self._proxy.backoffs.add(over)
        began = clock.monotonic()
        try:
            await over
        except asyncio.CancelledError:
            self.record.waited += clock.monotonic() - began  # no attempt will carry this delay
            raise
        finally:
            timer.cancel()
            self._proxy.backoffs.discard(over)

    def _complete_record(self) -> None:
        super()._complete_record()
        record = self.record
        # Kept by the thousand: what nobody reads to the end is not kept to the end.
        record.target = _shortened(record.target)
        if record.attempts:
            record.forwarded = _shortened(self._target.decode("latin-1"))
            record.scheme = self._choice.endpoint.origin.scheme
        if self._operation is not None:
            record.route = self._operation.path

    # ---- refused by breakers ---------------------------------------------------------------------------------

    def _fallback(self) -> Destination | None:
        """Who takes the call when every breaker refuses. Not a tunnel: its bytes are for the host that it named. Not a
        request that may have been executed: another provider does not know its key."""
        upstream, record = self._upstream, self.record
        assert upstream is not None
        fallback = upstream.fallback
        if fallback is None or record.method == "CONNECT":
            return None
        situation = self._situation_now()
        keyed, situation.keyed = situation.keyed, False
        failures = [Failure(a.code or "", status=a.status, phase=a.phase) for a in record.attempts]
        safe = all(resendable(failure, situation, situation.first).allowed for failure in failures)
        situation.keyed = keyed
        return fallback if safe else None

    async def _fall_back(self, now: float) -> None:
        """Every breaker refuses: on to `fallback`, if there is one. Only reached when nothing was sent yet, or when
        the last decision was that the request may be sent again."""
        upstream, request, record = self._upstream, self._request, self.record
        assert upstream is not None
        fallback = self._fallback()
        if fallback is None:
            self._refused_by_breaker(now)
        self._about_to_fall_back()
        if upstream.settings.fallback_credentials == "strip":
            known = {*map(str.lower, upstream.settings.fallback_headers), upstream.settings.idempotency.header.lower()}
            request.lines = [line for line in request.lines if _is_for_anybody(line, known)]
            self._target = self._proxy.signals.redactor.without_secrets(self._target)
        self._leave_place()
        upstream.in_flight -= 1
        record.fallback_from = record.fallback_from or upstream.label
        for attempt in record.attempts:
            attempt.upstream = attempt.upstream or upstream.label
        self._destination = fallback
        self._upstream = upstream = self._destination.upstream
        self._operation = operation = upstream.rules.choice.operations.match(request.method, self._target)
        record.operation = None if operation is None else operation.name
        self._tried = ()
        upstream.in_flight += 1
        if upstream.settings.idempotency.inject and self._key() == NO_KEY:
            self._look_at_key(upstream)
        self._hide_trace_fields(upstream)
        record.upstream = upstream.label
        upstream.budget.request(now)
        if upstream.turns.bulkhead is not None:
            await self._take_place()

    def _about_to_fall_back(self) -> None:
        """What the app asked for is about to be changed."""
        raise NotImplementedError

    def _refused_by_breaker(self, now: float) -> NoReturn:
        upstream, record = self._upstream, self.record
        assert upstream is not None
        wait = max(1, math.ceil(self._destination.retry_in(now)))
        record.outcome, record.code = "breaker_open", "CIRCUIT_OPEN"
        if record.attempts:
            record.suppressed = "breaker_open"
        why = f"its circuit breaker is open, and lets a probe through in {wait} s"
        hint = "GET /breakers on the admin port shows why it opened"
        if self._destination.held_open():
            why = "an operator holds its circuit breaker open"
            hint = f"`sidecar breakers` shows until when and why, `sidecar breakers reset {upstream.label}` ends it"
        raise GaveUp(
            "CIRCUIT_OPEN",
            f"calls to {upstream.label} are refused: {why}",
            reason="breaker_open",
            hint=hint,
            retry_after=wait,
        )

    def _report(self, ok: bool | None, now: float, *, waited: float | None = None, connected: bool = True) -> None:
        """Hand the breaker's permit back, with what the attempt says about the endpoint."""
        permit, self._permit = self._permit, None
        if permit is None:
            return
        if ok is None:
            self._choice.abandon(permit, now, waited)
        else:
            self._choice.record(permit, ok, now, self._situation_now().blamed, connected=connected)

    def _report_proxy(self, now: float, *, connected: bool) -> None:
        """Hand the permit back: the parent proxy failed, the endpoint was never asked."""
        permit, self._permit = self._permit, None
        if permit is not None and self._choice.proxy_failed is not None:
            self._choice.proxy_failed(permit, now, self._situation_now().blamed, connected=connected)


def _shortened(target: str) -> str:
    return target if len(target) <= _LONGEST_TARGET else target[:_LONGEST_TARGET] + "…"


def _is_for_anybody(line: bytes, known: Collection[str]) -> bool:
    name, _, value = line.decode("latin-1").partition(":")
    return name.lower() in known or is_harmless_field(name, value)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
