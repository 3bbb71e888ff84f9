"""Is it fine, what is wrong, why: the dashboard to open first."""

from __future__ import annotations

from dashboards.board import Line, Row, board
from dashboards.boards.colors import OUTCOMES
from dashboards.links import dead_letters_link, sessions_link, traces_link
from dashboards.panel import (
    GREEN,
    ORANGE,
    RED,
    Column,
    Json,
    Query,
    series,
    stat,
    table,
    thresholds,
)
from dashboards.promql import quantile, ratio, worst

SESSIONS = "sum(rate(sidecar_sessions_total{$S}[$W]))"
SUCCESS = ratio(
    "sum(rate(sidecar_sessions_total{$S,$GOOD}[$W]))",
    "sum(rate(sidecar_sessions_total{$S,$JUDGED}[$W]))",
)
FIRST_SUCCESS = ratio(
    'sum(rate(sidecar_upstream_attempts_total{$S,kind="first",result="success"}[$W]))',
    'sum(rate(sidecar_upstream_attempts_total{$S,kind="first"}[$W]))',
)
LATENCY = "sidecar_request_duration_seconds_bucket{$S}"
FIRST_BYTE = "sidecar_time_to_first_byte_seconds_bucket{$S}"
OVERHEAD = "sidecar_overhead_seconds_bucket{$I}"
OPEN = 'sum(sidecar_breaker_state{$S,state="open"})'
READY = "sum(sidecar_ready{$I})"


def overview() -> Json:
    return board(
        "sidecar-overview",
        "Sidecar / Overview",
        "Is it fine, what is wrong, and why: every call of the apps through their sidecars.",
        [
            Row("Is it fine?", [_now()]),
            Row("What is wrong?", [_worth(), Line(9, [_upstreams()])]),
            Row("Why?", [_times(), _answers()]),
        ],
    )


def _now() -> Line:
    return Line(
        5,
        [
            stat(
                "App-visible success rate",
                "Share of the app's calls that ended well, retries included; the caller's own mistakes (4xx) and calls "
                "it gave up are not judged. «worst» is the worst moment of the chosen time range. Under 99.5 % the "
                "error budget is being spent: look at «Sessions by outcome» for how, and at the table of upstreams for "
                "where.",
                "percentunit",
                Query(SUCCESS, "now"),
                Query(worst(SUCCESS, "min"), "worst"),
                steps=thresholds(RED, (0.95, ORANGE), (0.995, GREEN)),
                nothing="no traffic",
                decimals=2,
                links=[sessions_link()],
            ),
            stat(
                "Requests/s",
                "Calls of the app that ended, whatever became of them. Zero while the app is busy means that it does "
                "not go through the sidecar: check its HTTP_PROXY.",
                "reqps",
                Query(SESSIONS, "requests"),
                nothing="no sidecar",
            ),
            stat(
                "p99 app-visible latency",
                "99 of 100 calls were answered within this time, backoff and retries included. When it rises, compare "
                "with «Latency» and «Backoff added» to see whether the upstream or the waiting is to blame.",
                "s",
                Query(quantile(0.99, LATENCY), "now"),
                Query(worst(quantile(0.99, LATENCY)), "worst"),
                nothing="no traffic",
            ),
            stat(
                "Saved by retries",
                "Calls in the chosen time range that failed at first and were answered after a retry: failures that "
                "the app never saw.",
                "short",
                Query('sum(increase(sidecar_sessions_total{$S,outcome="recovered"}[$__range]))', "recovered"),
                nothing="no sidecar",
                decimals=0,
                links=[sessions_link(outcome="recovered")],
            ),
            stat(
                "Breakers open",
                "Endpoints to which calls are refused at once. Anything but 0: open «Retries & breakers», see which, "
                "and ask `sidecar breakers` why.",
                "short",
                Query(OPEN, "now"),
                Query(worst(OPEN), "worst"),
                steps=thresholds(GREEN, (1, RED)),
                nothing="no breakers",
            ),
            stat(
                "DLQ entries",
                "Requests kept on disk after their last failure, waiting for an operator. Open «Dead letters» and "
                "triage them; `sidecar dlq list` shows the same.",
                "short",
                Query("sum(sidecar_dlq_entries{$S})", "waiting"),
                steps=thresholds(GREEN, (1, ORANGE)),
                nothing="no dead letters",
                links=[dead_letters_link()],
            ),
            stat(
                "Sidecars ready",
                "Sidecars that accept requests. Fewer than you run: see «Sidecar internals» and the alert SidecarDown.",
                "short",
                Query(READY, "now"),
                Query(worst(READY, "min"), "least"),
                nothing="no sidecar",
            ),
        ],
        [5, 3, 4, 3, 3, 3, 3],
    )


def _worth() -> Line:
    return Line(
        9,
        [
            series(
                "Raw vs app-visible success rate",
                "What the sidecar is worth, in one picture: the lower line is what the app would have seen with a "
                "single attempt, the upper one what it saw. When both fall together retries do not help: the upstream "
                "is down, or the failures may not be retried (see «Retries not made, by reason»).",
                "percentunit",
                Query(FIRST_SUCCESS, "first attempt"),
                Query(SUCCESS, "app-visible"),
                colors={"first attempt": ORANGE, "app-visible": GREEN},
                top=1,
                links=[sessions_link()],
            ),
            series(
                "Sessions by outcome",
                "Every call of the app in exactly one outcome: green and blue ended well, grey is the caller's own "
                "business, warm colours failed. Click a series for those sessions, each with the reason of every "
                "decision.",
                "reqps",
                Query("sum by (outcome) (rate(sidecar_sessions_total{$S}[$W]))", "{{outcome}}"),
                stacked=True,
                colors=OUTCOMES,
                links=[sessions_link("outcome")],
            ),
        ],
    )


def _upstreams() -> Json:
    by_upstream = "sum by (upstream) "
    return table(
        "Upstreams: rate, error ratio, latency, breakers, dead letters",
        "One line for each upstream, the busiest first; sort by «Errors» to find the one that is failing. Click its "
        "name for its sessions, its traces and its dead letters.",
        "upstream",
        Column("Requests/s", by_upstream + "(rate(sidecar_sessions_total{$S}[$W]))", "reqps"),
        Column(
            "Errors",
            ratio(
                by_upstream + "(rate(sidecar_sessions_total{$S,$BAD}[$W]))",
                by_upstream + "(rate(sidecar_sessions_total{$S,$JUDGED}[$W]))",
            ),
            "percentunit",
            thresholds(GREEN, (0.005, ORANGE), (0.05, RED)),
        ),
        Column("p95", quantile(0.95, LATENCY, "upstream"), "s"),
        Column("In flight", by_upstream + "(sidecar_requests_in_flight{$S})", "short"),
        Column(
            "Breakers open",
            by_upstream + '(sidecar_breaker_state{$S,state="open"})',
            "short",
            thresholds(GREEN, (1, RED)),
        ),
        Column("Dead letters", by_upstream + "(sidecar_dlq_entries{$S})", "short", thresholds(GREEN, (1, ORANGE))),
        links=[
            sessions_link("upstream"),
            dead_letters_link("upstream"),
            traces_link('span.sidecar.upstream="${__value.text}"'),
        ],
    )


def _times() -> Line:
    return Line(
        8,
        [
            series(
                "Latency p50/p95/p99",
                "Time from the app's request to the last byte of its answer. The dots are exemplars: click one for its "
                "trace. Rising p99 with a flat p50 is a few slow calls, often retries; both rising is a slow upstream.",
                "s",
                Query(quantile(0.5, LATENCY), "p50"),
                Query(quantile(0.95, LATENCY), "p95"),
                Query(quantile(0.99, LATENCY), "p99", exemplars=True),
                colors={"p50": GREEN, "p95": ORANGE, "p99": RED},
                links=[sessions_link(), traces_link("span.sidecar.session.attempts>1")],
            ),
            series(
                "Time to first byte p50/p95",
                "Time until the app had the first byte of an answer that did not fail, backoff and queues included: "
                "what a person in front of a streamed answer waits for. Far below «Latency» the rest is streaming; "
                "equal to it, answers come whole. If it rises, `sidecar inflight` shows what calls wait for.",
                "s",
                Query(quantile(0.5, FIRST_BYTE, "upstream"), "{{upstream}} p50"),
                Query(quantile(0.95, FIRST_BYTE, "upstream"), "{{upstream}} p95"),
                links=[sessions_link("upstream")],
            ),
            series(
                "Sidecar's own overhead p50/p99",
                "App-visible time minus attempts and waiting: what the sidecar itself costs. A p50 above a few "
                "milliseconds: it lacks CPU, see «Event-loop lag» in «Sidecar internals». A p99: calls with an "
                "idempotency key and failed writes are on disk before they are answered, see «Write+fsync p99».",
                "s",
                Query(quantile(0.5, OVERHEAD), "p50"),
                Query(quantile(0.99, OVERHEAD), "p99"),
                colors={"p50": GREEN, "p99": RED},
            ),
            series(
                "In flight",
                "Calls and tunnels being served now. A line that only climbs is an upstream that stopped answering; "
                "«max_in_flight» would bound it.",
                "short",
                Query("sum by (upstream) (sidecar_requests_in_flight{$S})", "{{upstream}}"),
                links=[sessions_link("upstream")],
            ),
        ],
    )


def _answers() -> Line:
    return Line(
        8,
        [
            series(
                "Responses by code",
                "What the app got; code 0 means that it went away before it had an answer, usually because its own "
                "timeout is shorter than the policy's total_timeout.",
                "reqps",
                Query("sum by (code) (rate(sidecar_requests_total{$S}[$W]))", "{{code}}"),
                stacked=True,
            ),
            series(
                "Refused here, by reason",
                "Requests that the sidecar itself refused (no route, egress rules, limits) or could not parse. "
                "EGRESS_DENIED or NO_ROUTE: compare the app's target with `upstreams` and `egress`. OVERLOADED: raise "
                "max_in_flight or find out why the upstream is slow.",
                "reqps",
                Query("sum by (reason) (rate(sidecar_denied_total{$I}[$W]))", "{{reason}}"),
                Query("sum by (reason) (rate(sidecar_malformed_requests_total{$I}[$W]))", "malformed: {{reason}}"),
                links=[sessions_link(outcome="denied")],
            ),
            series(
                "Failures by operation",
                "Calls that failed for good, by the operation of the configuration they belong to. One line far above "
                "the others is one kind of call in trouble, not the upstream: `sidecar sessions --upstream UPSTREAM`.",
                "reqps",
                Query(
                    "sum by (upstream, operation) (rate(sidecar_operation_sessions_total{$S,$BAD}[$W]))",
                    "{{upstream}} {{operation}}",
                ),
                links=[sessions_link("upstream")],
            ),
            series(
                "Retries of the caller",
                "Calls that the app says are its own retries. Much of it on top of ours multiplies the load: switch "
                "one of the two off, with `x-sidecar-retry: off` or in the app's client.",
                "reqps",
                Query("sum by (upstream) (rate(sidecar_caller_resends_total{$S}[$W]))", "{{upstream}}"),
            ),
        ],
    )
