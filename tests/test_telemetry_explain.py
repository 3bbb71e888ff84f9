"""Explanations, told whole: what a person reads after `sidecar explain` for each typical story."""

from __future__ import annotations

import textwrap

import pytest

from telemetry import explain
from telemetry.record import SENT, Decision, Session
from telemetry.redact import Redactor
from tests.doubles.records import attempt, exhausted, healthy, recovered, retry, session, stop, wall

T = "TEMPORARY_UNAVAILABLE"
REDACTOR = Redactor()

STORIES: dict[str, tuple[Session, str]] = {
    "answered at the first try": (
        healthy(),
        """
        GET to payments was answered at the first try, 11 ms (200)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 200 after 10 ms.
            +11 ms  The app got 200 after 11 ms.
        """,
    ),
    "recovered after a 503": (
        recovered(operation="create_charge"),
        """
        GET to payments create_charge recovered after 2 attempts, 401 ms (200)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, operation create_charge, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  Retried after 200 ms: TEMPORARY_UNAVAILABLE is worth a retry, and the request may be sent again (GET is idempotent).
                    decided by: policies.default
           +300 ms  Attempt 2 to a.test:443 was answered with 200 after 100 ms.
           +401 ms  The app got 200 and saw nothing of the failure.
        """,
    ),
    "refused twice, attempts used up": (
        exhausted(),
        """
        GET to payments failed after 2 attempts, 103 ms (CONNECTION_REFUSED, not retried: attempts)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 failed after 1 ms, there was no connection and nothing was sent: CONNECTION_REFUSED.
             +1 ms  Retried after 100 ms: CONNECTION_REFUSED is worth a retry, and the request may be sent again (nothing had been sent).
                    decided by: policies.default
           +101 ms  Attempt 2 to a.test:443 failed after 1 ms, there was no connection and nothing was sent: CONNECTION_REFUSED (nothing listens on a.test:443).
           +102 ms  Not retried: policy default allows 2 attempts.
                    decided by: policies.default.max_attempts: 2
                    what would change it: a higher max_attempts
           +103 ms  The app got 502, an answer of the sidecar: CONNECTION_REFUSED: nothing listens on a.test:443. The outcome is exhausted.
        """,
    ),
    "a POST that was sent whole, kept as a dead letter": (
        session(
            "not_retryable",
            attempt(
                status=503,
                code=T,
                decision=stop(
                    "not_resendable",
                    "POST, body fully sent, no Idempotency-Key",
                    "an Idempotency-Key: with one it would have been",
                ),
            ),
            method="POST",
            suppressed="not_resendable",
            dlq_id="dlq_20260101_1",
        ),
        """
        POST to payments failed and may not be sent again, 101 ms (TEMPORARY_UNAVAILABLE, not retried: not_resendable)

             +0 ms  POST /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  Not retried: POST, body fully sent, no Idempotency-Key, so it may have been executed.
                    decided by: what may have been executed is sent again only if it is idempotent
                    what would change it: an Idempotency-Key: with one it would have been
           +101 ms  The app got 503, the upstream's own answer, passed on: TEMPORARY_UNAVAILABLE. The outcome is not_retryable.
           +101 ms  The request is kept as dead letter dlq_20260101_1: `sidecar dlq show dlq_20260101_1` tells whether it may be sent again, and how.
                    decided by: upstreams.payments.dead_letter
        """,
    ),
    "a POST without an answer": (
        session(
            "not_retryable",
            attempt(code="NETWORK_TIMEOUT", took=30, phase=SENT, message="no answer within 30 s"),
            method="POST",
            status=504,
            suppressed="not_resendable",
        ),
        """
        POST to payments failed and may not be sent again, 30 s (NETWORK_TIMEOUT, not retried: not_resendable)

             +0 ms  POST /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 failed after 30 s, the request was sent whole and no answer came: NETWORK_TIMEOUT (no answer within 30 s).
             +30 s  Not retried: POST, body fully sent, no Idempotency-Key, so it may have been executed.
                    decided by: what may have been executed is sent again only if it is idempotent
                    what would change it: an Idempotency-Key header from the app, or retry_non_idempotent: true in the policy
             +30 s  The app got 504, an answer of the sidecar: NETWORK_TIMEOUT: no answer within 30 s. The outcome is not_retryable.
        """,
    ),
    "the retry budget spent": (
        session(
            "budget",
            attempt(
                status=503,
                code=T,
                decision=stop("budget", "upstreams.payments.retry_budget: 20 % of 100 requests in 10 s"),
            ),
            suppressed="budget",
        ),
        """
        GET to payments failed with the retry budget spent, 101 ms (TEMPORARY_UNAVAILABLE, not retried: budget)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  Not retried: the retry budget of payments is spent: too many of its requests are retries already.
                    decided by: upstreams.payments.retry_budget: 20 % of 100 requests in 10 s
                    what would change it: an upstream that fails less, or a higher retry_budget.ratio
           +101 ms  The app got 503, the upstream's own answer, passed on: TEMPORARY_UNAVAILABLE. The outcome is budget.
        """,
    ),
    "a wait that does not fit": (
        session(
            "deadline",
            attempt(
                status=429,
                code="RATE_LIMIT_EXCEEDED",
                decision=stop("deadline", "Retry-After: 120, 58 s left of policies.default.total_timeout: 60"),
            ),
            suppressed="deadline",
        ),
        """
        GET to payments failed with no time left for a retry, 101 ms (RATE_LIMIT_EXCEEDED, not retried: deadline)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 429 after 100 ms: RATE_LIMIT_EXCEEDED.
           +100 ms  Not retried: the wait would not have fitted into the time left.
                    decided by: Retry-After: 120, 58 s left of policies.default.total_timeout: 60
                    what would change it: a longer total_timeout, or an x-sidecar-timeout header
           +101 ms  The app got 429, the upstream's own answer, passed on: RATE_LIMIT_EXCEEDED. The outcome is deadline.
        """,
    ),
    "an open breaker": (
        session(
            "breaker_open",
            status=503,
            code="CIRCUIT_OPEN",
            message="the breaker of a.test:443 is open for another 12 s",
        ),
        """
        GET to payments was refused by an open breaker, 1 ms (CIRCUIT_OPEN)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +1 ms  The app got 503 at once, without a call: CIRCUIT_OPEN: the breaker of a.test:443 is open for another 12 s.
                    decided by: upstreams.payments.breaker
                    what would change it: another endpoint, a `fallback` upstream, or `sidecar breakers reset` once the upstream is well
        """,
    ),
    "a stale connection": (
        session(
            "first_try",
            attempt(code="CONNECTION_RESET", reused=True, phase=SENT, took=0.001),
            attempt(kind="stale", status=200),
        ),
        """
        GET to payments was answered at the first try, 102 ms (200)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 on a kept-alive connection failed after 1 ms, the request was sent whole and no answer came: CONNECTION_RESET.
             +1 ms  The kept-alive connection had died before any byte of an answer, so the request was sent again at once on a fresh one. This does not count as a retry.
                    decided by: a stale connection is replaced once, when the request may be resent
             +1 ms  Attempt 2 to a.test:443 was answered with 200 after 100 ms.
           +102 ms  The app got 200 after 102 ms.
        """,
    ),
    "another endpoint": (
        session(
            "recovered",
            attempt(code="CONNECT_TIMEOUT", took=5, decision=retry("CONNECT_TIMEOUT", 0.05)),
            attempt("b.test:443", status=200, delay=0.05),
        ),
        """
        GET to payments recovered after 2 attempts, 5.15 s (200)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 failed after 5 s, there was no connection and nothing was sent: CONNECT_TIMEOUT.
              +5 s  Retried after 50 ms at another endpoint, b.test:443: CONNECT_TIMEOUT is worth a retry, and the request may be sent again (nothing had been sent).
                    decided by: policies.default
           +5.05 s  Attempt 2 to b.test:443 was answered with 200 after 100 ms.
           +5.15 s  The app got 200 and saw nothing of the failure.
        """,
    ),
    "a fallback upstream": (
        session("first_try", attempt("backup.test:443", status=200), upstream="backup", fallback_from="payments"),
        """
        GET to backup was answered at the first try, 101 ms (200)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Every endpoint of payments was refused by its breaker, so its fallback backup took the call.
                    decided by: upstreams.payments.fallback: backup
             +0 ms  Attempt 1 to backup.test:443 was answered with 200 after 100 ms.
           +101 ms  The app got 200 after 101 ms.
        """,
    ),
    "broken in the middle of the answer": (
        session(
            "failed_streaming",
            attempt(status=200, code="CONNECTION_RESET", message="the upstream closed in the middle of the body"),
            response_bytes=123456,
        ),
        """
        GET to payments broke off in the middle of the answer, 101 ms (CONNECTION_RESET)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 200 and broke off after 100 ms: CONNECTION_RESET (the upstream closed in the middle of the body).
           +100 ms  Not retried: the app had already got the first bytes of the answer.
                    decided by: after the first byte of an answer nothing is sent again
                    what would change it: an answer with a Content-Length of at most limits.buffer_response_bytes is completed first and can be retried
           +101 ms  The answer (200) broke off after 123,456 bytes; the app saw a broken connection, never a short answer that looks whole: CONNECTION_RESET: the upstream closed in the middle of the body.
        """,
    ),
    "the app gone during an attempt": (
        session(
            "cancelled",
            attempt(status=503, code=T, decision=retry(T, 5)),
            attempt(code="CLIENT_DISCONNECTED", phase=SENT, delay=0.3),
            status=0,
        ),
        """
        GET to payments was given up by the app after 2 attempts, 501 ms (CLIENT_DISCONNECTED)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  Retried after 300 ms: TEMPORARY_UNAVAILABLE is worth a retry, and the request may be sent again (GET is idempotent).
                    decided by: policies.default
           +400 ms  Attempt 2 to a.test:443 was under way for 100 ms when the app went away.
           +501 ms  The app went away after 501 ms, and everything was stopped.
        """,
    ),
    "the app gone during the wait": (
        session("cancelled", attempt(status=503, code=T, decision=retry(T, 5)), status=0, extra=1.5),
        """
        GET to payments was given up by the app, 1.6 s (TEMPORARY_UNAVAILABLE)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  To be retried after 5 s, but the app went away during the wait.
                    decided by: policies.default
            +1.6 s  The app went away after 1.6 s, and everything was stopped.
        """,
    ),
    "the upstream's verdict": (
        session("rejected", attempt(status=404, code="NOT_FOUND", decision=stop("fatal", ""))),
        """
        GET to payments was rejected by the upstream, 101 ms (NOT_FOUND)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 404 after 100 ms: NOT_FOUND.
           +100 ms  Not retried: NOT_FOUND is final, the same request would fail the same way.
                    decided by: the error registry: NOT_FOUND is fatal
                    what would change it: what `GET /errors/NOT_FOUND` says under resolution
           +101 ms  The app got the upstream's verdict, 404: NOT_FOUND.
        """,
    ),
    "held back by the pause of a 429": (
        session(
            "deadline",
            status=429,
            code="RATE_LIMIT_EXCEEDED",
            message="the upstream asked calls with this credential to wait another 118 s, longer than this request may take",
            suppressed="deadline",
        ),
        """
        GET to payments failed with no time left for an attempt, 1 ms (RATE_LIMIT_EXCEEDED)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +1 ms  The app got 429, an answer of the sidecar: RATE_LIMIT_EXCEEDED: the upstream asked calls with this credential to wait another 118 s, longer than this request may take. The outcome is deadline.
                    decided by: rate_limit_gate: after a 429 all calls with the same credential wait
                    what would change it: a longer x-sidecar-timeout, with which it would have waited, or `rate_limit_gate: {enabled: false}`
        """,
    ),
    "refused here": (
        session(
            "denied",
            status=403,
            code="EGRESS_DENIED",
            message="169.254.169.254 is link-local and refused",
            upstream="_none",
        ),
        """
        GET to no upstream was refused by the sidecar, 1 ms (EGRESS_DENIED)

             +0 ms  GET /pay/v1/charges arrived for no upstream, under policy default.
             +1 ms  The sidecar refused it with 403: EGRESS_DENIED: 169.254.169.254 is link-local and refused.
                    what would change it: what `GET /errors/EGRESS_DENIED` says under resolution
        """,
    ),
    "a tunnel": (
        session(
            "tunnelled",
            attempt("api.test:443", took=0.03),
            method="CONNECT",
            target="api.test:443",
            status=200,
            request_bytes=1000,
            response_bytes=50000,
            extra=4,
        ),
        """
        CONNECT to payments went through a tunnel, 4.03 s (200)

             +0 ms  The app asked for a tunnel to api.test:443.
             +0 ms  Attempt 1 to api.test:443 was connected after 30 ms.
           +4.03 s  The tunnel carried 1,000 bytes there and 50,000 back in 4.03 s. What was inside cannot be seen.
        """,
    ),
    "a tunnel that broke": (
        session(
            "tunnelled",
            attempt("api.test:443", took=0.03),
            method="CONNECT",
            target="api.test:443",
            status=200,
            code="CONNECTION_RESET",
            request_bytes=1000,
        ),
        """
        CONNECT to payments went through a tunnel that broke, 31 ms (CONNECTION_RESET)

             +0 ms  The app asked for a tunnel to api.test:443.
             +0 ms  Attempt 1 to api.test:443 was connected after 30 ms.
            +31 ms  The tunnel broke after 1,000 bytes there and 0 back in 31 ms: CONNECTION_RESET. What was inside cannot be seen.
        """,
    ),
    "a breaker that opened before the retry": (
        session(
            "breaker_open",
            attempt(
                status=503, code=T, decision=stop("breaker_open", "breaker: no endpoint is let through for another 5 s")
            ),
            suppressed="breaker_open",
        ),
        """
        GET to payments failed and was kept from a retry by an open breaker, 101 ms (TEMPORARY_UNAVAILABLE, not retried: breaker_open)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  Not retried: no endpoint of payments was let through by its breaker.
                    decided by: breaker: no endpoint is let through for another 5 s
                    what would change it: another endpoint, a `fallback` upstream, or `sidecar breakers reset` once the upstream is well
           +101 ms  The app got 503, the upstream's own answer, passed on: TEMPORARY_UNAVAILABLE. The outcome is breaker_open.
        """,
    ),
    "Max-Forwards used up": (
        session("denied", method="TRACE", status=200, upstream="_none"),
        """
        TRACE to no upstream was answered by the sidecar itself, 1 ms (200)

             +0 ms  TRACE /pay/v1/charges arrived for no upstream, under policy default.
             +1 ms  The sidecar answered it itself with 200: Max-Forwards was 0, so it went no further.
        """,
    ),
    "a dead connection does not count as an attempt of the policy": (
        session(
            "exhausted",
            attempt(code="CONNECTION_RESET", phase=SENT, reused=True),
            attempt(status=503, code=T, kind="stale", decision=stop("attempts", "policies.default.max_attempts: 1")),
            suppressed="attempts",
        ),
        """
        GET to payments failed after 2 attempts, 201 ms (TEMPORARY_UNAVAILABLE, not retried: attempts)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 on a kept-alive connection failed after 100 ms, the request was sent whole and no answer came: CONNECTION_RESET.
           +100 ms  The kept-alive connection had died before any byte of an answer, so the request was sent again at once on a fresh one. This does not count as a retry.
                    decided by: a stale connection is replaced once, when the request may be resent
           +100 ms  Attempt 2 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +200 ms  Not retried: policy default allows one attempt only.
                    decided by: policies.default.max_attempts: 1
                    what would change it: a higher max_attempts in policy default
           +201 ms  The app got 503, the upstream's own answer, passed on: TEMPORARY_UNAVAILABLE. The outcome is exhausted.
        """,
    ),
    "as many attempts as the app asked for": (
        session(
            "exhausted",
            attempt(
                status=503,
                code=T,
                decision=stop("attempts", "x-sidecar-max-attempts: 1", "a higher number in this header"),
            ),
            suppressed="attempts",
        ),
        """
        GET to payments failed, 101 ms (TEMPORARY_UNAVAILABLE, not retried: attempts)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  Not retried: the app asked for at most 1 attempt.
                    decided by: x-sidecar-max-attempts: 1
                    what would change it: a higher number in this header
           +101 ms  The app got 503, the upstream's own answer, passed on: TEMPORARY_UNAVAILABLE. The outcome is exhausted.
        """,
    ),
    "a stage that used up its attempts": (
        session(
            "exhausted",
            attempt(status=503, code=T, decision=stop("stage_budget", "stages.fetch: 5")),
            stage="fetch",
            workflow="wf-7",
            suppressed="stage_budget",
        ),
        """
        GET to payments failed, 101 ms (TEMPORARY_UNAVAILABLE, not retried: stage_budget)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, stage fetch, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  Not retried: workflow wf-7 has used up the attempts of stage fetch.
                    decided by: stages.fetch: 5
                    what would change it: a higher number for this stage under `stages`, or a new workflow id
           +101 ms  The app got 503, the upstream's own answer, passed on: TEMPORARY_UNAVAILABLE. The outcome is exhausted.
        """,
    ),
    "the upstream says no": (
        session(
            "not_retryable",
            attempt(status=503, code=T, decision=stop("server_verdict", "x-should-retry: false")),
            suppressed="server_verdict",
        ),
        """
        GET to payments failed and may not be sent again, 101 ms (TEMPORARY_UNAVAILABLE, not retried: server_verdict)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  Not retried: the upstream itself said that a retry is of no use.
                    decided by: x-should-retry: false
                    what would change it: only the upstream can change its verdict
           +101 ms  The app got 503, the upstream's own answer, passed on: TEMPORARY_UNAVAILABLE. The outcome is not_retryable.
        """,
    ),
    "a body too large to keep": (
        session(
            "not_retryable",
            attempt(status=503, code=T),
            method="PUT",
            suppressed="body_too_large",
            request_bytes=5_000_000,
        ),
        """
        PUT to payments failed and may not be sent again, 101 ms (TEMPORARY_UNAVAILABLE, not retried: body_too_large)

             +0 ms  PUT /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  Not retried: the request body (5,000,000 bytes) was larger than what is kept for sending again.
                    decided by: limits.replay_body_bytes
                    what would change it: a higher limits.replay_body_bytes
           +101 ms  The app got 503, the upstream's own answer, passed on: TEMPORARY_UNAVAILABLE. The outcome is not_retryable.
        """,
    ),
    "retries switched off": (
        session(
            "exhausted",
            attempt(status=503, code=T, decision=stop("disabled", "retries_enabled: false")),
            suppressed="disabled",
        ),
        """
        GET to payments failed, 101 ms (TEMPORARY_UNAVAILABLE, not retried: disabled)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  Not retried: retries are switched off.
                    decided by: retries_enabled: false
                    what would change it: retries_enabled: true, `POST /retries/enable`, or leaving out x-sidecar-retry
           +101 ms  The app got 503, the upstream's own answer, passed on: TEMPORARY_UNAVAILABLE. The outcome is exhausted.
        """,
    ),
    "during a drain": (
        session("exhausted", attempt(status=503, code=T), suppressed="draining"),
        """
        GET to payments failed, 101 ms (TEMPORARY_UNAVAILABLE, not retried: draining)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 was answered with 503 after 100 ms: TEMPORARY_UNAVAILABLE.
           +100 ms  Not retried: the sidecar was shutting down.
                    decided by: no retry is begun during a drain
           +101 ms  The app got 503, the upstream's own answer, passed on: TEMPORARY_UNAVAILABLE. The outcome is exhausted.
        """,
    ),
    "waited in a queue": (
        session("first_try", attempt(status=200), waited=2.5),
        """
        GET to payments was answered at the first try, 2.6 s (200)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  It waited 2.5 s in a queue before an attempt could begin.
                    decided by: rate_limit_gate (a 429 paused calls with the same credential) or max_in_flight
                    what would change it: a higher rate limit at the provider, or a higher max_in_flight
            +2.5 s  Attempt 1 to a.test:443 was answered with 200 after 100 ms.
            +2.6 s  The app got 200 after 2.6 s.
        """,
    ),
    "a probe, and a caller that retries too": (
        session("first_try", attempt(status=200, breaker="half_open"), caller_resend=True),
        """
        GET to payments was answered at the first try, 101 ms (200)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  It was here before: its client library says so, or the same idempotency key came in lately.
                    what would change it: a client library that does not retry by itself: its retries come on top of the sidecar's
             +0 ms  Attempt 1 to a.test:443, let through as a probe of the half-open breaker, was answered with 200 after 100 ms.
           +101 ms  The app got 200 after 101 ms.
        """,
    ),
    "our own fault": (
        session("internal", status=500, code="SIDECAR_INTERNAL", message="KeyError('x')"),
        """
        GET to payments failed inside the sidecar, 1 ms (SIDECAR_INTERNAL)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +1 ms  The sidecar itself failed: SIDECAR_INTERNAL: KeyError('x'). This is a fault to report; the log has the frames.
        """,
    ),
    "from the idempotency store": (
        session("deduplicated", status=200),
        """
        GET to payments was answered from the idempotency store, 1 ms (200)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +1 ms  The app got the stored answer (200) to the same idempotency key; nothing was sent.
        """,
    ),
    "taken by the outbox": (
        session("queued", status=202),
        """
        GET to payments was taken by the outbox, 1 ms (202)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +1 ms  The outbox took the request; the app got 202 and does not wait.
        """,
    ),
    "through a parent proxy with credentials": (
        session("exhausted", attempt(code="CONNECTION_REFUSED", egress_proxy="http://u:p@corp:3128"), status=502),
        """
        GET to payments failed, 101 ms (CONNECTION_REFUSED)

             +0 ms  GET /pay/v1/charges arrived for upstream payments, under policy default.
             +0 ms  Attempt 1 to a.test:443 through http://REDACTED:REDACTED@corp:3128 failed after 100 ms, there was no connection and nothing was sent: CONNECTION_REFUSED.
           +100 ms  Not retried: policy default allows one attempt only.
                    decided by: policies.default.max_attempts
                    what would change it: something that listens at that address and port: more attempts only bridge a restart
           +101 ms  The app got 502, an answer of the sidecar: CONNECTION_REFUSED. The outcome is exhausted.
        """,
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_the_story_is_told_in_these_words(story: str) -> None:
    made, told = STORIES[story]
    assert textwrap.dedent(told.removeprefix("\n")) == explain.as_text(made, REDACTOR)


@pytest.mark.parametrize("story", STORIES)
def test_the_same_story_for_programs(story: str) -> None:
    made, _ = STORIES[story]
    steps = explain.as_json(made, REDACTOR)
    assert list(range(1, len(steps) + 1)) == [step["step"] for step in steps]
    assert all({"step", "at", "what", "rule", "remedy"} == step.keys() for step in steps)
    times = [step["at"] for step in steps]
    assert sorted(times) == times, "in the order in which it happened"
    assert all(step["what"].endswith(".") for step in steps)


def test_every_reason_and_every_outcome_has_words_of_its_own() -> None:
    from telemetry.record import FATAL, OUTCOMES, SUPPRESSED
    from telemetry.sentences import ENDINGS, LAST_WORDS, REASONS

    assert {*SUPPRESSED, FATAL} == REASONS.keys()
    assert OUTCOMES == ENDINGS.keys() == LAST_WORDS.keys()
    for reason in SUPPRESSED:
        made = session("exhausted", attempt(status=503, code=T), suppressed=reason)
        (step,) = (step for step in explain.explain(made, REDACTOR) if step.what.startswith("Not retried"))
        assert step.rule, reason


def test_the_rule_and_remedy_of_the_decision_go_before_the_general_ones() -> None:
    made = session("budget", attempt(status=503, code=T, decision=stop("budget", "the rule", "the remedy")))
    (step,) = (step for step in explain.explain(made, REDACTOR) if step.what.startswith("Not retried"))
    assert ("the rule", "the remedy") == (step.rule, step.remedy)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (attempt(code="CONNECTION_RESET", phase=1), "not a byte of it had been written"),
        (attempt(status=429, code="RATE_LIMIT_EXCEEDED"), "a 429 says it was not executed"),
        (attempt(status=503, code=T), "it has an idempotency key that the provider honours, or the policy allows it"),
        (
            attempt(
                status=503, code=T, decision=Decision(0.0, T, "policies.default", resend="the provider honours it")
            ),
            "the provider honours it",
        ),
    ],
)
def test_a_retry_says_why_sending_again_was_safe(made: object, why: str) -> None:
    told = explain.as_text(session("recovered", made, attempt(status=200), method="POST"), REDACTOR)  # type: ignore[arg-type]
    assert f"may be sent again ({why})" in told
    assert "Retried at once" in told


def test_a_slow_first_try_says_why_it_is_kept_and_a_quick_one_has_nothing_to_say() -> None:
    *_, last = explain.explain(healthy(took=1.5), REDACTOR, slow=1.0)
    assert (
        "It is kept because it took longer than 1 s, although nothing went wrong.",
        "telemetry.slow_threshold: 1",
    ) == (
        last.what,
        last.rule,
    )
    assert "It is kept" not in explain.as_text(healthy(), REDACTOR, slow=1.0)


def test_a_reason_nobody_knows_and_an_outcome_nobody_named_are_still_told() -> None:
    made = session("exhausted", attempt(status=503, code=T, decision=stop("moonphase")))
    assert "Not retried: moonphase." in explain.as_text(made, REDACTOR)
    made = session("exhausted", attempt(status=503, code=T))
    made.outcome = ""
    assert "The session ended as unfinished." in explain.as_text(made, REDACTOR)


def test_secrets_of_the_target_and_of_messages_are_not_told() -> None:
    made = exhausted(target="http://u:hunter2@a.test/x?token=hunter2", message="Bearer hunter2hunter2 refused")
    made.attempts[0].message = "http://a.test/?api_key=hunter2"
    assert "hunter2" not in explain.as_text(made, REDACTOR)


@pytest.mark.parametrize(
    ("value", "said"),
    [(1e-17, "0 ms"), (0.0004, "0.4 ms"), (0.1, "100 ms"), (1.2345, "1.23 s"), (59.94, "59.9 s"), (312.4, "312 s")],
)
def test_durations_are_said_as_a_person_says_them(value: float, said: str) -> None:
    from telemetry.sentences import seconds

    assert said == seconds(value)


def test_it_says_when_by_the_clock_on_the_wall_and_with_which_ids() -> None:
    made = session("first_try", attempt(status=200))
    began = explain.as_text(made, REDACTOR, wall=wall).splitlines()[1]
    assert "2023-11-14 22:30:00.000 to 22:30:00.101 UTC, session 5e55107100000001" == began


def test_a_wait_that_nobody_could_notice_is_not_told() -> None:
    assert "queue" not in explain.as_text(session("first_try", attempt(status=200), waited=0.000079), REDACTOR)


def test_nobody_is_told_to_allow_more_attempts_than_can_be_allowed() -> None:
    made = session("exhausted", *[attempt(status=503, code=T) for _ in range(10)], suppressed="attempts")
    assert "what would change it" not in explain.as_text(made, REDACTOR).partition("Not retried")[2]


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("2000000 bytes of it are more than dead_letter.max_body_bytes", "a higher dead_letter.max_body_bytes"),
        ("no space is left", "what `GET /readyz` says under store"),
    ],
)
def test_a_body_that_was_not_kept_says_what_would_have_kept_it(why: str, remedy: str) -> None:
    made = session("exhausted", attempt(status=503, code=T), dlq_id="dlq_1", unkept=f"the body was not kept ({why})")
    *_, last = explain.explain(made, REDACTOR)
    assert (f"The body was not kept ({why}).", remedy) == (last.what, last.remedy)
