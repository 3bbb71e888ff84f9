"""The operator's workflow: which step follows which, and what S4 says MUST hold before a replay."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from config.durable import Replay
from sidecar.durable.workflow import (
    KINDS,
    MOVES,
    STATES,
    Ask,
    Refusal,
    View,
    after_failed_replay,
    move,
    needs_remediation,
    refuse_close,
    refuse_remediation,
    refuse_replay,
)

SAFE = View("pending", "triage", "NETWORK_TIMEOUT", False, "safe", "nothing was sent", False, 0, None)


def refusal(ask: Ask | None = None, rules: dict[str, Any] | None = None, **changed: Any) -> Refusal | None:
    return refuse_replay(dataclasses.replace(SAFE, **changed), Replay.model_validate(rules or {}), ask or Ask())


def why(*given: Any, **changed: Any) -> str:
    found = refusal(*given, **changed)
    assert found is not None
    assert found.what_to_do
    return found.why


def test_the_whole_way_from_triage_to_closed() -> None:
    state: str | Refusal = "triage"
    for action, expected in (
        ("remediate", "remediation"),
        ("validate", "validated"),
        ("replay", "replayed"),
        ("verify", "verified"),
        ("close", "closed"),
    ):
        assert isinstance(state, str)
        state = move(state, action)
        assert expected == state


def test_a_failed_replay_is_triaged_again() -> None:
    assert "triage" == move("replayed", "fail")


@pytest.mark.parametrize(("state", "action"), [("triage", "verify"), ("replayed", "close"), ("closed", "replay")])
def test_steps_cannot_be_skipped(state: str, action: str) -> None:
    found = move(state, action)
    assert isinstance(found, Refusal)
    assert found.what_to_do.startswith("possible: ")


def test_every_move_leads_from_a_state_to_a_state() -> None:
    assert set(STATES) == {state for state, _ in MOVES}
    assert set(MOVES.values()) <= set(STATES)


def test_a_safe_entry_may_go_out() -> None:
    assert None is refusal()


def test_what_succeeded_is_never_sent_again_not_even_forced() -> None:
    forced = Ask(force=True, reason="I insist")
    assert "already succeeded at 2027-01-15T08:00:00.000Z" in why(forced, status="completed", replayed_at=1_800_000_000)
    assert "already succeeded and" in why(forced, status="completed")
    assert "discarded" in why(forced, status="discarded")
    assert "under way" in why(forced, status="replaying")
    assert "nothing was sent" in why(forced, verdict="not_replayable")


def test_what_may_take_effect_twice_needs_force_and_a_reason() -> None:
    for ask in (Ask(), Ask(bulk=True)):
        assert why(ask, verdict="unsafe").startswith("unsafe: ")
    assert "needs a reason" in why(Ask(force=True, reason=" "), verdict="unsafe")
    assert None is refusal(Ask(force=True, reason="the provider has no record of it"), verdict="unsafe")


def test_a_critical_class_needs_evidence_first() -> None:
    assert "needs evidence" in why(critical=True, error_class="INVALID_API_KEY")
    assert None is refusal(critical=True, has_evidence=True)
    assert None is refusal(Ask(force=True, reason="rotated, ticket to follow"), critical=True)


@pytest.mark.parametrize(
    ("rule", "critical", "needed"),
    [
        ("all", False, True),
        ("all", True, True),
        ("critical", False, False),
        ("critical", True, True),
        ("none", True, False),
    ],
)
def test_how_much_evidence_is_asked_for_can_be_set(rule: str, critical: bool, needed: bool) -> None:
    rules = Replay.model_validate({"require_remediation": rule})
    assert needed == needs_remediation(dataclasses.replace(SAFE, critical=critical), rules)


def test_after_too_many_failures_it_goes_out_only_when_forced() -> None:
    assert "failed 5 replays" in why(status="failed", replays=5)
    assert "failed 5 replays" in why(replays=5)
    assert None is refusal(Ask(force=True, reason="fixed now"), status="failed", replays=5)


def test_a_failed_replay_returns_and_the_last_one_is_final() -> None:
    rules = Replay(max_replays=3)
    once = dataclasses.replace(SAFE, replays=1)
    assert ("pending", False) == after_failed_replay(once, rules, "UPSTREAM_ERROR", fatal=False)
    assert ("failed", False) == after_failed_replay(
        dataclasses.replace(SAFE, replays=3), rules, "UPSTREAM_ERROR", fatal=False
    )


def test_the_same_fatal_class_again_is_escalated() -> None:
    rules = Replay()
    entry = dataclasses.replace(SAFE, error_class="VALIDATION_ERROR", replays=1)
    assert ("pending", True) == after_failed_replay(entry, rules, "VALIDATION_ERROR", fatal=True)
    assert ("pending", False) == after_failed_replay(entry, rules, "NOT_FOUND", fatal=True)
    assert ("pending", False) == after_failed_replay(entry, rules, "VALIDATION_ERROR", fatal=False)


def test_a_remediation_has_a_kind_and_evidence() -> None:
    for kind in KINDS:
        assert None is refuse_remediation(kind, "deploy 42 is out")
    wrong = refuse_remediation("luck", "x")
    assert wrong is not None and "transient, data, auth_config, code_defect" in wrong.what_to_do
    assert refuse_remediation("data", "  ") is not None


def test_closing_needs_a_note() -> None:
    assert refuse_close(" ") is not None
    assert None is refuse_close("seen in the ledger")
