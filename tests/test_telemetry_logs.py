"""Log lines: three formats, one rate, a thread that drops rather than blocks."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from telemetry import log_lines, logs
from telemetry.logs import Log
from telemetry.rates import TokenBuckets
from telemetry.record import Trace
from telemetry.redact import Redactor
from telemetry.timestamps import rfc3339
from telemetry.writer import Writer
from tests.doubles.records import attempt, exhausted, healthy, recovered, session

AT = 1_700_000_000.1236


def a_log(form: str = "json", level: str = "info", stream: Any = None) -> tuple[Log, io.StringIO]:
    stream = stream or io.StringIO()
    return Log(stream, form=form, level=level, wall=lambda: AT), stream


def said(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


# ---- formats -----------------------------------------------------------------------------------------------------


def test_json_has_the_fields_of_the_log_model() -> None:
    log, stream = a_log()
    log.warn("sidecar.tls.unverified", "certificates are not verified", upstream="u")
    assert [
        {
            "timestamp": "2023-11-14T22:13:20.124Z",
            "severity_text": "WARN",
            "severity_number": 13,
            "event_name": "sidecar.tls.unverified",
            "body": "certificates are not verified",
            "upstream": "u",
        }
    ] == said(stream)


def test_ecs_has_elastics_names() -> None:
    log, stream = a_log("ecs")
    fields = {"body": "b", "trace_id": "t", "span_id": "s", "http.request.method": "GET"}
    log.event("error", "sidecar.session.completed", "u", 0.0, lambda: fields)
    assert [
        {
            "@timestamp": "2023-11-14T22:13:20.124Z",
            "log.level": "error",
            "event.severity": 17,
            "event.action": "sidecar.session.completed",
            "message": "b",
            "trace.id": "t",
            "span.id": "s",
            "http.request.method": "GET",
            "ecs.version": "8.11.0",
        }
    ] == said(stream)


def test_text_is_one_line_for_people_whatever_a_peer_sent() -> None:
    log, stream = a_log("text")
    log.info(
        "sidecar.started", "listening\n\x1b[31mred", listen="127.0.0.1:1", note="two words", none=None, many=[1, 2]
    )
    assert (
        "2023-11-14T22:13:20.124Z INFO  sidecar.started: listening\\n\\x1b[31mred  "
        'listen=127.0.0.1:1 note="two words" many=[1,2]\n'
    ) == stream.getvalue()


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", 4), ("info", 3), ("warn", 2), ("error", 1)],
)
def test_lines_below_the_level_are_not_written(level: str, shown: int) -> None:
    log, stream = a_log(level=level)
    for write in (log.debug, log.info, log.warn, log.error):
        write("e", "b")
    assert shown == len(said(stream))
    log.event("debug", "e", "u", 0.0, lambda: {"body": "b"})
    assert shown + (level == "debug") == len(said(stream))
    assert (level == "debug") == log.debugging


def test_the_format_and_level_can_be_changed_while_it_runs() -> None:
    log, stream = a_log()
    log.configure("text", "error")
    log.warn("e", "not this")
    log.error("e", "but this")
    assert "but this" in stream.getvalue() and "not this" not in stream.getvalue()


def test_an_exception_brings_its_frames() -> None:
    log, stream = a_log()
    try:
        {}["x"]
    except KeyError as error:
        log.exception("it broke", error, session_id="s1")
    (line,) = said(stream)
    assert ("sidecar.internal_error", "it broke", "KeyError('x')", "s1") == tuple(
        line[name] for name in ("event_name", "body", "exception", "session_id")
    )
    assert "test_telemetry_logs.py" in line["frames"]


def test_what_an_exception_was_about_is_hidden_at_every_level() -> None:
    log, stream = a_log()
    url = "http://user:hunter2@a.test/x?token=hunter2"
    try:
        raise ValueError(f"cannot read {url}")
    except ValueError as error:
        log.exception(f"it broke at {url}", error, target=url)
    assert "hunter2" not in stream.getvalue()
    (line,) = said(stream)
    assert "ValueError('cannot read http://REDACTED:REDACTED@a.test/x?token=REDACTED')" in line["exception"]
    assert "test_telemetry_logs.py" in line["frames"]


def test_frames_longer_than_a_message_may_be_are_whole() -> None:
    log, stream = a_log()

    def deeper(left: int) -> None:
        if left:
            deeper_still(left - 1)
        raise KeyError("the end")

    def deeper_still(left: int) -> None:
        deeper(left)

    try:
        deeper(60)
    except KeyError as error:
        log.exception("it broke", error)
    (line,) = said(stream)
    assert line["frames"].endswith("KeyError: 'the end'\n")
    assert len(line["frames"]) > 4_000


def test_once_a_minute_one_line_says_what_was_left_out_and_only_if_something_was() -> None:
    log, stream = a_log()
    log.tell_left_out()
    assert "" == stream.getvalue()
    for _ in range(103):
        log.event("error", "sidecar.session.completed", "u", 0.0, lambda: {"body": "b"})
    log.leave_out("error record", "error", 2)
    log.tell_left_out()
    told = said(stream)[-1]
    assert ("sidecar.log.suppressed", "WARN") == (told["event_name"], told["severity_text"])
    assert told["body"].startswith(
        "5 lines were left out: 3 × sidecar.session.completed (error), 2 × error record (error); "
    )
    log.tell_left_out()
    assert told == said(stream)[-1] and 101 == len(said(stream))


def test_what_was_left_out_is_told_when_it_can_be() -> None:
    log, stream = a_log()
    full = Writer(capacity=0)
    log.attach(full, {})
    log.info("sidecar.config.valid", "cannot be told")
    log.tell_left_out()
    log.attach(writer := Writer(), {})
    log.tell_left_out()
    writer.close()
    (told,) = said(stream)
    assert "1 × sidecar.config.valid (info)" in told["body"]


def test_a_stream_that_is_gone_and_a_field_that_cannot_be_written_raise_nothing() -> None:
    closed = io.StringIO()
    closed.close()
    a_log(stream=closed)[0].info("e", "b")
    log, stream = a_log()
    log.info("e", "b", odd=object())
    log.info("e", "b", lonely="\ud800")
    assert "object" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1970-01-01T00:00:00.000Z"), (1.9996, "1970-01-01T00:00:02.000Z"), (59.9999, "1970-01-01T00:01:00.000Z")],
)
def test_timestamps_carry_when_they_round_up(seconds: float, text: str) -> None:
    assert text == rfc3339(seconds)


# ---- rate --------------------------------------------------------------------------------------------------------


def test_a_flood_of_one_kind_is_cut_and_counted_and_does_not_silence_others() -> None:
    log, stream = a_log()
    for _ in range(500):
        log.event("warn", "sidecar.session.completed", "noisy", 0.0, lambda: {"body": "b"})
    log.event("error", "sidecar.session.completed", "quiet", 0.0, lambda: {"body": "b"})
    assert 101 == len(said(stream))
    assert 400 == log.suppressed["warn"]
    log.event("warn", "sidecar.session.completed", "noisy", 1.0, lambda: {"body": "b"})
    assert 102 == len(said(stream))


def test_the_access_log_is_not_cut() -> None:
    log, stream = a_log()
    for _ in range(500):
        log.event("info", "sidecar.access", "u", 0.0, lambda: {"body": "b"}, limited=False)
    assert 500 == len(said(stream))


def test_a_flood_of_exceptions_is_cut_too() -> None:
    log, stream = a_log()
    for _ in range(300):
        log.exception("it broke", ValueError("x"))
    assert (100, 200) == (len(said(stream)), log.suppressed["error"])


def test_buckets_fill_with_time_and_are_bounded_in_number() -> None:
    buckets = TokenBuckets(2.0, 2.0)
    assert [True, True, False] == [buckets.take("k", 0.0) for _ in range(3)]
    assert [True, False] == [buckets.take("k", 0.5) for _ in range(2)]
    assert [True, True, False] == [buckets.take("k", 100.0) for _ in range(3)]
    for number in range(5_000):
        buckets.take(number, 100.0)
    assert len(buckets._buckets) <= 1_000


# ---- the thread --------------------------------------------------------------------------------------------------


class Stuck(io.StringIO):
    """A pipe nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        self.released.wait(30)
        return super().write(text)


def test_a_pipe_nobody_reads_costs_lines_and_blocks_nobody() -> None:
    stuck = Stuck()
    log, _ = a_log(stream=stuck)
    writer = Writer(capacity=10)
    counted = {"info": 0, "warn": 0, "error": 0}
    log.attach(writer, counted)
    for number in range(100):
        log.event("warn", "e", f"u{number}", 0.0, lambda: {"body": "b"})
    assert 89 <= counted["warn"] <= 90, "ten wait, one is being written"
    log.exception("it broke", ValueError())
    assert 1 == counted["error"], "not even our own faults are waited for"
    log.info("sidecar.config.valid", "the file is valid")
    assert 1 == counted["info"], "nor what an operator asked for"
    stuck.released.set()
    writer.close()
    assert 100 == counted["warn"] + len(stuck.getvalue().splitlines())


def test_lines_are_written_in_the_thread_while_there_is_one_in_the_order_they_were_said() -> None:
    log, stream = a_log()
    writer = Writer()
    log.attach(writer, {})
    where: list[str] = []

    def fields() -> dict[str, Any]:
        where.append(threading.current_thread().name)
        return {"body": "b"}

    log.event("info", "e", "u", 0.0, fields)
    log.info("sidecar.started", "now")
    log.exception("it broke", ValueError())
    log.detach()
    assert ["telemetry-writer"] == where
    assert ["e", "sidecar.started", "sidecar.internal_error"] == [line["event_name"] for line in said(stream)]
    writer.close()
    log.event("info", "e", "u", 0.0, fields)
    log.exception("it broke", ValueError())
    assert 5 == len(said(stream)), "after the end of the thread everything is written at once again"


def test_a_last_line_that_nobody_reads_is_given_up_and_the_next_one_not_even_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "_PATIENCE", 0.05)
    stuck = Stuck()
    log, _ = a_log(stream=stuck)
    writer = Writer()
    counted = {"info": 0}
    log.attach(writer, counted)
    log.info("sidecar.draining", "waits in the thread")
    log.detach()
    log.info("sidecar.stopped", "given up")
    log.info("sidecar.stopped", "not tried")
    assert 2 == counted["info"]
    assert 1 == sum(thread.name == "last-line" for thread in threading.enumerate())
    stuck.released.set()
    writer.close()


def test_a_full_pipe_that_does_not_block_costs_the_line() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(writing, "w") as stream:
        log = Log(stream)
        for _ in range(100):
            log.info("e", "x" * 4_000)
        assert 100_000 > len(os.read(reading, 1_000_000)) > 4_000
    os.close(reading)


def test_a_job_that_fails_takes_no_other_with_it() -> None:
    failed: list[Exception] = []
    done: list[int] = []
    writer = Writer(failed=failed.append)

    def fail() -> None:
        raise ValueError("this one")

    writer.put(fail)
    writer.put(done.append, 1)
    writer.close()
    assert ([1], ["this one"]) == (done, [str(error) for error in failed])
    silent = Writer()
    silent.put(fail)
    silent.put(done.append, 2)
    silent.close()
    assert [1, 2] == done


def test_what_was_written_is_flushed_after_a_burst_and_at_the_end() -> None:
    order: list[str] = []
    writer = Writer()
    writer.flushers.append(lambda: order.append("flush"))
    hold = threading.Event()
    writer.put(lambda: hold.wait(5) and None)
    for _ in range(3):
        writer.put(order.append, "job")
    hold.set()
    writer.close()
    assert ["job", "job", "job"] == order[:3]
    assert {"flush"} == set(order[3:])


def test_an_idle_writer_has_no_thread_and_a_closed_one_takes_nothing() -> None:
    writer = Writer()
    assert writer.flush()
    writer.close()
    assert not writer.put(print, "never")
    assert 1 == writer.dropped
    assert not any(thread.name == "telemetry-writer" and thread.is_alive() for thread in threading.enumerate())


def test_a_writer_that_has_ended_has_nothing_to_flush() -> None:
    writer = Writer()
    done: list[int] = []
    writer.put(done.append, 1)
    writer.close()
    assert writer.flush(0.01)
    assert [1] == done


def test_only_one_thread_is_started_whoever_is_first() -> None:
    writer = Writer()
    jobs: list[Callable[[], None]] = []
    writer.put(jobs.append, print)
    before = writer._thread
    writer._start()
    assert before is writer._thread
    writer.close()


# ---- a session in a line -----------------------------------------------------------------------------------------


def test_a_session_is_told_with_all_its_tries() -> None:
    made = recovered(
        operation="create_charge",
        host="api.test:80",
        client="127.0.0.1",
        target="http://api.test/v1/x?token=abc",
        trace=Trace(0xAB, 0xCD, 0, True),
    )
    assert {
        "body": "GET to payments create_charge recovered after 2 attempts, 401 ms (200)",
        "trace_id": f"{0xAB:032x}",
        "span_id": f"{0xCD:016x}",
        "trace_flags": "01",
        "sidecar.session.id": "5e55107100000001",
        "sidecar.session.outcome": "recovered",
        "sidecar.session.attempts": 2,
        "sidecar.upstream": "payments",
        "sidecar.operation": "create_charge",
        "sidecar.policy": "default",
        "http.request.method": "GET",
        "url.path": "/v1/x",
        "url.query": "token=REDACTED",
        "server.address": "api.test",
        "server.port": 80,
        "client.address": "127.0.0.1",
        "http.response.status_code": 200,
        "duration_s": 0.401,
        "attempts": [
            {
                "n": 1,
                "endpoint": "a.test:443",
                "status": 503,
                "error_type": "TEMPORARY_UNAVAILABLE",
                "duration_s": 0.1,
                "backoff_s": 0.0,
            },
            {"n": 2, "endpoint": "a.test:443", "status": 200, "duration_s": 0.1, "backoff_s": 0.2},
        ],
    } == log_lines.session_fields(made, Redactor())


def test_a_failure_says_its_code_its_message_and_why_it_was_not_retried() -> None:
    shown = log_lines.session_fields(exhausted(dlq_id="dlq_1"), Redactor())
    assert ("CONNECTION_REFUSED", "nothing listens on a.test:443", "attempts", "dlq_1") == tuple(
        shown[name] for name in ("error.type", "error.message", "sidecar.retry.suppressed", "sidecar.dlq.id")
    )


def test_an_app_that_got_no_answer_has_no_status_in_its_line() -> None:
    fields = log_lines.session_fields(session("cancelled", attempt(code="CLIENT_DISCONNECTED")), Redactor())
    assert "http.response.status_code" not in fields


@pytest.mark.parametrize(
    ("made", "level"),
    [
        (exhausted(), "error"),
        (session("internal", status=500), "error"),
        (recovered(), "warn"),
        (healthy(took=5), "warn"),
        (session("rejected", attempt(status=404)), "info"),
        (session("cancelled"), "info"),
        (session("queued", status=202), "info"),
    ],
)
def test_how_loudly_a_session_is_told(made: Any, level: str) -> None:
    assert level == log_lines.level_of(made)
