"""Metrics: the catalogue, what each session adds to it, and a scrape that does not hold up traffic."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from telemetry import live, names
from telemetry.exposition import SLICE
from telemetry.metrics import Metrics
from telemetry.record import ATTEMPT_KINDS, BAD, GOOD, OUTCOMES, SUPPRESSED, Session, Trace
from telemetry.reference import metrics_table
from tests.doubles.records import attempt, exhausted, healthy, recovered, retry, session

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
CODES = ("CONNECTION_REFUSED", "TEMPORARY_UNAVAILABLE", "NETWORK_TIMEOUT", "RATE_LIMIT_EXCEEDED")

# The contract with dashboards and alerts, written a second time on purpose: name → labels.
CONTRACT = {
    "requests_total": "upstream method code",
    "sessions_total": "upstream outcome",
    "request_duration_seconds": "upstream result",
    "session_attempts": "upstream",
    "time_to_first_byte_seconds": "upstream",
    "operation_sessions_total": "upstream operation outcome",
    "session_backoff_seconds": "upstream",
    "overhead_seconds": "",
    "upstream_attempts_total": "upstream kind result",
    "upstream_attempt_duration_seconds": "upstream result",
    "retries_total": "upstream reason",
    "retries_suppressed_total": "upstream reason",
    "retry_budget_remaining_ratio": "upstream",
    "breaker_state": "upstream endpoint state",
    "breaker_transitions_total": "upstream endpoint from_state to_state",
    "breaker_rejections_total": "upstream",
    "breaker_probes_total": "upstream result",
    "breaker_failure_ratio": "upstream",
    "breaker_last_transition_timestamp_seconds": "upstream",
    "dlq_entries": "upstream",
    "dlq_oldest_entry_timestamp_seconds": "upstream",
    "dlq_size_bytes": "",
    "dlq_capacity_bytes": "",
    "dlq_disk_free_bytes": "",
    "store_keeps": "",
    "store_incomplete": "",
    "dlq_enqueued_total": "upstream reason",
    "dlq_replayed_total": "upstream outcome",
    "dlq_rejected_total": "reason",
    "dlq_evicted_total": "reason",
    "dlq_write_duration_seconds": "",
    "idempotency_lookups_total": "result",
    "outbox_jobs": "state",
    "dlq_escalated_total": "upstream",
    "outbox_deliveries_total": "upstream outcome",
    "outbox_order_violations_total": "upstream",
    "caller_resends_total": "upstream",
    "malformed_requests_total": "reason",
    "denied_total": "reason",
    "breaker_would_open_total": "upstream",
    "tls_verification_disabled": "upstream",
    "interception_demotions_total": "upstream",
    "tls_client_errors_total": "reason",
    "rate_limit_gate_waiting": "upstream",
    "rate_limit_gate_pauses_total": "upstream",
    "requests_in_flight": "upstream",
    "downstream_connections": "",
    "memory_held_bytes": "kind",
    "memory_limit_bytes": "",
    "clock_steps_total": "",
    "request_bodies_given_up_total": "",
    "upstream_connections": "upstream state",
    "upstream_connects_total": "upstream result",
    "upstream_connection_wait_seconds": "upstream",
    "upstream_surplus_total": "upstream",
    "tunnels_total": "upstream result",
    "request_bytes_total": "upstream",
    "response_bytes_total": "upstream",
    "event_loop_lag_seconds": "",
    "telemetry_spans_total": "result",
    "telemetry_exports_total": "signal result",
    "telemetry_queue_size": "",
    "telemetry_queue_capacity": "",
    "telemetry_last_export_success_timestamp_seconds": "signal",
    "config_reloads_total": "result",
    "config_last_reload_successful": "",
    "config_last_reload_success_timestamp_seconds": "",
    "build_info": "version revision python_version",
    "ready": "",
    "internal_errors_total": "component",
    "label_overflow_total": "label",
    "log_records_suppressed_total": "level",
}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"sidecar_{name}", labels)


def text(metrics: Metrics, accept: str = "") -> str:
    return b"".join(metrics.render(accept)[1]).decode()


def all_samples(parsed: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value for family in parsed for sample in family.samples
    }


# ---- the catalogue -----------------------------------------------------------------------------------------------


def test_the_catalogue_is_the_contract() -> None:
    assert {f"sidecar_{name}": tuple(labels.split()) for name, labels in CONTRACT.items()} == {
        metric.exposed: metric.labels for metric in names.CATALOGUE
    }


def test_every_metric_has_a_help_text_and_every_histogram_its_buckets() -> None:
    for metric in names.CATALOGUE:
        assert metric.help.endswith("."), metric.name
        assert (metric.kind == "histogram") == bool(metric.buckets), metric.name
        assert tuple(sorted(metric.buckets)) == metric.buckets
    assert {names.REQUEST_DURATION.name, names.ATTEMPT_DURATION.name} == {
        m.name for m in names.CATALOGUE if m.exemplars
    }


def test_no_other_file_of_telemetry_spells_a_metric_name() -> None:
    folder = Path(names.__file__).parent
    spelled = {metric.name.removeprefix("sidecar_") for metric in names.CATALOGUE} - {"ready", "denied", "retries"}
    offenders = []
    for path in folder.glob("*.py"):
        if path.name == "names.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("sidecar_"):
                offenders.append(f"{path.name}:{node.lineno} {node.value}")
    assert [] == offenders
    assert spelled


def test_a_registry_of_prometheus_takes_it_and_every_family_is_announced_once() -> None:
    shown = text(Metrics("1.2.3", "abc"))
    announced = [line.split()[2] for line in shown.splitlines() if line.startswith("# TYPE sidecar_")]
    assert sorted(metric.exposed for metric in names.CATALOGUE) == sorted(announced)
    assert "process_cpu_seconds_total" in shown and "python_gc_objects_collected_total" in shown
    assert "_created" not in shown
    assert 'version="1.2.3",revision="abc"' in shown


def test_the_reference_has_a_row_for_every_metric() -> None:
    rows = metrics_table().splitlines()
    assert len(names.CATALOGUE) + 2 == len(rows)
    assert "| `sidecar_overhead_seconds` | histogram | – | " in metrics_table()
    assert (
        "| `sidecar_request_duration_seconds` | histogram with exemplars | `upstream`, `result` | " in metrics_table()
    )


# ---- what a session adds -----------------------------------------------------------------------------------------


def test_a_healthy_session_is_in_every_family_it_belongs_to() -> None:
    metrics = Metrics()
    metrics.observe(healthy(took=0.01, request_bytes=10, response_bytes=20))
    label = {"upstream": "payments"}
    assert 1 == value(metrics, "requests_total", **label, method="GET", code="200")
    assert 1 == value(metrics, "sessions_total", **label, outcome="first_try")
    assert 1 == value(metrics, "upstream_attempts_total", **label, kind="first", result="success")
    assert 1 == value(metrics, "request_duration_seconds_count", **label, result="success")
    assert 0 == value(metrics, "request_duration_seconds_count", **label, result="failure")
    assert 1 == value(metrics, "upstream_attempt_duration_seconds_bucket", **label, result="success", le="0.025")
    assert 0 == value(metrics, "upstream_attempt_duration_seconds_bucket", **label, result="success", le="0.0025")
    assert (1, 1) == (
        value(metrics, "session_attempts_count", **label),
        value(metrics, "session_attempts_sum", **label),
    )
    assert 1 == value(metrics, "session_attempts_bucket", **label, le="1.0")
    assert (1, 0) == (
        value(metrics, "session_backoff_seconds_count", **label),
        value(metrics, "session_backoff_seconds_sum", **label),
    )
    assert 1 == value(metrics, "overhead_seconds_count")
    assert (10, 20) == (value(metrics, "request_bytes_total", **label), value(metrics, "response_bytes_total", **label))


def test_a_recovered_session_counts_its_retry_its_backoff_and_its_overhead() -> None:
    metrics = Metrics()
    metrics.observe(recovered(waited=0.3, caller_resend=True))
    label = {"upstream": "payments"}
    assert 1 == value(metrics, "upstream_attempts_total", **label, kind="first", result="TEMPORARY_UNAVAILABLE")
    assert 1 == value(metrics, "upstream_attempts_total", **label, kind="retry", result="success")
    assert 0 == value(metrics, "upstream_attempts_total", **label, kind="first", result="success")
    assert 1 == value(metrics, "retries_total", **label, reason="TEMPORARY_UNAVAILABLE")
    assert 2 == value(metrics, "session_attempts_sum", **label)
    assert 0.5 == value(metrics, "session_backoff_seconds_sum", **label)
    assert 1 == value(metrics, "caller_resends_total", **label)
    overhead = value(metrics, "overhead_seconds_sum")
    assert overhead is not None and 0.0009 < overhead < 0.0011
    assert 1 == value(metrics, "request_duration_seconds_count", **label, result="success")


def test_a_failure_says_why_it_was_not_retried() -> None:
    metrics = Metrics()
    metrics.observe(exhausted())
    assert 1 == value(metrics, "retries_suppressed_total", upstream="payments", reason="attempts")
    assert 0 == value(metrics, "retries_suppressed_total", upstream="payments", reason="deadline")
    assert 1 == value(metrics, "request_duration_seconds_count", upstream="payments", result="failure")


def test_fast_fails_probes_and_fallbacks_are_seen() -> None:
    metrics = Metrics()
    metrics.observe(session("breaker_open", status=503, code="CIRCUIT_OPEN"))
    metrics.observe(session("first_try", attempt(status=200, breaker="half_open")))
    metrics.observe(session("recovered", attempt(status=200), upstream="backup", fallback_from="payments"))
    assert 2 == value(metrics, "breaker_rejections_total", upstream="payments")
    assert 1 == value(metrics, "breaker_probes_total", upstream="payments", result="success")
    assert 0 == value(metrics, "breaker_probes_total", upstream="payments", result="failure")


def test_a_breaker_that_stops_a_retry_has_not_refused_the_request() -> None:
    metrics = Metrics()
    metrics.observe(session("breaker_open", attempt(status=503, code="TEMPORARY_UNAVAILABLE"), status=503))
    assert 0 == value(metrics, "breaker_rejections_total", upstream="payments")
    assert 1 == value(metrics, "sessions_total", upstream="payments", outcome="breaker_open")


def test_a_retry_that_probes_a_breaker_is_a_retry_and_a_resend_on_a_fresh_connection_is_none() -> None:
    metrics = Metrics()
    failed = attempt(status=503, code="TEMPORARY_UNAVAILABLE")
    metrics.observe(session("recovered", failed, attempt(status=200, kind="probe", breaker="half_open")))
    metrics.observe(session("first_try", attempt(code="CONNECTION_LOST"), attempt(status=200, kind="stale")))
    metrics.observe(session("first_try", attempt(status=200, kind="probe", breaker="half_open")))
    assert 1 == value(metrics, "retries_total", upstream="payments", reason="TEMPORARY_UNAVAILABLE")
    assert value(metrics, "retries_total", upstream="payments", reason="CONNECTION_LOST") is None


def test_a_tunnel_counts_as_a_tunnel_and_not_as_latency() -> None:
    metrics = Metrics()
    metrics.observe(session("tunnelled", attempt(took=0.1), method="CONNECT", status=200))
    metrics.observe(session("exhausted", attempt(code="CONNECTION_REFUSED"), method="CONNECT", status=502))
    assert 1 == value(metrics, "tunnels_total", upstream="payments", result="ended")
    assert 1 == value(metrics, "tunnels_total", upstream="payments", result="CONNECTION_REFUSED")
    assert 0 == value(metrics, "request_duration_seconds_count", upstream="payments", result="success")
    assert 1 == value(metrics, "request_duration_seconds_count", upstream="payments", result="failure")


def test_an_app_that_went_away_got_code_0_whatever_was_under_way() -> None:
    metrics = Metrics()
    metrics.observe(session("cancelled", attempt(status=200)))
    assert 1 == value(metrics, "requests_total", upstream="payments", method="GET", code="0")


def test_what_was_refused_before_an_attempt_leaves_no_attempts_not_even_zeros() -> None:
    metrics = Metrics()
    metrics.observe(session("denied", status=403, code="EGRESS_DENIED", upstream="_none"))
    assert 1 == value(metrics, "sessions_total", upstream="_none", outcome="denied")
    assert None is value(metrics, "upstream_attempts_total", upstream="_none", kind="first", result="success")
    assert 1 == value(metrics, "request_duration_seconds_count", upstream="_none", result="success")


def test_a_configured_upstream_shows_the_zeros_that_panels_divide_by() -> None:
    metrics = Metrics(upstreams=["idle"])
    for outcome in OUTCOMES:
        assert 0 == value(metrics, "sessions_total", upstream="idle", outcome=outcome)
    for reason in SUPPRESSED:
        assert 0 == value(metrics, "retries_suppressed_total", upstream="idle", reason=reason)
    for kind in ("first", "retry"):
        assert 0 == value(metrics, "upstream_attempts_total", upstream="idle", kind=kind, result="success")
    assert 0 == value(metrics, "breaker_rejections_total", upstream="idle")
    assert 0 == value(metrics, "session_attempts_count", upstream="idle")
    metrics.configure(["later"])
    assert 0 == value(metrics, "sessions_total", upstream="later", outcome="recovered")


# ---- everything adds up ------------------------------------------------------------------------------------------


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    outcome = draw(st.sampled_from(sorted(OUTCOMES)))
    count = 1 if outcome == "first_try" else draw(st.integers(0, 4))
    attempts = []
    for number in range(count):
        last = number == count - 1
        failed = outcome != "first_try" and (not last or outcome in BAD)
        attempts.append(
            attempt(
                status=draw(st.sampled_from([200, 503])),
                code=draw(st.sampled_from(CODES)) if failed else None,
                took=draw(st.floats(0, 2)),
                delay=draw(st.floats(0, 1)) if number else 0.0,
                kind=draw(st.sampled_from(ATTEMPT_KINDS[1:])) if number else "first",
                breaker=draw(st.sampled_from(["closed", "closed", "half_open"])),
            )
        )
    made = session(
        outcome,
        *attempts,
        method=draw(st.sampled_from(["GET", "POST"])),
        status=draw(st.sampled_from([0, 200, 503])),
        upstream=draw(st.sampled_from(["a", "b"])),
        suppressed=draw(st.sampled_from([None, *SUPPRESSED])) if outcome in BAD else None,
        waited=draw(st.sampled_from([0.0, 0.0, 0.5])),
        caller_resend=draw(st.booleans()),
        extra=draw(st.floats(0, 1)),
        operation=draw(st.sampled_from([None, None, "pay"])),
    )
    if outcome != "tunnelled" and draw(st.booleans()):
        made.first_byte = made.started + (made.ended - made.started) * draw(st.floats(0.01, 1))
    return made


@settings(deadline=None)
@given(st.lists(sessions(), max_size=30))
def test_whatever_happened_the_registry_agrees_with_a_naive_recount(storm: list[Session]) -> None:
    metrics = Metrics()
    for each in storm:
        metrics.observe(each)
    found = all_samples(metrics.registry.collect())

    def total(name: str, **labels: str) -> float:
        wanted = set(labels.items())
        return sum(count for (sample, pairs), count in found.items() if sample == f"sidecar_{name}" and wanted <= pairs)

    assert len(storm) == total("sessions_total") == total("requests_total")
    assert Counter(each.outcome for each in storm) == {
        word: count for word in OUTCOMES if (count := total("sessions_total", outcome=word))
    }
    attempts = [(each, made) for each in storm for made in each.attempts]
    assert len(attempts) == total("upstream_attempts_total") == total("upstream_attempt_duration_seconds_count")
    for kind in ATTEMPT_KINDS:
        assert sum(made.kind == kind for _, made in attempts) == total("upstream_attempts_total", kind=kind)
    failed = sum(made.code is not None for _, made in attempts)
    assert failed == total("upstream_attempt_duration_seconds_count", result="failure")
    with_attempts = [each for each in storm if each.attempts]
    assert len(with_attempts) == total("session_attempts_count") == total("session_backoff_seconds_count")
    assert len(attempts) == total("session_attempts_sum")
    assert sum(each.suppressed is not None for each in storm) == total("retries_suppressed_total")
    assert sum(each.caller_resend for each in storm) == total("caller_resends_total")
    good, bad = metrics.good_and_bad()
    assert (sum(each.outcome in GOOD for each in storm), sum(each.outcome in BAD for each in storm)) == (good, bad)
    whole = [one for one in storm if one.outcome not in BAD | {"tunnelled"}]
    waits = [
        (one.first_byte or one.ended) - one.started for one in whole if one.first_byte or one.outcome != "cancelled"
    ]
    assert len(waits) == total("time_to_first_byte_seconds_count")
    assert abs(sum(waits) - total("time_to_first_byte_seconds_sum")) < 1e-6
    for bound in (0.005, 0.1, 1.0):
        fast = sum(wait <= bound for wait in waits)
        assert fast == total("time_to_first_byte_seconds_bucket", le=str(bound))
    assert {
        word: count for word in OUTCOMES if (count := total("operation_sessions_total", operation="pay", outcome=word))
    } == Counter(one.outcome for one in storm if one.operation == "pay")
    assert abs(total("overhead_seconds_sum") - sum(_overhead(each) for each in storm)) < 1e-6


def _overhead(each: Session) -> float:
    if each.outcome == "tunnelled":
        return 0.0
    spent = sum(made.ended - made.started + made.delay for made in each.attempts)
    return max(0.0, each.ended - each.started - spent - each.waited)


# ---- labels stay few ---------------------------------------------------------------------------------------------


def test_absurd_methods_and_codes_do_not_create_series() -> None:
    metrics = Metrics()
    for status in range(100, 600):
        for method in ("GET", "POST", f"M{status}"):
            metrics.observe(session("rejected", attempt(status=status), method=method, status=status))
    assert len(metrics.tallies["payments"].requests) < 80
    found = all_samples(metrics.registry.collect())
    assert 1500 == sum(count for (name, _), count in found.items() if name == "sidecar_requests_total")


def test_an_upstream_with_everything_has_less_than_250_series() -> None:
    metrics = Metrics(upstreams=["payments"])
    for code in CODES:
        metrics.observe(session("recovered", attempt(code=code, decision=retry(code, 0.1)), attempt(status=200)))
        metrics.observe(session("exhausted", attempt(status=503, code=code), status=503))
    for status in (200, 201, 204, 301, 400, 401, 404, 429, 500, 503):
        for method in ("GET", "POST", "DELETE"):
            metrics.observe(session("first_try", attempt(status=status), method=method, status=status))
    metrics.live = lambda: live.families(Facts([upstream("payments")]))
    series = [key for key in all_samples(metrics.registry.collect()) if ("upstream", "payments") in key[1]]
    assert 150 < len(series) < 250


# ---- a scrape ----------------------------------------------------------------------------------------------------


def busy(upstreams: int) -> Metrics:
    metrics = Metrics("1")
    for number in range(upstreams):
        for each in (healthy(), recovered(), exhausted()):
            each.upstream = f"upstream-{number}"
            metrics.observe(each)
    metrics.live = lambda: live.families(Facts([upstream(f"upstream-{n}") for n in range(upstreams)]))
    return metrics


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_a_scrape_of_50_upstreams_comes_in_slices_that_do_not_grow_with_them(accept: str) -> None:
    slices = list(busy(50).render(accept)[1])
    samples = [sum(not line.startswith(b"#") for line in part.splitlines()) for part in slices]
    assert sum(samples) > 5_000
    assert max(samples) <= SLICE
    assert len(slices) > sum(samples) / SLICE


def test_requests_that_end_between_two_slices_disturb_neither_the_scrape_nor_each_other() -> None:
    metrics = busy(20)
    pieces = []
    for number, piece in enumerate(metrics.render("")[1]):
        pieces.append(piece)
        each = exhausted()
        each.upstream, each.attempts[0].code = f"new-{number}", "NETWORK_TIMEOUT"
        metrics.observe(each)
    families = list(parse_prometheus(b"".join(pieces).decode()))
    assert len({family.name for family in families}) == len(families), "no family in two pieces"


@pytest.mark.parametrize(("accept", "parse"), [("", parse_prometheus), (OPENMETRICS, parse_openmetrics)])
def test_the_text_says_what_the_registry_says(accept: str, parse: Any) -> None:
    metrics = busy(3)
    metrics.denied('a "quoted" \\ reason\nover two lines')
    shown = {key: v for key, v in all_samples(parse(text(metrics, accept))).items() if key[0].startswith("sidecar_")}
    kept = {key: v for key, v in all_samples(metrics.registry.collect()).items() if key[0].startswith("sidecar_")}
    assert kept == shown


def test_our_text_is_prometheus_clients_text() -> None:
    from prometheus_client import generate_latest

    metrics = busy(2)
    only_ours = CollectorRegistry(auto_describe=False)
    only_ours.register(metrics)
    theirs = all_samples(parse_prometheus(generate_latest(only_ours).decode()))
    ours = all_samples(parse_prometheus(text(metrics)))
    assert theirs == {key: count for key, count in ours.items() if key[0].startswith("sidecar_")}


def test_exemplars_are_shown_for_kept_traces_in_openmetrics_only() -> None:
    metrics = Metrics()
    made = recovered(trace=Trace(0xABC, 0xDEF, 0, False))
    made.attempts[0].span_id, made.attempts[1].span_id = 0x11, 0x22
    metrics.observe(made)
    metrics.observe(healthy(trace=Trace(0x999, 0x888, 0, False)))  # not kept: never exemplified
    assert " # " not in text(metrics, OPENMETRICS).replace("# HELP", "").replace("# TYPE", "").replace("# EOF", "")
    metrics.exemplify(made, 1_700_000_000.5)
    assert "trace_id" not in text(metrics)
    exemplars = {
        (sample.name, sample.exemplar.labels["span_id"]): sample.exemplar
        for family in parse_openmetrics(text(metrics, OPENMETRICS))
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert {
        ("sidecar_request_duration_seconds_bucket", f"{0xDEF:016x}"),
        ("sidecar_upstream_attempt_duration_seconds_bucket", f"{0x11:016x}"),
        ("sidecar_upstream_attempt_duration_seconds_bucket", f"{0x22:016x}"),
    } == exemplars.keys()
    session_exemplar = exemplars["sidecar_request_duration_seconds_bucket", f"{0xDEF:016x}"]
    assert (f"{0xABC:032x}", made.ended - made.started, 1_700_000_000.5) == (
        session_exemplar.labels["trace_id"],
        session_exemplar.value,
        float(session_exemplar.timestamp),
    )
    assert not any("999" in exemplar.labels["trace_id"] for exemplar in exemplars.values())


# ---- what is asked of living objects -----------------------------------------------------------------------------


class Facts:
    """A proxy that knows everything."""

    def __init__(self, upstreams: list[live.LiveUpstream]) -> None:
        self._upstreams = upstreams
        self.letters: live.LiveDeadLetters | None = None
        self.jobs: dict[str, int] | None = None

    def upstreams(self) -> list[live.LiveUpstream]:
        return self._upstreams

    def ready(self) -> bool:
        return True

    def downstream_connections(self) -> int:
        return 7

    def memory(self) -> tuple[dict[str, int], int, int]:
        return {"bodies": 1, "answers": 2, "unwritten": 3}, 4, 5

    def label_overflows(self) -> int:
        return 2

    def dead_letters(self) -> live.LiveDeadLetters | None:
        return self.letters

    def keeps(self) -> bool | None:
        return None if self.letters is None else True

    def incomplete(self) -> bool:
        return False

    def outbox_jobs(self) -> dict[str, int] | None:
        return self.jobs


def upstream(label: str, **facts: Any) -> live.LiveUpstream:
    breakers = (
        live.LiveBreaker("a:1", "closed", 0.1, 5.0),
        live.LiveBreaker("b:1", "open", 0.9, 9.0),
    )
    given_facts = {
        "in_flight": 3,
        "active": 2,
        "idle": 1,
        "connects": {"success": 4},
        "budget_left": 0.5,
        "gate_waiting": 1,
    }
    return live.LiveUpstream(label, **{**given_facts, "breakers": breakers, **facts})


def with_live(facts: Facts) -> Metrics:
    metrics = Metrics()
    metrics.live = lambda: live.families(facts)
    return metrics


def test_breakers_are_one_hot_and_the_worst_endpoint_gives_the_ratio() -> None:
    metrics = with_live(Facts([upstream("u")]))
    states = {
        (endpoint, state): value(metrics, "breaker_state", upstream="u", endpoint=endpoint, state=state)
        for endpoint in ("a:1", "b:1")
        for state in names.BREAKER_STATES
    }
    assert 2 == sum(v for v in states.values() if v is not None)
    assert (1, 0, 1) == (states["a:1", "closed"], states["a:1", "open"], states["b:1", "open"])
    assert 0.9 == value(metrics, "breaker_failure_ratio", upstream="u")
    assert 9.0 == value(metrics, "breaker_last_transition_timestamp_seconds", upstream="u")


def test_upstreams_that_share_a_label_are_added_up() -> None:
    metrics = with_live(
        Facts([upstream("_other"), upstream("_other", in_flight=4, budget_left=0.2, tls_unverified=True)])
    )
    label = {"upstream": "_other"}
    assert 7 == value(metrics, "requests_in_flight", **label)
    assert 4 == value(metrics, "upstream_connections", **label, state="active")
    assert (8, 0) == (
        value(metrics, "upstream_connects_total", **label, result="success"),
        value(metrics, "upstream_connects_total", **label, result="failure"),
    )
    assert 0.2 == value(metrics, "retry_budget_remaining_ratio", **label)
    assert 2 == value(metrics, "rate_limit_gate_waiting", **label)
    assert 1 == value(metrics, "tls_verification_disabled", **label)


def test_what_is_not_there_is_not_shown() -> None:
    facts = Facts([live.LiveUpstream("u")])
    metrics = with_live(facts)
    shown = [key[0] for key in all_samples(metrics.registry.collect())]
    for name in (
        "dlq_entries",
        "dlq_enqueued",
        "dlq_size",
        "outbox_",
        "idempotency_",
        "retry_budget",
        "rate_limit_gate",
        "breaker_state",
        "telemetry_queue",
    ):
        assert not [sample for sample in shown if sample.startswith(f"sidecar_{name}")], name
    assert (1, 7, 2) == (
        value(metrics, "ready"),
        value(metrics, "downstream_connections"),
        value(metrics, "label_overflow_total", label="upstream"),
    )


def test_losses_of_dead_letters_are_counted_from_zero_before_there_is_a_store() -> None:
    """An alert sees an increase, and the first loss may be a store that cannot be opened."""
    metrics = Metrics()
    assert {0} == {value(metrics, "dlq_rejected_total", reason=word) for word in names.DLQ_REJECTIONS}
    assert {0} == {value(metrics, "dlq_evicted_total", reason=word) for word in names.DLQ_EVICTIONS}
    metrics.stored.dead_letter_rejected("disk_error")
    assert 1 == value(metrics, "dlq_rejected_total", reason="disk_error")


def test_dead_letters_and_the_outbox_appear_with_their_owners() -> None:
    facts = Facts([live.LiveUpstream("u")])
    facts.letters = live.LiveDeadLetters({"u": (3, 12.5), "empty": (0, None)}, 100, 1000, 5000)
    facts.jobs = {"in_progress": 2}
    metrics = with_live(facts)
    metrics.configure(["u"])
    stored = metrics.stored
    for part in ("dlq", "idempotency", "outbox"):
        stored.begin(part)
    stored.dead_lettered("u", "CONNECTION_REFUSED")
    stored.dead_letter_replayed("u", "completed")
    stored.dead_letter_rejected("full")
    stored.dead_letter_evicted("ttl")
    stored.written(0.002)
    stored.looked_up("hit")
    stored.delivered("u", "delivered")
    stored.order_violated("u")
    assert (3, 12.5, None) == (
        value(metrics, "dlq_entries", upstream="u"),
        value(metrics, "dlq_oldest_entry_timestamp_seconds", upstream="u"),
        value(metrics, "dlq_oldest_entry_timestamp_seconds", upstream="empty"),
    )
    assert (100, 1000, 5000) == tuple(value(metrics, f"dlq_{w}_bytes") for w in ("size", "capacity", "disk_free"))
    assert 1 == value(metrics, "dlq_enqueued_total", upstream="u", reason="CONNECTION_REFUSED")
    assert (1, 0) == tuple(
        value(metrics, "dlq_replayed_total", upstream="u", outcome=word) for word in ("completed", "failed")
    )
    assert (1, 0) == tuple(value(metrics, "dlq_rejected_total", reason=word) for word in ("full", "too_large"))
    assert (1, 0) == tuple(value(metrics, "dlq_evicted_total", reason=word) for word in ("ttl", "corrupt"))
    assert 1 == value(metrics, "dlq_write_duration_seconds_count")
    assert (1, 0) == tuple(value(metrics, "idempotency_lookups_total", result=word) for word in ("hit", "conflict"))
    assert 1 == value(metrics, "outbox_deliveries_total", upstream="u", outcome="delivered")
    assert 1 == value(metrics, "outbox_order_violations_total", upstream="u")
    assert 0 == value(metrics, "dlq_escalated_total", upstream="u")
    stored.dead_letter_escalated("u")
    assert 1 == value(metrics, "dlq_escalated_total", upstream="u")
    assert 2 == value(metrics, "outbox_jobs", state="in_progress")


# ---- beside sessions ---------------------------------------------------------------------------------------------


def test_what_is_not_part_of_a_session_is_counted_where_it_happens() -> None:
    metrics = Metrics()
    metrics.malformed("target")
    metrics.denied("auth")
    metrics.internal_error("exchange")
    metrics.internal_error("loop")
    metrics.loop_lag(-0.1)
    metrics.loop_lag(0.2)
    metrics.connection_wait("u", 0.003)
    metrics.breaker_moved("u", "a:1", "closed", "open")
    metrics.breaker_would_open("u")
    metrics.tls_client_errors["unknown_ca"] += 1
    metrics.demotions["u"] += 1
    metrics.configure(["u"])
    assert 1 == value(metrics, "malformed_requests_total", reason="target")
    assert 1 == value(metrics, "denied_total", reason="auth")
    assert (1, 1, 0) == tuple(
        value(metrics, "internal_errors_total", component=word) for word in ("exchange", "loop", "reload")
    )
    assert (2, 0.2) == (value(metrics, "event_loop_lag_seconds_count"), value(metrics, "event_loop_lag_seconds_sum"))
    assert 1 == value(metrics, "upstream_connection_wait_seconds_count", upstream="u")
    moved = {"upstream": "u", "endpoint": "a:1", "from_state": "closed", "to_state": "open"}
    assert 1 == value(metrics, "breaker_transitions_total", **moved)
    assert 1 == value(metrics, "breaker_would_open_total", upstream="u")
    assert 1 == value(metrics, "tls_client_errors_total", reason="unknown_ca")
    assert 1 == value(metrics, "interception_demotions_total", upstream="u")


def test_reloads_say_whether_the_configuration_in_use_is_the_one_on_disk() -> None:
    metrics = Metrics()
    assert None is value(metrics, "config_last_reload_success_timestamp_seconds")
    metrics.config_read(10.0)
    assert (0, 1, 10.0) == (
        value(metrics, "config_reloads_total", result="success"),
        value(metrics, "config_last_reload_successful"),
        value(metrics, "config_last_reload_success_timestamp_seconds"),
    )
    metrics.config_reloaded(False, 20.0)
    assert (1, 0, 10.0) == (
        value(metrics, "config_reloads_total", result="failure"),
        value(metrics, "config_last_reload_successful"),
        value(metrics, "config_last_reload_success_timestamp_seconds"),
    )
    metrics.config_reloaded(True, 30.0)
    assert (1, 30.0) == (
        value(metrics, "config_last_reload_successful"),
        value(metrics, "config_last_reload_success_timestamp_seconds"),
    )


def test_a_first_move_of_a_known_breaker_is_an_increase_from_zero() -> None:
    metrics = with_live(Facts([upstream("u")]))
    for from_state, to_state in names.BREAKER_MOVES:
        labels = {"upstream": "u", "endpoint": "a:1", "from_state": from_state, "to_state": to_state}
        assert 0 == value(metrics, "breaker_transitions_total", **labels)


def test_every_component_that_can_fail_is_at_0_before_it_does_and_no_other_is() -> None:
    """Else its first fault would be no increase, and an alert would never see it."""
    top = Path(__file__).parent.parent
    named: set[str] = set()
    for path in (*top.glob("sidecar/**/*.py"), *top.glob("telemetry/*.py")):
        named |= set(re.findall(r'(?:internal_error|_fault_elsewhere)[(,]\s*"(\w+)"', path.read_text(encoding="utf-8")))
    assert set(names.COMPONENTS) == named
