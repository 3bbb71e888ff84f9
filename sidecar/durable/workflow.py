"""What an operator may do with a dead letter: triage → remediation → validated → replayed → verified → closed.

Law: pure. Every refusal says what is missing and how to supply it. The MUSTs of the source document are here: no
replay of a CRITICAL class without evidence of what was fixed, none that might have an effect twice, nothing sent
after it succeeded, closing only with a note, and the same fatal failure again goes to engineering.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from config.durable import Replay
from telemetry.timestamps import rfc3339

STATES = ("triage", "remediation", "validated", "replayed", "verified", "closed")
STATUSES = ("pending", "replaying", "completed", "failed", "discarded")
WAITING = frozenset({"pending", "replaying", "failed"})
KINDS = ("transient", "data", "auth_config", "code_defect")

# (state, action) → state. What is not here is not allowed.
MOVES = {
    ("triage", "remediate"): "remediation",
    ("remediation", "remediate"): "remediation",
    ("validated", "remediate"): "remediation",
    ("triage", "validate"): "validated",
    ("remediation", "validate"): "validated",
    ("validated", "validate"): "validated",
    ("triage", "replay"): "replayed",
    ("remediation", "replay"): "replayed",
    ("validated", "replay"): "replayed",
    ("replayed", "fail"): "triage",
    ("replayed", "verify"): "verified",
    ("verified", "verify"): "verified",
    ("verified", "close"): "closed",
    ("closed", "reopen"): "triage",
    **{(state, "discard"): "closed" for state in STATES},
    **{(state, "succeed_elsewhere"): "closed" for state in STATES},
}


class Refusal(NamedTuple):
    why: str
    what_to_do: str
    kind: str = ""
    """The same without what is true of one entry only, for counting; where nothing is, `why` is that."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Who wants a replay, and how much they insist."""

    bulk: bool = False
    force: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """What the rules look at."""

    status: str
    state: str
    error_class: str
    critical: bool
    """The category of its class is CRITICAL."""
    verdict: str
    sentence: str
    has_evidence: bool
    replays: int
    replayed_at: float | None


class Aftermath(NamedTuple):
    """What a failed replay makes of an entry."""

    status: str
    escalated: bool


def move(state: str, action: str) -> str | Refusal:
    """The next state, or why there is none."""
    following = MOVES.get((state, action))
    if following is not None:
        return following
    possible = sorted(word for here, word in MOVES if here == state)
    return Refusal(f"an entry in state {state} cannot be acted on with `{action}`", f"possible: {', '.join(possible)}")


def refuse_remediation(kind: str, evidence: str) -> Refusal | None:
    if kind not in KINDS:
        return Refusal(f"`{kind}` is not a kind of remediation", f"one of {', '.join(KINDS)}")
    if not evidence.strip():
        return Refusal("a remediation needs evidence", "say what was fixed and where that can be seen, or a ticket")
    return None


def refuse_close(note: str) -> Refusal | None:
    if not note.strip():
        return Refusal("closing needs a note", "say how the success was verified")
    return None


def refuse_replay(view: View, rules: Replay, ask: Ask) -> Refusal | None:
    """None: it may go out."""
    return _never(view) or _unless_forced(view, rules, ask)


def _never(view: View) -> Refusal | None:
    if view.status == "completed":
        when = f" at {rfc3339(view.replayed_at)}" if view.replayed_at is not None else ""
        return Refusal(
            f"it already succeeded{when} and is never sent again",
            "send a new request if it is needed twice",
            "it already succeeded",
        )
    if view.status == "discarded":
        return Refusal("it was discarded", "send a new request if it is needed after all")
    if view.status == "replaying":
        return Refusal("a replay of it is under way", "wait until that has ended")
    if view.verdict == "not_replayable":
        return Refusal(view.sentence, "send the request again from its source", "not_replayable: its body was not kept")
    return None


def _unless_forced(view: View, rules: Replay, ask: Ask) -> Refusal | None:
    if ask.force:
        if ask.reason.strip():
            return None
        return Refusal("a forced replay needs a reason", "say in `reason` why it is safe")
    if needs_remediation(view, rules):
        return Refusal(
            f"{view.error_class} needs evidence of what was fixed before a replay (`replay.require_remediation`)",
            "add a remediation (kind and evidence), or use `force` with a `reason`",
        )
    if view.status == "failed" or view.replays >= rules.max_replays:
        return Refusal(
            f"it failed {view.replays} replays, which is all that `replay.max_replays` allows",
            "use `force` with a `reason`",
            "it failed as many replays as `replay.max_replays` allows",
        )
    if view.verdict != "safe":
        return Refusal(
            f"{view.verdict}: {view.sentence}", "use `force` with a `reason` to send it nevertheless", view.verdict
        )
    return None


def needs_remediation(view: View, rules: Replay) -> bool:
    if view.has_evidence or rules.require_remediation == "none":
        return False
    return rules.require_remediation == "all" or view.critical


def after_failed_replay(view: View, rules: Replay, code: str, fatal: bool) -> Aftermath:
    """`view.replays` counts this one already. The same fatal class again: engineering has to look."""
    status = "failed" if view.replays >= rules.max_replays else "pending"
    return Aftermath(status, escalated=fatal and code == view.error_class)
