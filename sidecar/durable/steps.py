"""What the wall clock was set to while the sidecar ran, so that nothing looks older or younger because of it.

Law: what is kept is stamped and aged by a clock that goes on evenly (`clock.steady`). When the wall clock has been
stepped this one follows in the moment in which all that was stamped in this run is shifted by as much, in one
transaction. A dead letter's number is made of its time and stays: steps are remembered, and its age is counted by the
clock that stamped it. Whatever an earlier run has stamped was right as far as anybody knows, and is left alone.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from sidecar import clock
from sidecar.durable import rows
from sidecar.durable.store import Store
from sidecar.durable.trouble import NotKept

_NAME = "clock_steps"
_MOST = 64
_TICK = 0.001
"""Stamps are whole milliseconds."""
_AHEAD = 604_800.0
"""What is planned lies at most so far ahead."""


class Step(NamedTuple):
    """Stamps from `since` to `until` were made by a clock that was then set forward by `by` seconds."""

    since: float
    until: float
    by: float


class Steps:
    """Those that are known of this store."""

    def __init__(self) -> None:
        self.known: tuple[Step, ...] = ()

    def read(self, connection: sqlite3.Connection) -> None:
        """When the store is opened."""
        found = connection.execute("SELECT value FROM meta WHERE name = ?", (_NAME,)).fetchone()
        self.known = () if found is None else tuple(Step(*one) for one in json.loads(found[0]))

    def correction(self, stamp: float) -> float:
        """How many seconds the clock that made this stamp was behind."""
        return sum(step.by for step in self.known if step.since <= stamp <= step.until)

    def older_than(self, bound: float) -> Iterator[tuple[float, float]]:
        """Ranges of stamps, from and up to, that were made before this moment of now."""
        low = float("-inf")
        for since, last in sorted({(step.since, step.until) for step in self.known}):
            until = last + _TICK
            if low < min(since, bound):
                yield low, min(since, bound)
            # All of one range was made by the same clock, but for steps within steps, where the earlier part decides.
            latest = bound - max(self.correction(since), self.correction(last))
            if since < min(until, latest):
                yield since, min(until, latest)
            low = max(low, until)
        if low < bound:
            yield low, bound

    async def follow(self, store: Store) -> None:
        """The wall clock is somewhere else: go there, and take what this run has stamped along. Raises NotKept, and
        then nothing has moved."""
        steady, moved = clock.steady, list[float]()

        def work(connection: sqlite3.Connection) -> None:
            since, until, by = steady.began, steady(), steady.behind()
            known = (*self.known, Step(since, until, by))[-_MOST:]
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_NAME, json.dumps(known)))
            _shift(connection, since, until, by)
            steady.step(by)  # here, in the thread that writes: what comes next is stamped anew
            moved.append(by)
            self.known = known

        before = self.known
        try:
            await store.write(work)
        except NotKept:
            for by in moved:
                steady.step(-by)
            self.known = before
            raise


def _shift(connection: sqlite3.Connection, since: float, until: float, by: float) -> None:
    connection.execute(
        "UPDATE idempotency SET started_at = started_at + ?, expires_at = expires_at + ? "
        "WHERE started_at BETWEEN ? AND ?",
        (by, by, since, until),
    )
    stamped = [("dead_letters", "done_at"), ("jobs", "created_at"), ("jobs", "finished_at")]
    stamped += [("deliveries", column) for column in ("first_started_at", "started_at", "notified_at")]
    planned = [("deliveries", "next_at"), ("dead_letters", "lease_until")]
    for (table, column), ahead in [*((one, 0.0) for one in stamped), *((one, _AHEAD) for one in planned)]:
        connection.execute(
            f"UPDATE {table} SET {column} = {column} + ? WHERE {column} BETWEEN ? AND ?", (by, since, until + ahead)
        )
    low, high = rows.seq_range(since, until)
    connection.execute(  # judged anew, by the clock that stamped them
        "UPDATE dead_letters SET verdict_until = 0 WHERE verdict_until IS NOT NULL AND seq BETWEEN ? AND ?", (low, high)
    )
