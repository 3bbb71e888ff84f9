"""Which sessions are kept, how they are found again, and S1's shape of one."""

from __future__ import annotations

from typing import Any

import pytest

from telemetry.record import OUTCOMES, PARTLY_SENT, Trace
from telemetry.redact import Redactor
from telemetry.sessions import Sessions, Wanted, attempt_outcome, correlation_id, is_interesting, serialise
from tests.doubles.records import ARRIVED, attempt, exhausted, healthy, recovered, retry, session, wall

R = Redactor()


# ---- interesting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", sorted(OUTCOMES))
def test_everything_but_healthy_sessions_is_interesting(outcome: str) -> None:
    made = session(outcome, attempt(status=200))
    assert (outcome not in {"first_try", "deduplicated", "tunnelled"}) == is_interesting(made, 1.0)


def test_a_slow_one_is_interesting_and_a_long_tunnel_is_not() -> None:
    assert is_interesting(healthy(took=1.5), 1.0)
    assert not is_interesting(healthy(took=1.5), 2.0)
    assert not is_interesting(session("tunnelled", attempt(), extra=3600), 1.0)
    assert is_interesting(session("tunnelled", attempt(), code="CONNECTION_RESET"), 1.0)


# ---- the ring ----------------------------------------------------------------------------------------------------


def ring(count: int = 0, capacity: int = 100, ttl: float = 3600.0) -> Sessions:
    kept = Sessions(capacity, ttl, wall)
    for number in range(count):
        kept.keep(exhausted(session_id=b"s%03d" % number, at=ARRIVED + number))
    return kept


def ids(page: Any) -> list[str]:
    return [made.session_id.decode() for made in page.items]


def test_the_newest_comes_first_and_the_oldest_goes() -> None:
    kept = ring(5, capacity=3)
    assert ["s004", "s003", "s002"] == ids(kept.page())
    assert 3 == len(kept)
    assert None is kept.find("s000")
    found = kept.find("s003")
    assert found is not None
    assert b"s003" == found.session_id


def test_pages_do_not_move_when_new_sessions_arrive() -> None:
    kept = ring(10)
    first = kept.page(limit=4)
    assert (["s009", "s008", "s007", "s006"], "7") == (ids(first), first.next_cursor)
    for number in range(10, 15):
        kept.keep(exhausted(session_id=b"s%03d" % number, at=ARRIVED + number))
    second = kept.page(limit=4, cursor=first.next_cursor)
    assert ["s005", "s004", "s003", "s002"] == ids(second)
    last = kept.page(limit=4, cursor=second.next_cursor)
    assert (["s001", "s000"], None) == (ids(last), last.next_cursor)


def test_a_cursor_whose_session_is_gone_still_leads_on() -> None:
    kept = ring(10, capacity=4)
    assert ["s007", "s006"] == ids(kept.page(cursor="9"))
    assert [] == ids(kept.page(cursor="2"))


def test_a_cursor_that_is_none_says_so() -> None:
    with pytest.raises(ValueError, match="leave it out"):
        ring(2).page(cursor="next")


def test_filters_narrow_together() -> None:
    kept = ring()
    kept.keep(exhausted(session_id=b"a", upstream="one"))
    kept.keep(recovered(session_id=b"b", upstream="one"))
    kept.keep(recovered(session_id=b"c", upstream="two", at=ARRIVED + 100))
    assert ["c", "b"] == ids(kept.page(Wanted(outcome="recovered")))
    assert ["b"] == ids(kept.page(Wanted(outcome="recovered", upstream="one")))
    assert ["a"] == ids(kept.page(Wanted(code="CONNECTION_REFUSED")))
    assert ["c", "b"] == ids(kept.page(Wanted(code="TEMPORARY_UNAVAILABLE"))), "the code of any attempt"
    assert ["c"] == ids(kept.page(Wanted(since=wall(ARRIVED + 50))))
    assert [] == ids(kept.page(Wanted(outcome="budget")))


def test_sampled_healthy_ones_are_found_beside_the_others_and_do_not_push_them_out() -> None:
    kept = Sessions(2, 3600, wall)
    kept.keep(exhausted(session_id=b"bad"))
    for number in range(50):
        kept.sample(healthy(session_id=b"ok%d" % number))
    assert ["ok49", "ok48", "bad"] == ids(kept.page())
    assert ["ok49", "ok48"] == ids(kept.page(Wanted(outcome="first_try")))
    assert None is not kept.find("ok49")


def test_old_sessions_go_when_their_time_is_over() -> None:
    kept = ring(3, ttl=10.0)
    kept.sample(healthy(at=ARRIVED))
    kept.expire(ARRIVED + 11.5)
    assert ["s002"] == ids(kept.page())
    kept.expire(ARRIVED + 100)
    assert 0 == len(kept)


# ---- S1's shape --------------------------------------------------------------------------------------------------


def test_a_session_is_shown_as_a_retry_session() -> None:
    made = session(
        "recovered",
        attempt(
            "user:pw@a.test:443",
            code="CONNECTION_RESET",
            phase=PARTLY_SENT,
            message="reset by http://x.test/?token=abc",
            decision=retry("CONNECTION_RESET", 0.25, "policies.careful", "nothing"),
            egress_proxy="http://u:p@corp:3128",
            policy_id="careful",
            reused=True,
        ),
        attempt("b.test:443", status=200, delay=0.25, policy_id="careful", address="10.0.0.2:443"),
        method="PUT",
        target="http://u:p@api.test/v1/x?api_key=abc&page=1",
        operation="save",
        stage="fetch",
        workflow="wf-1",
        subsystem="billing",
        host="api.test:80",
        user_agent="app/1 token=abc",
        client="127.0.0.1",
        api_key_id="k-12",
        correlation_id="corr-1",
        trace=Trace(0xAB, 0xCD, 0, True),
        request_bytes=3,
        response_bytes=4,
        policy_id="careful",
    )
    shown = serialise(made, wall, R, "sidecar-1")
    first, second = shown.pop("attempts")
    assert {
        "session_id": "5e55107100000001",
        "policy_id": "careful",
        "upstream": "payments",
        "subsystem": "billing",
        "operation": "save",
        "stage": "fetch",
        "method": "PUT",
        "url": "http://REDACTED:REDACTED@api.test/v1/x?api_key=REDACTED&page=1",
        "host": "api.test:80",
        "start_time": "2023-11-14T22:30:00.000Z",
        "end_time": "2023-11-14T22:30:00.451Z",
        "success": True,
        "outcome": "recovered",
        "final_result": {"status": 200},
        "final_error": None,
        "correlation_id": "corr-1",
        "trace_id": f"{0xAB:032x}",
        "context": {
            "user_agent": "app/1 token=REDACTED",
            "server_id": "sidecar-1",
            "api_key_id": "k-12",
            "request_source": "127.0.0.1",
            "workflow": "wf-1",
            "caller_resend": False,
            "fallback_from": None,
        },
        "suppressed": None,
        "dlq_id": None,
        "waited": 0.0,
        "request_bytes": 3,
        "response_bytes": 4,
        "total_attempts": 2,
        "retry_count": 1,
        "total_duration": 0.451,
        "time_to_first_byte": 0.451,
    } == shown
    assert {
        "attempt_number": 1,
        "timestamp": "2023-11-14T22:30:00.000Z",
        "kind": "first",
        "endpoint": "REDACTED:REDACTED@a.test:443",
        "address": None,
        "egress_proxy": "http://REDACTED:REDACTED@corp:3128",
        "policy_id": "careful",
        "delay": 0.0,
        "duration": 0.1,
        "send_phase": "partly_sent",
        "reused_connection": True,
        "breaker": "closed",
        "status": None,
        "success": False,
        "outcome": "failure",
        "error": {"type": "CONNECTION_RESET", "message": "reset by http://x.test/?token=REDACTED"},
        "decision": {
            "retry": True,
            "delay": 0.25,
            "reason": "CONNECTION_RESET",
            "rule": "policies.careful",
            "remedy": "nothing",
        },
    } == first
    assert (2, "retry", 0.25, 200, True, "success", None, None, "10.0.0.2:443") == tuple(
        second[name]
        for name in ("attempt_number", "kind", "delay", "status", "success", "outcome", "error", "decision", "address")
    )


def test_a_dead_connection_that_was_replaced_is_an_attempt_and_no_retry() -> None:
    made = session("first_try", attempt(code="CONNECTION_RESET"), attempt(status=200, kind="stale"))
    shown = serialise(made, wall, R)
    assert (2, 0) == (shown["total_attempts"], shown["retry_count"])


def test_a_failed_session_shows_its_final_error_and_one_without_attempts_no_negative_count() -> None:
    shown = serialise(exhausted(), wall, R)
    assert (False, {"type": "CONNECTION_REFUSED", "message": "nothing listens on a.test:443"}, 1) == (
        shown["success"],
        shown["final_error"],
        shown["retry_count"],
    )
    shown = serialise(session("denied", status=403, code="EGRESS_DENIED"), wall, R)
    assert (0, 0, [], "payments") == tuple(shown[n] for n in ("total_attempts", "retry_count", "attempts", "subsystem"))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"correlation_id": "c", "trace": Trace(1, 2, 0, True)}, "c"),
        ({"trace": Trace(1, 2, 0, True)}, f"{1:032x}"),
        ({}, "5e55107100000001"),
    ],
)
def test_the_correlation_is_the_callers_else_the_traces_else_the_sessions(facts: dict[str, Any], expected: str) -> None:
    assert expected == correlation_id(healthy(**facts))


@pytest.mark.parametrize(
    ("code", "word"),
    [(None, "success"), ("CIRCUIT_OPEN", "circuit_open"), ("NETWORK_TIMEOUT", "timeout"), ("BAD_GATEWAY", "failure")],
)
def test_an_attempt_comes_out_in_one_of_four_words(code: str | None, word: str) -> None:
    assert word == attempt_outcome(code)


def test_the_time_to_the_first_byte_is_that_of_the_stream_or_of_the_whole_answer() -> None:
    streamed, whole, gone = healthy(took=2.0), healthy(took=2.0), session("cancelled", attempt(took=1), status=200)
    streamed.first_byte = streamed.started + 0.25
    shown = [serialise(one, wall, Redactor())["time_to_first_byte"] for one in (streamed, whole, gone)]
    assert [0.25, 2.001, None] == shown


def test_an_answer_that_is_a_failure_has_a_message() -> None:
    failed = session("exhausted", attempt(status=503, code="TEMPORARY_UNAVAILABLE"), status=503)
    failed.code = "TEMPORARY_UNAVAILABLE"
    shown = serialise(failed, wall, Redactor())
    said = {"type": "TEMPORARY_UNAVAILABLE", "message": "the upstream answered 503"}
    assert (said, said) == (shown["final_error"], shown["attempts"][0]["error"])


def test_a_fallback_that_answers_at_once_is_worth_looking_at() -> None:
    assert not is_interesting(healthy(), 10)
    assert is_interesting(healthy(fallback_from="payments-main"), 10)


def test_a_session_without_a_trace_of_ours_names_the_callers() -> None:
    made = healthy()
    made.caller_trace = f"{0xAB:032x}"
    shown = serialise(made, wall, Redactor())
    assert (f"{0xAB:032x}", f"{0xAB:032x}") == (shown["trace_id"], shown["correlation_id"])
