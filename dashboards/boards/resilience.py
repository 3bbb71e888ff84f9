"""Retries and breakers: do they help, what do they do, what do they cost."""

from __future__ import annotations

from dashboards.board import Line, Row, board
from dashboards.boards.colors import ENDING_IN_RESULT, FAILED_OUTCOMES, OUTCOMES, RESULTS
from dashboards.links import sessions_link, traces_link
from dashboards.panel import (
    GREEN,
    ORANGE,
    RED,
    YELLOW,
    Json,
    Query,
    heatmap,
    series,
    stat,
    state_timeline,
    thresholds,
)
from dashboards.promql import BAD, quantile, ratio

ATTEMPTS = "sidecar_upstream_attempts_total"
STATES = ((0, "closed", GREEN), (1, "half-open", YELLOW), (2, "open", RED))
RETRY_SUCCESS = ratio(
    'sum(rate(sidecar_sessions_total{$S,outcome="recovered"}[$W]))',
    'sum(rate(sidecar_sessions_total{$S,outcome=~"recovered|exhausted|budget|deadline"}[$W]))',
)
AMPLIFICATION = ratio(
    f'sum(rate({ATTEMPTS}{{$S,kind=~"first|retry"}}[$W]))', f'sum(rate({ATTEMPTS}{{$S,kind="first"}}[$W]))'
)


def resilience() -> Json:
    return board(
        "sidecar-resilience",
        "Sidecar / Retries & breakers",
        "Whether retries and circuit breakers help, what they do at this moment, and what they cost.",
        [
            Row("Is it fine: do retries help, is anything shut off?", [_now()]),
            Row("What is wrong: what fails, what was retried, why was a retry not made?", [_failures(), _after()]),
            Row("Breakers: when did they open, whom did they refuse, did probes pass?", [*_breakers()]),
            Row("Why: what do retries cost?", [_costs(), _times()]),
        ],
    )


def _now() -> Line:
    return Line(
        5,
        [
            stat(
                "Retry success rate",
                "Of the calls that were retried, the share that was answered in the end. Under 50 % for long: retries "
                "only add load; look at «Failed attempts by error code» and fix the cause or lower max_attempts.",
                "percentunit",
                Query(RETRY_SUCCESS, "recovered"),
                steps=thresholds(RED, (0.3, ORANGE), (0.7, GREEN)),
                nothing="no retries",
                decimals=1,
                links=[sessions_link(outcome="recovered")],
            ),
            stat(
                "Load amplification",
                "Attempts sent for each first attempt: 100 % means no retries, 115 % is the alert SidecarRetryStorm. A "
                "retry budget of 0.2 caps it near 120 %.",
                "percentunit",
                Query(AMPLIFICATION, "amplification"),
                steps=thresholds(GREEN, (1.1, ORANGE), (1.15, RED)),
                nothing="no traffic",
                decimals=1,
            ),
            stat(
                "Retry budget left",
                "The upstream with the least budget. At 0 % its failures are passed on without a retry (reason "
                "«budget»), which protects it. Raise retry_budget.ratio only if it can take the load.",
                "percentunit",
                Query("min(sidecar_retry_budget_remaining_ratio{$S})", "left"),
                steps=thresholds(RED, (0.1, ORANGE), (0.4, GREEN)),
                nothing="no budgets",
                decimals=0,
            ),
            stat(
                "Breakers open",
                "Endpoints to which calls are refused at once. `sidecar breakers` tells when the next probe is due; "
                "`sidecar breakers reset UPSTREAM` closes it by hand.",
                "short",
                Query('sum(sidecar_breaker_state{$S,state="open"})', "open"),
                steps=thresholds(GREEN, (1, RED)),
                nothing="no breakers",
            ),
            stat(
                "Time since last transition",
                "How long the breakers of each upstream have been in their state. Short times again and again are "
                "flapping: lengthen the window or raise min_volume.",
                "s",
                Query(
                    "time() - max by (upstream) (sidecar_breaker_last_transition_timestamp_seconds{$S} > 0)",
                    "{{upstream}}",
                ),
                nothing="never",
            ),
        ],
    )


def _failures() -> Line:
    return Line(
        9,
        [
            series(
                "Failed attempts by error code",
                "What went wrong at the upstream, in the words of `GET /errors`, which tells for each code the likely "
                "causes and what to do.",
                "reqps",
                Query(f'sum by (result) (rate({ATTEMPTS}{{$S,result!="success"}}[$W]))', "{{result}}"),
                stacked=True,
                links=[
                    sessions_link(code="${__field.labels.result}"),
                    traces_link('span.error.type="${__field.labels.result}"'),
                ],
            ),
            series(
                "Retries by reason",
                "Retries that were sent, by the error code of the attempt before.",
                "reqps",
                Query("sum by (reason) (rate(sidecar_retries_total{$S}[$W]))", "{{reason}}"),
                stacked=True,
                links=[sessions_link(code="${__field.labels.reason}")],
            ),
            series(
                "Retries not made, by reason",
                "Failures that could have been retried and were not. not_resendable: send an Idempotency-Key. budget: "
                "too many fail. deadline: total_timeout is too short for the backoff. body_too_large: "
                "limits.replay_body_bytes. memory: limits.memory_bytes. attempts: max_attempts is used up. `sidecar "
                "explain SESSION_ID` says it for one session.",
                "reqps",
                Query("sum by (reason) (rate(sidecar_retries_suppressed_total{$S}[$W]))", "{{reason}}"),
                stacked=True,
                links=[sessions_link()],
            ),
        ],
    )


def _after() -> Line:
    return Line(
        8,
        [
            series(
                "Session outcome after a first failure",
                "How calls ended whose first attempt failed. Blue was saved; every other colour reached the app.",
                "reqps",
                Query(
                    f'sum by (outcome) (rate(sidecar_sessions_total{{$S,outcome=~"recovered|{BAD}"}}[$W]))',
                    "{{outcome}}",
                ),
                stacked=True,
                colors={"recovered": OUTCOMES["recovered"], **FAILED_OUTCOMES},
                links=[sessions_link("outcome")],
            ),
            series(
                "Attempts by kind",
                "first and retry are the app's calls; stale replaces a dead kept-alive connection, probe tests a "
                "half-open breaker, replay, outbox and reconcile are work from the disk.",
                "reqps",
                Query(f"sum by (kind) (rate({ATTEMPTS}{{$S}}[$W]))", "{{kind}}"),
                stacked=True,
            ),
        ],
    )


def _breakers() -> tuple[Line, Line, Line]:
    by_endpoint = "max by (instance, upstream, endpoint) "
    state = (
        by_endpoint + '(sidecar_breaker_state{$S,state="half_open"})'
        " + 2 * " + by_endpoint + '(sidecar_breaker_state{$S,state="open"})'
    )
    timeline = state_timeline(
        "Breaker state per endpoint",
        "Green lets calls through, red refuses them, yellow lets a few probes through. Red for long: the endpoint is "
        "down; see its code in «Failed attempts by error code». Red and yellow in turns: probes keep failing.",
        Query(state, "{{upstream}} {{endpoint}} ({{instance}})"),
        STATES,
        links=[sessions_link("upstream", outcome="breaker_open")],
    )
    refused = series(
        "Fast-fails",
        "Calls refused at once because breakers were open; the app got 503 CIRCUIT_OPEN with Retry-After. The dashed "
        "series would have been refused without monitor_only.",
        "reqps",
        Query("sum by (upstream) (rate(sidecar_breaker_rejections_total{$S}[$W]))", "{{upstream}}"),
        Query("sum by (upstream) (rate(sidecar_breaker_would_open_total{$S}[$W]))", "{{upstream}} would open"),
        overrides=[
            {
                "matcher": {"id": "byRegexp", "options": "/ would open$/"},
                "properties": [{"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [6, 4]}}],
            }
        ],
        links=[sessions_link("upstream", outcome="breaker_open")],
    )
    probes = series(
        "Half-open probes",
        "Attempts that tested a half-open breaker. Only failures: the endpoint is still down. Enough successes "
        "(success_threshold) close it.",
        "short",
        Query("sum by (upstream, result) (increase(sidecar_breaker_probes_total{$S}[$W]))", "{{upstream}} {{result}}"),
        as_bars=True,
        colors=ENDING_IN_RESULT,
    )
    failing = series(
        "Failure ratio in the breaker window",
        "Share of failed calls as the breaker of the worst endpoint sees it; at failure_ratio (0.5 unless set) it "
        "opens. Close under it for long: the upstream is struggling.",
        "percentunit",
        Query("max by (upstream) (sidecar_breaker_failure_ratio{$S})", "{{upstream}}"),
        top=1,
        steps=thresholds(GREEN, (0.5, RED)),
    )
    moves = series(
        "Breaker transitions",
        "Changes of state. closed → open again and again is flapping: see the alert SidecarBreakerFlapping.",
        "short",
        Query(
            "sum by (upstream, from_state, to_state) (increase(sidecar_breaker_transitions_total{$S}[$W])) > 0",
            "{{upstream}} {{from_state}} → {{to_state}}",
        ),
        as_bars=True,
    )
    return Line(8, [timeline]), Line(8, [refused, probes, failing]), Line(7, [moves, _gate()], [12, 12])


def _gate() -> Json:
    return series(
        "Rate-limit gate",
        "Calls that wait for the reset of a 429, and how often an answer closed the gate. Waiting for long: the app "
        "asks for more than the provider allows; slow it down or ask for a higher limit.",
        "short",
        Query("sum by (upstream) (sidecar_rate_limit_gate_waiting{$S})", "{{upstream}} waiting"),
        Query("sum by (upstream) (increase(sidecar_rate_limit_gate_pauses_total{$S}[$W]))", "{{upstream}} pauses"),
        links=[sessions_link(code="RATE_LIMIT_EXCEEDED")],
    )


def _costs() -> Line:
    mean = ratio(
        "sum by (upstream) (rate(sidecar_session_attempts_sum{$S}[$W]))",
        "sum by (upstream) (rate(sidecar_session_attempts_count{$S}[$W]))",
    )
    return Line(
        8,
        [
            heatmap(
                "Attempts per session",
                "How many attempts calls took. Everything in the lowest band is a healthy upstream; a second band is "
                "retries at work; a band at max_attempts is calls that used them all up.",
                "short",
                Query("sum by (le) (increase(sidecar_session_attempts_bucket{$S}[$W]))", "{{le}}"),
            ),
            series(
                "Mean attempts per session",
                "1 means that nothing is retried. The upstream that rises first is the one to look at.",
                "short",
                Query(mean, "{{upstream}}"),
            ),
            series(
                "Retry budget left",
                "Share of each upstream's retry budget that is left; at 0 further failures are passed on.",
                "percentunit",
                Query("min by (upstream) (sidecar_retry_budget_remaining_ratio{$S})", "{{upstream}}"),
                top=1,
            ),
        ],
    )


def _times() -> Line:
    backoff = "sidecar_session_backoff_seconds"
    attempt = "sidecar_upstream_attempt_duration_seconds_bucket{$S}"
    return Line(
        8,
        [
            series(
                "Backoff added p95",
                "Time per call with no attempt in flight: backoff, the rate-limit gate, the queue of max_in_flight. "
                "Latency that the sidecar adds on purpose; base_delay and max_delay of the policy set it. A p95 just "
                "under 50 ms only says that it is in the finest bucket: the mean is exact.",
                "s",
                Query(quantile(0.95, backoff + "_bucket{$S}", "upstream"), "{{upstream}} p95"),
                Query(
                    ratio(
                        f"sum by (upstream) (rate({backoff}_sum{{$S}}[$W]))",
                        f"sum by (upstream) (rate({backoff}_count{{$S}}[$W]))",
                    ),
                    "{{upstream}} mean",
                ),
                links=[sessions_link("upstream")],
            ),
            series(
                "Attempt latency: success vs failure p95",
                "Time of a single attempt. Failures much slower than successes: attempt_timeout is too generous. Dots "
                "are exemplars: click one for its trace.",
                "s",
                Query(quantile(0.95, attempt, "result"), "{{result}}", exemplars=True),
                colors=RESULTS,
                links=[traces_link("span.http.request.resend_count>0")],
            ),
        ],
    )
