"""The facade: one finished record, every signal the same story; and what it costs when there is nothing to tell."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from config.telemetry import Telemetry
from telemetry.logs import Log
from telemetry.record import OUTCOMES, Session, Trace
from telemetry.sessions import Wanted
from telemetry.signals import Signals
from tests.doubles.otlp import attributes, http_collector
from tests.doubles.records import ARRIVED, attempt, exhausted, healthy, lived, recovered, retry, session, stop, wall

ROOT = Path(__file__).resolve().parent.parent
T = "TEMPORARY_UNAVAILABLE"

Make = Callable[..., "Watched"]


class Watched(Signals):
    """Signals with a clock that is told, and everything they say at hand."""

    now = ARRIVED
    stream: io.StringIO
    folder: Path

    def said(self) -> list[dict[str, Any]]:
        self.writer.flush()
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def error_records(self) -> list[dict[str, Any]]:
        self.writer.flush()
        files = sorted((self.folder / "logs").rglob("errors.jsonl"))
        return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"sidecar_{name}", labels)


@pytest.fixture
def make_signals(tmp_path: Path) -> Iterator[Make]:
    made: list[Watched] = []

    def make(environ: dict[str, str] | None = None, redact_paths: tuple[str, ...] = (), **settings: Any) -> Watched:
        stream = io.StringIO()
        signals = Watched(
            Telemetry.model_validate({"redact_paths": redact_paths, **settings}),
            environ=environ or {},
            monotonic=lambda: Watched.now,
            wall=wall,
            ids=random.Random(5).getrandbits,
            log=Log(stream),
            state_dir=tmp_path,
            upstreams=["payments"],
            subsystems={"payments": "billing"},
            version="1.2.3",
            server_id="sidecar-1",
        )
        signals.stream, signals.folder = stream, tmp_path
        made.append(signals)
        return signals

    yield make
    for signals in made:
        signals.close(1)


# ---- one exchange, one story -------------------------------------------------------------------------------------


def one_of(outcome: str) -> Session:
    """A typical session of each outcome."""
    stories: dict[str, Session] = {
        "first_try": healthy(took=2.0),
        "recovered": recovered(),
        "deduplicated": session("deduplicated", status=200, extra=2.0),
        "queued": session("queued", status=202),
        "tunnelled": session(
            "tunnelled", attempt(), method="CONNECT", target="a.test:443", status=200, code="CONNECTION_RESET"
        ),
        "rejected": session("rejected", attempt(status=404, code="NOT_FOUND", decision=stop("fatal"))),
        "denied": session("denied", status=403, code="EGRESS_DENIED"),
        "cancelled": session("cancelled", attempt(status=503, code=T, decision=retry(T, 1)), status=0),
        "exhausted": exhausted(),
        "not_retryable": session(
            "not_retryable", attempt(status=503, code=T), method="POST", suppressed="not_resendable"
        ),
        "budget": session("budget", attempt(status=503, code=T, decision=stop("budget")), suppressed="budget"),
        "deadline": session("deadline", attempt(status=503, code=T, decision=stop("deadline")), suppressed="deadline"),
        "breaker_open": session("breaker_open", status=503, code="CIRCUIT_OPEN"),
        "failed_streaming": session("failed_streaming", attempt(status=200, code="CONNECTION_RESET")),
        "internal": session("internal", status=500, code="SIDECAR_INTERNAL"),
    }
    return stories[outcome]


@pytest.mark.parametrize("outcome", sorted(OUTCOMES))
def test_metrics_spans_session_events_log_and_error_records_tell_the_same_story(
    make_signals: Make, outcome: str
) -> None:
    with http_collector() as (url, received):
        signals = make_signals(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": url,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_BSP_SCHEDULE_DELAY": "10",
            }
        )
        made = one_of(outcome)
        made.trace = signals.begin(None, None, "participate")
        for each in made.attempts:
            signals.traces.header(made.trace, each)
        signals.observe(made)
        count = 1 if made.method == "CONNECT" else 1 + len(made.attempts)
        received.until(lambda: len(received.spans) == count)
        root, *clients = received.spans

        assert 1 == signals.value("sessions_total", upstream="payments", outcome=outcome)
        kept = signals.show(signals.sessions.page(Wanted(outcome=outcome)).items[0], explained=True)
        (line,) = (line for line in signals.said() if line["event_name"] == "sidecar.session.completed")
        shown = attributes(root)
        assert {outcome} == {kept["outcome"], line["sidecar.session.outcome"], shown["sidecar.session.outcome"]}
        session_id = made.session_id.decode()
        assert {session_id} == {kept["session_id"], line["sidecar.session.id"], shown["sidecar.session.id"]}
        assert {root.trace_id.hex()} == {kept["trace_id"], line["trace_id"]}
        assert root.span_id.hex() == line["span_id"]
        assert len(made.attempts) == kept["total_attempts"] == line["sidecar.session.attempts"]

        failed = [each.code for each in made.attempts if each.code is not None]
        assert failed == [
            record["error_type"] for record in sorted(signals.error_records(), key=lambda r: r["retry_count"])
        ]
        assert failed == [try_["error_type"] for try_ in line["attempts"] if "error_type" in try_]
        assert failed == [try_["error"]["type"] for try_ in kept["attempts"] if try_["error"] is not None]
        assert [code for code in failed if made.method != "CONNECT"] == [
            found for span in clients if (found := attributes(span).get("error.type")) is not None
        ]
        told = [event.type for event in signals.events.recent()]
        assert (outcome == "recovered") == ("retry_success" in told)
        assert {event.session.session_id for event in signals.events.recent() if event.session} <= {made.session_id}
        assert kept["explanation"] and kept["summary"] == line["body"]


def test_a_healthy_session_is_only_counted(make_signals: Make) -> None:
    signals = make_signals(healthy_sample=0)
    for _ in range(100):
        signals.observe(healthy())
    assert 100 == signals.value("sessions_total", upstream="payments", outcome="first_try")
    assert 100 == signals.aggregates.retry_metrics(60, ARRIVED + 1)["by_subsystem"]["billing"]["sessions"]
    assert ([], [], [], 0) == (
        signals.said(),
        signals.error_records(),
        signals.events.recent(),
        len(signals.sessions.page().items),
    )


def test_one_in_so_many_healthy_sessions_is_shown(make_signals: Make) -> None:
    signals = make_signals(healthy_sample=10)
    for number in range(35):
        signals.observe(healthy(session_id=b"%02d" % number))
    assert ["29", "19", "09"] == [
        made.session_id.decode() for made in signals.sessions.page(Wanted(outcome="first_try")).items
    ]
    assert [] == signals.said()


def test_details_are_filled_in_only_for_sessions_that_are_kept(make_signals: Make) -> None:
    signals = make_signals(healthy_sample=0)
    filled: list[Session] = []
    for made in (healthy(), recovered(), healthy(took=5)):
        signals.observe(made, lambda made=made: filled.append(made))  # type: ignore[misc]
    assert ["recovered", "first_try"] == [made.outcome for made in filled]


def test_the_access_log_has_every_request_and_the_others_once(make_signals: Make) -> None:
    signals = make_signals(log={"access": True})
    for _ in range(300):
        signals.observe(healthy())
    signals.observe(recovered())
    lines = signals.said()
    assert 300 == sum(line["event_name"] == "sidecar.access" for line in lines)
    assert 1 == sum(line["event_name"] == "sidecar.session.completed" for line in lines)


def test_error_records_are_limited_in_rate_and_what_is_left_out_is_counted(make_signals: Make) -> None:
    signals = make_signals()
    for _ in range(700):
        signals.observe(exhausted())
    assert 1000 == len(signals.error_records()), "500 sessions of two attempts"
    suppressed = signals.value("log_records_suppressed_total", level="error")
    assert suppressed is not None and suppressed >= 200


def test_a_fault_in_telemetry_is_counted_and_told_and_the_request_does_not_see_it(make_signals: Make) -> None:
    signals = make_signals()
    signals.observe(session("no_such_outcome"))
    made = recovered()
    made.suppressed = "no_such_reason"
    signals.observe(made)

    def complete() -> None:
        raise ValueError("in the exchange's own callback")

    signals.observe(recovered(), complete)
    assert 3 == signals.value("internal_errors_total", component="telemetry")
    assert {"sidecar.internal_error"} == {line["event_name"] for line in signals.said()}


def test_a_record_that_cannot_be_written_is_told(make_signals: Make) -> None:
    signals = make_signals()
    made = exhausted()
    made.attempts[0].phase = 99  # no such word
    signals.observe(made)
    assert "a record could not be written" in json.dumps(signals.said())
    assert 2 == signals.value("internal_errors_total", component="telemetry"), "of the error, and of the session"


# ---- state changes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to_state", "event", "level"),
    [
        ("open", "circuit_breaker_opened", "WARN"),
        ("half_open", "circuit_breaker_half_open", "INFO"),
        ("closed", "circuit_breaker_closed", "INFO"),
    ],
)
def test_a_breaker_that_moves_is_counted_told_and_logged(
    make_signals: Make, to_state: str, event: str, level: str
) -> None:
    signals = make_signals()
    signals.breaker_changed("payments", "a.test:443", "closed", to_state, "5 failures in a row")
    labels = {"upstream": "payments", "endpoint": "a.test:443", "from_state": "closed", "to_state": to_state}
    assert 1 == signals.value("breaker_transitions_total", **labels)
    assert [event] == [told.type for told in signals.events.recent()]
    (line,) = signals.said()
    assert (level, "sidecar.breaker.transition", "payments", to_state, "5 failures in a row") == tuple(
        line[name] for name in ("severity_text", "event_name", "sidecar.upstream", "to_state", "why")
    )


def test_monitor_only_is_counted_and_logged_but_no_breaker_event(make_signals: Make) -> None:
    signals = make_signals()
    signals.breaker_would_open("payments", "a.test:443", "ratio 0.9")
    assert 1 == signals.value("breaker_would_open_total", upstream="payments")
    assert [] == signals.events.recent()
    assert "monitor_only" in signals.said()[0]["body"]


def test_a_reload_that_worked_and_one_that_did_not(make_signals: Make) -> None:
    signals = make_signals()
    signals.config_changed(True, "upstreams.payments.policy: default → careful", diff=["policy"])
    signals.config_changed(False, "sidecar.yaml:3: unknown key")
    assert (1, 1, 0) == (
        signals.value("config_reloads_total", result="success"),
        signals.value("config_reloads_total", result="failure"),
        signals.value("config_last_reload_successful"),
    )
    assert ["config_changed", "config_changed"] == [told.type for told in signals.events.recent()]
    assert [("INFO", True), ("ERROR", False)] == [(line["severity_text"], line["ok"]) for line in signals.said()]


def test_dead_letters_replays_and_escalations_are_told_with_their_ids(make_signals: Make) -> None:
    signals = make_signals()
    made = exhausted(trace=Trace(0xAB, 0xCD, 0, True))
    signals.dead_lettered("payments", "dlq_1", "CONNECTION_REFUSED", made)
    signals.replayed("payments", "dlq_1", "failed")
    signals.replayed("payments", "dlq_1", "completed")
    signals.escalated("payments", "dlq_1", "INVALID_API_KEY")
    assert ["dead_lettered", "replayed", "replayed", "escalated"] == [t.type for t in signals.events.recent()[::-1]]
    assert not signals.metrics.stored.enqueued, "the store counts, once"
    lines = signals.said()
    assert ["WARN", "WARN", "INFO", "ERROR"] == [line["severity_text"] for line in lines]
    assert ["sidecar.dlq.enqueued", "sidecar.dlq.replayed", "sidecar.dlq.replayed", "sidecar.dlq.escalated"] == [
        line["event_name"] for line in lines
    ]
    assert {"dlq_1"} == {line["dlq_id"] for line in lines}
    assert f"{0xAB:032x}" == lines[0]["trace_id"]


def test_an_internal_error_is_counted_with_its_component(make_signals: Make) -> None:
    signals = make_signals()
    signals.internal_error("exchange", "an exchange failed", ValueError("x"), session_id="s")
    assert 1 == signals.value("internal_errors_total", component="exchange")
    assert "s" == signals.said()[0]["session_id"]


def test_a_state_change_that_cannot_be_told_raises_nothing(make_signals: Make) -> None:
    signals = make_signals()
    signals.events.state_changed = None  # type: ignore[assignment,method-assign]  # something broken in here
    signals.config_changed(True, "x")
    assert 1 == signals.value("internal_errors_total", component="telemetry")


# ---- upkeep ------------------------------------------------------------------------------------------------------


def test_the_event_file_gets_every_event_as_a_line(make_signals: Make, tmp_path: Path) -> None:
    path = tmp_path / "events" / "events.jsonl"
    signals = make_signals(events={"file": str(path)})
    signals.observe(lived(signals, recovered()))
    signals.breaker_changed("payments", "a.test:443", "closed", "open")
    signals.writer.flush()
    signals.writer.flush()
    types = [json.loads(line)["event_type"] for line in path.read_bytes().splitlines()]
    assert ["retry_attempt", "retry_success", "circuit_breaker_opened"] == types


def test_an_event_file_that_cannot_be_written_is_told_once(make_signals: Make, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("")
    signals = make_signals(events={"file": str(tmp_path / "blocked" / "events.jsonl")})
    for _ in range(5):
        signals.breaker_changed("payments", "a.test:443", "closed", "open")
    refused = [line for line in signals.said() if "cannot be written" in line["body"]]
    assert 1 == len(refused)


def test_a_tick_lets_old_sessions_go(make_signals: Make, tmp_path: Path) -> None:
    signals = make_signals(sessions_ttl=100, events={"file": str(tmp_path / "e.jsonl")})
    signals.observe(recovered())
    signals.tick(ARRIVED + 61)
    assert 1 == len(signals.sessions)
    signals.tick(ARRIVED + 200)
    assert 0 == len(signals.sessions)


def test_a_reload_changes_what_is_slow_how_it_is_logged_and_which_upstreams_are_shown(make_signals: Make) -> None:
    signals = make_signals()
    signals.observe(healthy(took=2.0))
    signals.configure(
        Telemetry.model_validate({"slow_threshold": 5, "log": {"level": "error"}}), ["new"], {"payments": "other"}
    )
    signals.observe(healthy(took=2.0))
    signals.observe(recovered())
    assert 1 == len(signals.sessions.page(Wanted(outcome="first_try")).items)
    assert 1 == len(signals.said())
    assert 0 == signals.value("sessions_total", upstream="new", outcome="recovered")
    assert {"other"} == set(signals.aggregates.retry_metrics(60, ARRIVED + 3)["by_subsystem"])


def test_the_end_writes_what_is_queued_and_lets_readers_go(make_signals: Make) -> None:
    signals = make_signals()
    signals.observe(exhausted())
    signals.close()
    assert 1 == len(signals.stream.getvalue().splitlines())
    assert list((signals.folder / "logs").rglob("errors.jsonl"))


def test_without_a_state_directory_there_are_no_error_records(tmp_path: Path) -> None:
    signals = Signals(
        Telemetry(), environ={}, monotonic=lambda: ARRIVED, wall=wall, ids=lambda bits: 1, log=Log(io.StringIO())
    )
    signals.observe(exhausted())
    signals.tick(ARRIVED + 61)
    signals.close()
    assert [] == list(tmp_path.iterdir())


# ---- what nobody without a collector should pay for --------------------------------------------------------------


def imported(environ: dict[str, str]) -> set[str]:
    program = f"""
import sys
from config.telemetry import Telemetry
from telemetry.signals import Signals
Signals(Telemetry(), environ={environ!r}, monotonic=lambda: 0.0, wall=lambda m: m, ids=lambda bits: 1)
print(" ".join(sorted({{name.split(".")[0] for name in sys.modules}})))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_without_an_exporter_neither_the_sdk_nor_grpc_nor_requests_is_loaded() -> None:
    assert set() == {"opentelemetry", "grpc", "requests", "google"} & imported({})


def test_over_http_grpc_is_not_loaded() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    loaded = imported(environ)
    assert {"opentelemetry", "requests"} <= loaded
    assert "grpc" not in loaded


def test_what_was_left_out_is_told_after_a_minute_with_what_the_disk_refused(
    make_signals: Make, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    signals = make_signals(events={"file": str(tmp_path / "file" / "events.jsonl")})
    for _ in range(700):
        signals.observe(exhausted())
    signals.writer.flush()
    signals.tick(ARRIVED + 59)
    assert not [line for line in signals.said() if line["event_name"] == "sidecar.log.suppressed"]
    signals.tick(ARRIVED + 61)
    (told,) = (line for line in signals.said() if line["event_name"] == "sidecar.log.suppressed")
    for each in ("600 × sidecar.session.completed (error)", "200 × error record (error)"):
        assert each in told["body"]
    assert "700 × event in telemetry.events.file (info)" in told["body"]
    assert 700 == signals.value("log_records_suppressed_total", level="info")
    signals.tick(ARRIVED + 122)
    assert 1 == sum(line["event_name"] == "sidecar.log.suppressed" for line in signals.said())


def test_the_line_about_a_bad_variable_has_the_format_that_was_asked_for(make_signals: Make) -> None:
    signals = make_signals(
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_SAMPLER": "sometimes"},
        log={"format": "text"},
    )
    signals.writer.flush()
    assert " ERROR sidecar.telemetry: OTEL_TRACES_SAMPLER must be " in signals.stream.getvalue()


def test_a_slow_session_is_explained_with_the_threshold_that_kept_it(make_signals: Make) -> None:
    signals = make_signals()
    signals.observe(healthy(took=1.5))
    (kept,) = signals.sessions.page().items
    assert "telemetry.slow_threshold: 1" == signals.show(kept, explained=True)["explanation"][-1]["rule"]
    assert "decided by: telemetry.slow_threshold: 1\n" in signals.explain(kept)
