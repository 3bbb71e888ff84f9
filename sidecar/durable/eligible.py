"""Which failed requests become dead letters, and which of those are answered with 202.

Law: pure. What the request itself says (`x-sidecar-dead-letter`) comes before the settings, and the settings before
the registry: PERMANENT failures are kept only when `dead_letter.codes` names them, because they fail the same way
again; a credential outage (CRITICAL) is kept, because somebody will repair it.
"""

from __future__ import annotations

from config.durable import DeadLetter

OUTCOMES = frozenset({"exhausted", "not_retryable", "budget", "deadline", "breaker_open", "internal", "rejected"})


def worth_keeping(
    rules: DeadLetter,
    *,
    outcome: str,
    method: str,
    code: str,
    category: str,
    failed_attempts: int,
    interrupted: bool = False,
    asked: bool | None = None,
) -> bool:
    """`interrupted`: a shutdown cut its backoff short. `asked`: what the request's own header says, None if nothing."""
    ended_badly = outcome in OUTCOMES or interrupted or (outcome == "cancelled" and failed_attempts > 0)
    if asked is False or not ended_badly:
        return False
    if asked is True:
        return True
    if not rules.enabled or method not in rules.methods:
        return False
    return code in rules.codes if rules.codes is not None else category != "PERMANENT"


def answers_accepted(rules: DeadLetter, category: str) -> bool:
    """Whether the app gets 202 and the id instead of the failure."""
    return rules.respond == "accepted" and category == "TRANSIENT"
