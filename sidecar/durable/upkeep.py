"""What has to be done to dead letters now and then: judge anew, let go of what may go, check everything.

Law: small steps, so that live writes never wait long. An entry that still waits is let go only when `retention` says
so, and is counted as lost. What is replayed or discarded goes after `keep_completed`, which is no loss. The check
reads every byte that was ever promised; what is wrong is set aside, what merely disagrees is repaired.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from sidecar import clock
from sidecar.durable import rows
from sidecar.durable.deadletter import DAMAGED_BODY, DeadLetters
from sidecar.durable.payloads import Sealed
from sidecar.durable.rows import Row
from sidecar.durable.trouble import Damaged

_PER_STEP = 200
# The file shrinks when a quarter of it, and 4 MB, are free: at most 8 MB at a time, 1 MB per commit.
_MUCH, _PAGES_PER_STEP, _STEPS_AT_ONCE = 1_024, 256, 8
_SEALED = "head, body, body_file, response, original_head, original_body, original_body_file"


@dataclass(slots=True)
class Checked:
    """What a check found."""

    entries: int = 0
    damaged: int = 0
    repaired: int = 0
    which: list[tuple[str, str]] = field(default_factory=list)
    """What is damaged, also what was known to be: id and why."""


@dataclass(slots=True)
class _Some:
    """What one step of a check found."""

    seqs: list[int]
    damaged: list[tuple[str, str]] = field(default_factory=list)
    known: list[tuple[str, str]] = field(default_factory=list)
    whole_again: list[str] = field(default_factory=list)
    disagreeing: list[int] = field(default_factory=list)


class Upkeep:
    """Every method can be called at any time."""

    def __init__(self, letters: DeadLetters) -> None:
        self._letters = letters

    # ---- verdicts ------------------------------------------------------------------------------------------------

    async def judge_due(self) -> int:
        """Entries whose verdict time has changed, so that filters and counts say what is true now."""
        judged = 0
        while True:
            some = await self._letters.store.write(self._judge_some)
            judged += some
            if some < _PER_STEP:
                return judged

    def _judge_some(self, connection: sqlite3.Connection) -> int:
        due = connection.execute(
            "SELECT seq FROM dead_letters WHERE verdict_until <= ? ORDER BY verdict_until LIMIT ?",
            (self._letters.now(), _PER_STEP),
        ).fetchall()
        for (seq,) in due:
            self._judge(connection, seq)
        return len(due)

    def _judge_these(self, connection: sqlite3.Connection, seqs: list[int]) -> None:
        for seq in seqs:
            self._judge(connection, seq)

    def _judge(self, connection: sqlite3.Connection, seq: int) -> None:
        try:
            row = rows.load_seq(connection, seq)
        except Damaged:
            # Set aside when it is read; until then it must not come up here again and again.
            connection.execute("UPDATE dead_letters SET verdict_until = NULL WHERE seq = ?", (seq,))
            return
        if row is not None:
            rows.save(connection, row, self._letters.judge)

    async def judge_all(self, upstream: str | None = None) -> int:
        """After the settings changed: everything that waits, or that of one upstream."""
        judged, after = 0, -1
        while True:
            seqs = await self._letters.store.read(partial(_waiting, upstream=upstream, after=after))
            if not seqs:
                return judged
            await self._letters.store.write(partial(self._judge_these, seqs=seqs))
            judged, after = judged + len(seqs), seqs[-1]

    # ---- letting go ----------------------------------------------------------------------------------------------

    async def expire(self) -> dict[str, int]:
        """Returns how many were `done` long enough, and how many were `lost` to retention."""
        settings, now = self._letters.settings, self._letters.now()
        done = await self._remove(
            "SELECT seq FROM dead_letters WHERE done_at <= ? ORDER BY done_at LIMIT ?", now - settings.keep_completed
        )
        lost = 0
        if settings.retention is not None:
            for since, until in self._letters.steps.older_than(now - settings.retention):
                lost += await self._remove(
                    "SELECT seq FROM dead_letters JOIN facets ON facets.id = facet "
                    "WHERE seq >= ? AND seq < ? AND status IN ('pending', 'failed') ORDER BY seq LIMIT ?",
                    *rows.seq_range(max(0.0, since), until),
                )
        for _ in range(lost):
            self._letters.counts.dead_letter_evicted("ttl")
        if lost:
            self._letters.store.report(
                "sidecar.dlq.expired",
                f"{lost} dead letters were dropped unreplayed because `dead_letter.retention` says so",
            )
        return {"done": done, "lost": lost}

    async def _remove(self, statement: str, *bounds: float) -> int:
        removed = 0
        while True:
            some, files = await self._letters.store.write(
                lambda connection: _remove_some(connection, statement, bounds)
            )
            await self._letters.bodies.remove(files)
            removed += some
            if some < _PER_STEP:
                return removed

    async def shrink(self) -> int:
        """Give room back that was freed, where it is much: in small steps, a bounded number of them. How many pages."""
        freed = 0
        for _ in range(_STEPS_AT_ONCE):
            pages, free = await self._letters.store.read(_room)
            if free < _MUCH or free * 4 < pages:
                break
            freed += await self._letters.store.write(_give_back)
        return freed

    # ---- checking ------------------------------------------------------------------------------------------------

    async def check(self, pace: Callable[[float], Awaitable[None]] | None = None) -> Checked:
        """Read and verify everything: the file, digests, seals, body files, copies in columns, counts. `pace` is
        awaited between steps with the seconds the last one took."""
        found, after = Checked(), -1
        if await self._letters.store.problem() is not None:
            found.repaired += 1
            await self._letters.store.write(_make_indices_anew)
            problem = await self._letters.store.problem()
            if problem is not None:
                self._letters.store.damaged(problem)
        while True:
            begun = clock.monotonic()
            some = await self._letters.store.read(partial(self._check_some, after=after))
            for dlq_id, why in some.damaged:
                await self._letters.set_aside(dlq_id, why)
            for dlq_id in some.whole_again:
                await self._letters.take_back(dlq_id)
            if some.disagreeing:
                await self._letters.store.write(partial(self._judge_these, seqs=some.disagreeing))
            found.entries += len(some.seqs)
            found.damaged += len(some.damaged)
            found.repaired += len(some.disagreeing) + len(some.whole_again)
            found.which += [*some.damaged, *some.known]
            if not some.seqs:
                break
            after = some.seqs[-1]
            if pace is not None:
                await pace(clock.monotonic() - begun)
        found.repaired += await self._letters.store.write(_repair_counts)
        return found

    def _check_some(self, connection: sqlite3.Connection, after: int) -> _Some:
        some = connection.execute(
            f"SELECT d.seq, d.dlq_id, upstream, error_class, verdict, status, {_SEALED} FROM dead_letters d "
            "LEFT JOIN facets ON facets.id = facet LEFT JOIN payloads p ON p.seq = d.seq WHERE d.seq > ? "
            "ORDER BY d.seq LIMIT 50",
            (after,),
        ).fetchall()
        found = _Some([row[0] for row in some])
        for seq, dlq_id, upstream, error_class, verdict, status, *sealed in some:
            row: Row | None = None
            try:
                row = rows.load_seq(connection, seq)
                assert row is not None
                entry = row.entry
                if sealed[0] is None:
                    raise Damaged(f"what was sealed with {dlq_id} is missing")
                self._letters.payloads.check(entry, cast(Sealed, tuple(sealed)))
            except Damaged as problem:
                known = row is not None and row.entry.body.get("note") == DAMAGED_BODY
                (found.known if known else found.damaged).append((dlq_id, problem.message))
                continue
            if entry.body["note"] == DAMAGED_BODY:
                found.whole_again.append(dlq_id)
            if (upstream, error_class, verdict, status) != (
                entry.upstream,
                entry.error_class,
                entry.verdict,
                entry.status,
            ):
                found.disagreeing.append(seq)
        return found


def _room(connection: sqlite3.Connection) -> tuple[int, int]:
    """Pages in all, and those of them that hold nothing."""
    (pages,), (free,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count"))
    return pages, free


def _give_back(connection: sqlite3.Connection) -> int:
    before = connection.execute("PRAGMA freelist_count").fetchone()[0]
    for _ in range(_PAGES_PER_STEP):
        connection.execute("PRAGMA incremental_vacuum(1)")  # one page a step, and Python steps once
    return int(before - connection.execute("PRAGMA freelist_count").fetchone()[0])


def _waiting(connection: sqlite3.Connection, upstream: str | None, after: int) -> list[int]:
    condition, parameters = (" AND upstream = ?", [upstream]) if upstream is not None else ("", [])
    found = connection.execute(
        "SELECT seq FROM dead_letters JOIN facets ON facets.id = facet WHERE seq > ? "
        f"AND status IN ('pending', 'failed'){condition} ORDER BY seq LIMIT ?",
        (after, *parameters, _PER_STEP),
    )
    return [seq for (seq,) in found]


def _remove_some(connection: sqlite3.Connection, statement: str, bounds: tuple[float, ...]) -> tuple[int, list[str]]:
    some = connection.execute(statement, (*bounds, _PER_STEP)).fetchall()
    return len(some), [name for (seq,) in some for name in rows.delete(connection, seq)]


def _make_indices_anew(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("REINDEX")
    except sqlite3.IntegrityError:
        pass  # more than an index is wrong: the next look at the file says so


def _repair_counts(connection: sqlite3.Connection) -> int:
    """Counts are kept by triggers; should they ever be wrong, they are made anew."""
    wrong = connection.execute(
        "SELECT id, coalesce(c, 0), coalesce(b, 0) FROM facets LEFT JOIN "
        "(SELECT facet, count(*) AS c, sum(size) AS b FROM dead_letters GROUP BY facet) ON facet = id "
        "WHERE n <> coalesce(c, 0) OR bytes <> coalesce(b, 0)"
    ).fetchall()
    for facet, count, size in wrong:
        connection.execute("UPDATE facets SET n = ?, bytes = ? WHERE id = ?", (count, size, facet))
    (total,) = connection.execute("SELECT coalesce(sum(bytes), 0) FROM facets").fetchone()
    off = connection.execute(
        "UPDATE totals SET bytes = ? WHERE name = 'dead_letters' AND bytes <> ?", (total, total)
    ).rowcount
    return len(wrong) + off
