"""The replay safety verdict: each word, its sentence, and when it changes by itself."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from config.durable import Replay
from config.idempotency import Idempotency
from sidecar.durable.ramp import Ramp
from sidecar.durable.verdict import EXPOSURES, WORDS, Facts, Verdict, exposure, judge, worse
from telemetry.record import CONNECTED, NOT_CONNECTED, PARTLY_SENT, SENT

NOW = 1_800_000_000.0
POST = Facts("POST", "NETWORK_TIMEOUT", "unanswered", NOW - 100, NOW - 90)


def judged(replay: dict[str, Any] | None = None, idempotency: dict[str, Any] | None = None, **facts: Any) -> Verdict:
    return judge(
        dataclasses.replace(POST, **facts),
        Replay.model_validate(replay or {}),
        Idempotency.model_validate(idempotency or {}),
        NOW,
    )


@pytest.mark.parametrize(
    ("word", "part", "facts"),
    [
        (
            "not_replayable",
            "body not kept, 12.4 MB over the limit",
            {"body_problem": "not kept, 12.4 MB over the limit"},
        ),
        ("superseded", "succeeded later, at 2027-01-15T08:00:00.000Z", {"superseded_at": NOW}),
        ("credential_stale", "expired at 2027-01-15T07:59:59.000Z", {"credential_expires_at": NOW - 1}),
        ("credential_stale", "its key has expired", {"code": "API_KEY_EXPIRED", "exposure": "refused"}),
        ("safe", "GET changes nothing", {"method": "GET"}),
        ("safe", "HEAD changes nothing", {"method": "HEAD"}),
        ("safe", "PUT has the same effect", {"method": "PUT"}),
        ("stale", "a later call changed the same url", {"method": "PUT", "later_call_at": NOW}),
        ("stale", "DELETE would undo it", {"method": "DELETE", "later_call_at": NOW, "exposure": "not_sent"}),
        ("stale", "older than `replay.stale_after`", {"method": "PUT", "last_failure_at": NOW - 86_400}),
        ("safe", "nothing was sent", {"exposure": "not_sent"}),
        (
            "safe",
            "refused it without executing it (INVALID_API_KEY)",
            {"exposure": "refused", "code": "INVALID_API_KEY"},
        ),
        ("safe", "makes the upstream execute it once, until", {"keyed": True, "key_honoured": True}),
        (
            "key_window_expired",
            "which ended at",
            {"keyed": True, "key_honoured": True, "first_failure_at": NOW - 86_400},
        ),
        ("unsafe", "it may have been executed; ask the upstream", {}),
        ("unsafe", "it may have been executed", {"keyed": True}),
        ("needs_key", "set `idempotency.provider_honours: true`", {"keyed": True, "exposure": "answered"}),
        ("needs_key", "was sent without Idempotency-Key", {"exposure": "answered"}),
        ("needs_key", "PATCH was sent", {"method": "PATCH", "exposure": "answered"}),
    ],
)
def test_each_case_has_its_word_and_says_why(word: str, part: str, facts: dict[str, Any]) -> None:
    verdict = judged(**facts)
    assert word == verdict.word
    assert part in verdict.sentence


def test_only_a_request_that_cannot_take_effect_twice_is_safe() -> None:
    """Every combination: what may have been executed and is neither harmless nor keyed is never safe."""
    for method in ("POST", "PATCH"):
        for how in EXPOSURES:
            for keyed in (False, True):
                for honoured in (False, True):
                    word = judged(method=method, exposure=how, keyed=keyed, key_honoured=honoured).word
                    assert word in WORDS
                    expected = how in ("not_sent", "refused") or (keyed and honoured)
                    assert expected == (word == "safe"), (method, how, keyed, honoured)


def test_a_credential_matters_only_when_the_sealed_one_is_used() -> None:
    assert "unsafe" == judged({"credentials": "live"}, credential_expires_at=NOW - 1).word
    assert "safe" == judged({"credentials": "live"}, code="API_KEY_EXPIRED", exposure="refused").word


def test_it_is_known_when_time_alone_changes_the_answer() -> None:
    keyed = {"keyed": True, "key_honoured": True}
    assert NOW - 100 + 86_400 == judged(**keyed).until
    assert NOW + 50 == judged(**keyed, credential_expires_at=NOW + 50).until
    assert NOW - 100 + 86_400 == judged(**keyed, credential_expires_at=NOW + 1e6).until
    assert NOW - 90 + 86_400 == judged(method="PUT").until
    assert None is judged(method="GET").until
    assert NOW + 50 == judged(method="GET", credential_expires_at=NOW + 50).until


@pytest.mark.parametrize(
    ("expected", "phase", "code", "status"),
    [
        ("not_sent", NOT_CONNECTED, "DNS_FAILURE", None),
        ("not_sent", CONNECTED, "CONNECTION_RESET", None),
        ("unanswered", PARTLY_SENT, "CONNECTION_RESET", None),
        ("unanswered", SENT, "NETWORK_TIMEOUT", None),
        ("refused", SENT, "RATE_LIMIT_EXCEEDED", 429),
        ("refused", SENT, "INVALID_API_KEY", 401),
        ("answered", SENT, "UPSTREAM_ERROR", 500),
        ("answered", SENT, "CONFLICT", 409),
    ],
)
def test_what_the_upstream_may_have_done(expected: str, phase: int, code: str, status: int | None) -> None:
    assert expected == exposure(phase, code, status)


def test_the_worst_attempt_counts() -> None:
    assert "unanswered" == worse("refused", "unanswered") == worse("unanswered", "not_sent")


def test_a_ramp_begins_with_one_and_doubles_while_all_goes_well() -> None:
    ramp = Ramp(8, careful=True)
    sizes = []
    for _ in range(6):
        sizes.append(ramp.size)
        assert ramp.ended(0)
    assert [1, 2, 4, 8, 8, 8] == sizes
    assert ramp.ended(3)
    assert 4 == ramp.size


def test_a_failed_canary_stops_the_climb_and_the_next_one_is_a_canary_again() -> None:
    ramp = Ramp(8, careful=True)
    assert not ramp.ended(1)
    assert (1, True) == (ramp.size, ramp.canary)
    assert not ramp.ended(1)
    assert ramp.ended(0)
    assert 2 == ramp.size
    assert ramp.ended(2), "no canary any more"
    assert (1, False) == (ramp.size, ramp.canary)


def test_without_a_ramp_everything_goes_at_once() -> None:
    ramp = Ramp(8, careful=False)
    assert 8 == ramp.size
    assert ramp.ended(8)
    assert 8 == ramp.size


@pytest.mark.parametrize("name", ["verdict", "workflow", "ramp", "credential", "filters", "schema"])
def test_decisions_are_made_by_code_that_cannot_wait_look_or_roll_dice(name: str) -> None:
    impure = {"asyncio", "aiohttp", "time", "random", "secrets", "os", "socket", "threading", "logging", "sqlite3"}
    source = Path(__file__).parent.parent / "sidecar" / "durable" / f"{name}.py"
    imported = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert set() == imported & impure
