"""What a live success means for the entries that wait: one with its key is done, others are superseded or stale.

Law: only entries that failed before the call began are touched, and one that is being replayed at this moment is
never closed under its replay's feet: it only learns that it is superseded. So does one whose key came back with other
credentials: its caller may have renewed them, and then it must not be executed again; or it was somebody else, and
then it must not be closed.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from sidecar.durable import rows
from sidecar.durable.deadletter import DeadLetters
from sidecar.durable.entry import ms
from sidecar.durable.intake import Prints, prints_of, short
from sidecar.durable.rows import Row
from sidecar.durable.trouble import Damaged
from sidecar.durable.workflow import MOVES, WAITING
from sidecar.policy.resend import READS

_MOST_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Success:
    """A live call that succeeded."""

    upstream: str
    method: str
    url: str
    body_sha256: str
    started_at: float
    """Wall time."""
    api_key_id: str = ""
    idempotency_key: str | None = None
    session_id: str = ""


class Successes:
    """Told about live successes. `worth_telling` first: it costs nothing and is nearly always no."""

    def __init__(self, letters: DeadLetters) -> None:
        self._letters = letters

    def worth_telling(self, upstream: str, method: str, *, keyed: bool) -> bool:
        return upstream in self._letters.waiting and (keyed or method not in READS)

    async def tell(self, success: Success) -> list[str]:
        """The ids of entries that this closed."""
        return await self._letters.store.write(lambda connection: self._settle(connection, success))

    def _settle(self, connection: sqlite3.Connection, success: Success) -> list[str]:
        letters = self._letters
        prints = prints_of(
            letters.keyring,
            success.upstream,
            success.api_key_id,
            success.method,
            success.url,
            success.body_sha256,
            success.idempotency_key,
        )
        closed = []
        for seq in _candidates(connection, success, prints):
            try:
                row = rows.load_seq(connection, seq)
            except Damaged:
                continue  # set aside when it is read or scrubbed
            if row is None or row.entry.status not in WAITING or row.entry.last_failure_at > success.started_at:
                continue
            if self._learn(row, success, prints):
                closed.append(row.entry.dlq_id)
            rows.save(connection, row, letters.judge)
        return closed

    def _learn(self, row: Row, success: Success, prints: Prints) -> bool:
        """True if that closes the entry."""
        entry, at, session = row.entry, ms(self._letters.now()), success.session_id or None
        same_key = prints.key is not None and row.key_hash == short(prints.key)
        if same_key and entry.api_key_id == success.api_key_id and entry.status != "replaying":
            entry.status, entry.processed, entry.replayed_at = "completed", True, max(at, entry.last_attempt)
            entry.state = MOVES[entry.state, "succeed_elsewhere"]
            entry.happened(at, "succeeded_elsewhere", session=session)
            return True
        if same_key or entry.identity == prints.whole.hex():
            entry.superseded_at = at
            entry.happened(at, "superseded", session=session)
        else:
            entry.later_call_at = at
            entry.happened(at, "overtaken", session=session)
        return False


def _candidates(connection: sqlite3.Connection, success: Success, prints: Prints) -> list[int]:
    found: set[int] = set()
    for column, digest in (
        ("key_hash", prints.key),
        ("fingerprint", prints.whole),
        ("url_hash", None if success.method in READS else prints.url),
    ):
        if digest is not None:
            statement = f"SELECT seq FROM dead_letters WHERE {column} = ? ORDER BY seq LIMIT {_MOST_AT_ONCE}"
            found.update(seq for (seq,) in connection.execute(statement, (short(digest),)))
    return sorted(found)
