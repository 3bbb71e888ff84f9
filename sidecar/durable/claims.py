"""Who may send an entry: a claim, taken durably before the send and given back with its result.

Law: an entry is sent only under a claim, and there is one at a time. A claim whose owner is gone (a crash, a kill) is
not evidence that nothing was sent: the entry is reconciled as if the send had gone out without an answer, and its
verdict decides whether it may ever go again. Success is final.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import NamedTuple

from sidecar.durable import rows
from sidecar.durable.deadletter import DeadLetters, no_such
from sidecar.durable.entry import Answer, Entry, ms
from sidecar.durable.rows import Row
from sidecar.durable.trouble import Damaged
from sidecar.durable.verdict import exposure, worse
from sidecar.durable.workflow import MOVES, Ask, Refusal, after_failed_replay, move, refuse_replay
from telemetry.record import PHASE_WORDS, SENT

_PER_PASS = 200


@dataclass(frozen=True, slots=True)
class Result:
    """How a replay ended."""

    ok: bool
    code: str = ""
    """The error code, when it failed."""
    status: int | None = None
    phase: int = SENT
    message: str = ""
    held_back: bool = False
    """The sidecar itself did not let it out (breaker, limits, egress): nothing was tried, nothing counts."""
    response: Answer | None = None
    session_id: str = ""
    seconds: float = 0.0


class Settled(NamedTuple):
    """What became of an entry."""

    entry: Entry
    outcome: str
    """completed, failed, escalated, held_back, or lost when the claim was no longer ours."""


class Claims:
    """`owner` names this run of the process and the job."""

    def __init__(self, letters: DeadLetters) -> None:
        self._letters = letters

    def owner(self, job: str) -> str:
        return f"{self._letters.store.boot_id}:{job}"

    async def take(self, dlq_id: str, job: str, ask: Ask, by: str) -> Entry | Refusal:
        """Durable when it returns. A refusal says why it may not be sent."""
        letters = self._letters

        def work(connection: sqlite3.Connection) -> Entry | Refusal | Damaged:
            try:
                row = rows.load(connection, dlq_id)
            except Damaged as damaged:
                return damaged
            if row is None:
                raise no_such(dlq_id)
            entry, at = row.entry, ms(letters.now())
            rules = letters.terms_of(entry.upstream).replay
            refusal = refuse_replay(letters.view(entry), rules, ask)
            following = refusal or move(entry.state, "replay")
            if isinstance(following, Refusal):
                return following
            forced = ask.reason if ask.force else None
            entry.happened(at, "replay_started", job=job, by=by, forced=forced, was=[entry.status, entry.state])
            entry.status, entry.state = "replaying", following
            entry.last_attempt = max(entry.last_attempt, at)
            row.lease_owner, row.lease_until = self.owner(job), at + rules.lease
            rows.save(connection, row, letters.judge)
            return entry

        found = await letters.store.write(work)
        if isinstance(found, Damaged):
            await letters.set_aside(dlq_id, found.message)
            return Refusal(found.message, "its content is gone; send the request again from its source")
        return found

    async def settle(self, dlq_id: str, job: str, result: Result) -> Settled:
        """One write: the result, the history, and the claim given back."""
        letters = self._letters

        def work(connection: sqlite3.Connection) -> Settled:
            row = rows.load(connection, dlq_id)
            if row is None:
                raise no_such(dlq_id)
            if row.lease_owner != self.owner(job):
                return Settled(row.entry, "lost")
            outcome = self._apply(row, result)
            row.lease_owner = row.lease_until = None
            rows.save(connection, row, letters.judge)
            return Settled(row.entry, outcome)

        return await letters.store.write(work)

    def _apply(self, row: Row, result: Result) -> str:
        entry, at = row.entry, ms(self._letters.now())
        if result.held_back:
            was = next(event["was"] for event in reversed(entry.history) if event["event"] == "replay_started")
            entry.status, entry.state = was
            redactor = self._letters.terms_of(entry.upstream).redactor
            entry.happened(at, "replay_held_back", code=result.code, why=redactor.clauses(result.message) or None)
            return "held_back"
        facts: dict[str, object] = {
            "code": result.code or None,
            "status": result.status,
            "session": result.session_id or None,
            "seconds": round(result.seconds, 3),
        }
        entry.replays += 1
        if result.ok:
            entry.status, entry.processed = "completed", True
            entry.replayed_at = max(at, entry.last_attempt)
            entry.happened(at, "replayed", **facts)
            return "completed"
        return self._failed(row, result, at, facts)

    def _failed(self, row: Row, result: Result, at: float, facts: dict[str, object]) -> str:
        entry, letters = row.entry, self._letters
        rules = letters.terms_of(entry.upstream).replay
        after = after_failed_replay(letters.view(entry), rules, result.code, letters.is_fatal(result.code))
        entry.status, entry.escalated = after.status, entry.escalated or after.escalated
        entry.state = MOVES[entry.state, "fail"]
        self._exposed(entry, result, at)
        entry.error_class = result.code or entry.error_class
        known = letters.registry.get(entry.error_class)
        entry.category = known.category if known is not None else entry.category
        redactor = letters.terms_of(entry.upstream).redactor
        retries = entry.error_details["retry_count"] + 1
        entry.error_details = {
            "error_type": entry.error_class,
            "error_message": redactor.clauses(result.message),
            "retry_count": retries,
        }
        entry.happened(at, "replay_failed", phase=PHASE_WORDS[result.phase], **facts)
        return "escalated" if after.escalated else "failed"

    def _exposed(self, entry: Entry, result: Result, at: float) -> None:
        entry.exposure = worse(entry.exposure, exposure(result.phase, result.code, result.status))
        entry.send_phase = max(entry.send_phase, PHASE_WORDS[result.phase], key=PHASE_WORDS.index)
        entry.last_failure_at = max(entry.last_failure_at, at)
        entry.last_attempt = max(entry.last_attempt, at)

    async def reconcile(self) -> list[Entry]:
        """Entries whose claim has no living owner, or has run out. Call it at the start and now and then."""
        found: list[Entry] = []
        while True:
            some, damaged = await self._letters.store.write(self._reconcile_some)
            found += some
            for dlq_id in damaged:
                await self._letters.set_aside(dlq_id, f"the entry {dlq_id} does not match its digest")
            if len(some) + len(damaged) < _PER_PASS:
                return found

    def _reconcile_some(self, connection: sqlite3.Connection) -> tuple[list[Entry], list[str]]:
        letters, reconciled, damaged = self._letters, list[Entry](), list[str]()
        at = ms(letters.now())
        replaying = connection.execute(
            "SELECT seq, dlq_id FROM dead_letters JOIN facets ON facets.id = facet WHERE facets.status = 'replaying' "
            "AND (lease_owner IS NULL OR lease_until < ? OR substr(lease_owner, 1, instr(lease_owner, ':') - 1) <> ?) "
            "LIMIT ?",
            (at, letters.store.boot_id, _PER_PASS),
        ).fetchall()
        for seq, dlq_id in replaying:
            try:
                row = rows.load_seq(connection, seq)
            except Damaged:
                damaged.append(dlq_id)
                continue
            assert row is not None
            entry = row.entry
            self._exposed(entry, Result(ok=False, code=entry.error_class, phase=SENT), at)
            entry.replays += 1
            entry.status, entry.state = "pending", "triage"
            entry.happened(at, "replay_interrupted")
            row.lease_owner = row.lease_until = None
            rows.save(connection, row, letters.judge)
            reconciled.append(entry)
        return reconciled, damaged
