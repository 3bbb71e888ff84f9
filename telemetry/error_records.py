"""S0's ErrorRecord: one JSON line per failed attempt, also of sessions that recovered, by severity.

Law: written by the writer's thread to `{folder}/{severity}/errors.jsonl`; rate limited before it gets there. The words
for severity and category are S0's; a stack trace is there only where an exception was behind the failure (an answer
that says no has none) and `telemetry.log.level` was `debug` when it happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from config.errors import ErrorCode
from telemetry.record import PHASE_WORDS, Attempt, Session, frames_of, trace_id_of
from telemetry.redact import Redactor
from telemetry.rotating import RotatingFile
from telemetry.sessions import Wall, correlation_id, retry_count
from telemetry.timestamps import rfc3339

# The registry's words → S0's.
SEVERITIES = {"low": "INFO", "medium": "WARNING", "high": "ERROR", "critical": "CRITICAL"}
_MAX_BYTES = 16_777_216
_KEEP = 5
_TTL = 30 * 86_400.0


class ErrorRecords:
    """The files, opened when first needed."""

    def __init__(
        self,
        folder: Path,
        registry: Mapping[str, ErrorCode],
        wall: Wall,
        clock: Callable[[], float],
        redactor: Redactor,
        told: Callable[[str], None] | None = None,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self.registry = registry
        self._wall = wall
        self._clock = clock
        self._redactor = redactor
        self._told = told
        self._files: dict[str, RotatingFile] = {}

    def write(self, session: Session) -> None:
        """Every failed attempt of a session."""
        for number, attempt in enumerate(session.attempts, 1):
            if attempt.code is not None:
                record = error_record(session, number, attempt, self.registry, self._wall, self._redactor)
                self._file(str(record["severity"]).lower()).append(orjson.dumps(record))

    @property
    def lost(self) -> int:
        """Refusals of the disk, over all files."""
        return sum(file.lost for file in tuple(self._files.values()))

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def expire(self) -> None:
        for file in self._files.values():
            file.expire()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, severity: str) -> RotatingFile:
        file = self._files.get(severity)
        if file is None:
            path = self._folder / severity / "errors.jsonl"
            file = RotatingFile(path, self._max_bytes, _KEEP, _TTL, self._clock, self._told)
            self._files[severity] = file
        return file


def error_record(
    session: Session,
    number: int,
    attempt: Attempt,
    registry: Mapping[str, ErrorCode],
    wall: Wall,
    redactor: Redactor,
) -> dict[str, Any]:
    """One failed attempt in S0's shape."""
    code, frames = attempt.code or "SIDECAR_INTERNAL", frames_of(attempt)
    known = registry.get(code)
    message = redactor.text(attempt.message or "") or (known.description if known is not None else code)
    return {
        "timestamp": rfc3339(wall(attempt.ended)),
        "severity": SEVERITIES[known.severity] if known is not None else "ERROR",
        "category": known.category if known is not None else "TRANSIENT",
        "message": message,
        "error_type": code,
        "stack_trace": None if frames is None else redactor.lines(frames),
        "context": {
            "request_id": session.session_id.decode(),
            "operation": session.operation or f"{session.method} {session.upstream}",
            "upstream": attempt.upstream or session.upstream,
            "endpoint": redactor.url(attempt.endpoint),
            "attempt": number,
            "kind": attempt.kind,
            "policy_id": attempt.policy_id,
            "send_phase": PHASE_WORDS[attempt.phase],
            "outcome": session.outcome,
            "stage": session.stage,
            "workflow": redactor.text(session.workflow) if session.workflow else None,
            "correlation_id": redactor.text(correlation_id(session)),
            "trace_id": trace_id_of(session),
        },
        "http_status": attempt.status or None,
        "retry_count": retry_count(session.attempts[:number]),
    }
