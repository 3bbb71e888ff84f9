"""Dead letters and replays as they are shown.

Law: what is here is everything but secrets; the shapes say what durable layers hand out, nothing is added on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidecar.admin.fields import Answer


class NoteShown(Answer):
    """Something that somebody wanted remembered."""

    at: str
    by: str
    text: str


class RemediationShown(Answer):
    """What was wrong, and where it can be seen that it is fixed."""

    kind: str
    evidence: str
    ticket: str
    by: str
    at: str


class DeadLetterShown(Answer):
    """One dead letter. Times are RFC 3339."""

    dlq_id: str
    upstream: str
    host: str
    operation_type: str
    stage: str | None
    workflow: str | None
    method: str
    url: str
    """Redacted; empty when it cannot be read."""
    status: str
    """pending, replaying, completed, failed or discarded."""
    state: str
    """Of the operator's workflow: triage, remediation, validated, replayed, verified or closed."""
    escalated: bool
    """A replay failed with the same fatal class: engineering has to look."""
    processed: bool
    verdict: str
    """May it be sent again?"""
    sentence: str
    """Why the verdict is what it is."""
    error_class: str
    category: str
    error_details: Mapping[str, Any]
    """error_type, error_message, retry_count."""
    last_stack: str
    sanitized_context: Mapping[str, Any]
    """Ids, sizes and hashes."""
    headers: tuple[tuple[str, str], ...]
    """Those that may be read."""
    sealed_headers: tuple[str, ...]
    """Names of the others."""
    body: Mapping[str, Any]
    """kept, size, note."""
    response: Mapping[str, Any] | None
    """The last answer: status and redacted headers. Its body is sealed."""
    send_phase: str
    """How far a send got, at most."""
    api_key_id: str
    idempotency_key: str | None
    key_injected: bool
    key_honoured: bool
    credential_expires_at: str | None
    first_failure_at: str
    last_failure_at: str
    created_at: str
    last_attempt: str
    replayed_at: str | None
    later_call_at: str | None
    superseded_at: str | None
    replays: int
    occurrences: int
    """How often the same request failed."""
    edited: bool
    remediation: RemediationShown | None
    notes: tuple[NoteShown, ...]
    history: tuple[Mapping[str, Any], ...]
    """What happened to it, oldest first: at, event, and what belongs to the event."""


class ReplayAdvice(Answer):
    """Whether a replay would go out now, and if not, what is in its way."""

    allowed: bool
    why_not: str | None
    what_to_do: str | None


class DeadLetterExplained(DeadLetterShown):
    """With what the rules say about a replay."""

    replay: ReplayAdvice


class DeadLetterPage(Answer):
    """Some dead letters, newest first."""

    items: tuple[DeadLetterShown, ...]
    next_cursor: str | None
    total: int | None
    """How many fit in all; on the first page only."""


class FileTaken(Answer):
    """What became of one file of an import."""

    name: str
    result: str
    """added, known (the same entry is there already) or refused."""
    why: str | None
    """Of a refusal, with file and line."""


class Imported(Answer):
    """What became of each file, in their order."""

    items: tuple[FileTaken, ...]
    next_cursor: None = None


class DryRun(Answer):
    """What a replay would do."""

    by_verdict: Mapping[str, int]
    """Entries that fit the filter, by verdict."""
    would_replay: int
    """How many would go out."""
    stop_after: int
    """After so many failures it would pause until it is resumed; 0: never."""
    refused_in_first_page: Mapping[str, int]
    """Of the first of them: how many would not, and why."""
    first: tuple[str, ...]
    """The first that would go out."""
    breakers: Mapping[str, str]
    """Upstreams whose breaker is not closed, with its state: replays to them wait until it lets calls through again,
    then go on by themselves."""


class ReplayShown(Answer):
    """One replay of many entries."""

    job_id: str
    state: str
    """running, paused, done, cancelled or interrupted."""
    why: str
    """Of a state that nobody asked for."""
    current: str
    order: Mapping[str, Any]
    """What was asked for: filter, rate, ramp, limit, stop_after, force, reason, by."""
    total: int
    done: int
    percent: float
    """Of `total` that is done."""
    per_second: float | None
    """Replays so far, pauses left out; null before the first."""
    seconds_left: float | None
    """At that rate; null when it cannot be told, or when it has ended."""
    outcomes: Mapping[str, int]
    """completed, failed, escalated, held_back, skipped."""
    skipped: Mapping[str, int]
    """Why entries were not sent."""
    created_at: str
    ended_at: str | None


class ReplayStarted(Answer):
    """With `dry_run` what would happen, else what began."""

    dry_run: DryRun | None
    replay: ReplayShown | None


class ReplayPage(Answer):
    """Some replays, newest first."""

    items: tuple[ReplayShown, ...]
    next_cursor: str | None
    total: int | None
    """How many fit in all; on the first page only."""


class ReplayedOne(Answer):
    """How the replay of one entry ended."""

    outcome: str
    """completed, failed, escalated, held_back (nothing was sent), or lost (it took longer than its lease)."""
    entry: DeadLetterExplained
