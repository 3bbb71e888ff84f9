"""What `sidecar run -- CMD` says when the command has ended: how its calls went, and where each is explained.

Law: one line on standard error, behind everything the command wrote there; a file only if there is something to
explain. That neither can be written harms nobody: the command's exit code stays what it is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from telemetry.record import BAD, Session
from telemetry.signals import Signals

FOLDER = "runs"
_MOST_EXPLAINED = 1_000
_FILES_KEPT = 20
_MOST_REASONS = 2
_LONGEST_REASON = 160
_NO_CALL = (
    "no call came through the sidecar: the command made none, does not read the proxy variables, or called this "
    "machine (localhost, 127.0.0.1), which NO_PROXY keeps out"
)
_QUIET = frozenset({"first_try", "tunnelled", "deduplicated", "queued"})
_WORDS = (
    ("recovered", frozenset({"recovered"})),
    ("refused", frozenset({"denied"})),
    ("rejected by the upstream", frozenset({"rejected"})),
    ("failed", BAD),
    ("given up by the app", frozenset({"cancelled"})),
)


def summary(outcomes: Mapping[str, int], sessions: Iterable[Session], signals: Signals) -> str:
    """`12 calls, 2 recovered, 1 refused: EGRESS_DENIED: …`. `sessions` are those worth telling, the newest first."""
    calls = sum(outcomes.values())
    refused = signals.metrics.demotions.total()
    if not calls and not refused:
        return _NO_CALL
    told = [f"{calls} call{'' if calls == 1 else 's'}"]
    known = list(sessions)
    for word, meant in _WORDS:
        count = sum(outcomes.get(outcome, 0) for outcome in meant)
        if count:
            told.append(f"{count} {word}{_reasons(meant, known, signals) if word != 'recovered' else ''}")
    if refused:
        clients = "a client" if refused == 1 else f"{refused} clients"
        told.append(
            f"{clients} refused our certificate, whose calls pass unopened (the log says which, and what to do)"
        )
    return ", ".join(told) if len(told) > 1 else f"{told[0]}, nothing to explain"


def _reasons(meant: frozenset[str], known: Iterable[Session], signals: Signals) -> str:
    reasons = Counter(
        f"{session.code}: {signals.redactor.text(session.message or '')}".removesuffix(": ")[:_LONGEST_REASON]
        for session in known
        if session.outcome in meant and session.code is not None
    )
    shown = [reason for reason, _ in reasons.most_common(_MOST_REASONS)]
    more = len(reasons) - len(shown)
    return f" ({'; '.join(shown)}{f'; and {more} more' if more > 0 else ''})" if shown else ""


def said(signals: Signals, state_dir: Path, name: str) -> str:
    """The line. Writes the file, whose name begins with the time."""
    outcomes: Counter[str] = Counter()
    for tally in signals.metrics.tallies.values():
        outcomes.update(tally.outcomes())
    page = signals.sessions.page(limit=_MOST_EXPLAINED)
    told = [session for session in page.items if session.outcome not in _QUIET or session.code is not None]
    line = summary(outcomes, told, signals)
    if not told:
        return line
    try:
        return f"{line}; explained in {_written(told, signals, state_dir / FOLDER, name)}"
    except OSError as error:
        return f"{line}; the explanations cannot be written to {state_dir / FOLDER}: {error.strerror}"


def _written(sessions: list[Session], signals: Signals, folder: Path, name: str) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in sorted(folder.glob("*.txt"))[: -_FILES_KEPT + 1]:
        old.unlink(missing_ok=True)
    path = folder / f"{name}-{os.getpid()}.txt"
    path.write_text("\n".join(map(signals.explain, reversed(sessions))))
    return path
